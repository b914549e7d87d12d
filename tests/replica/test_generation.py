"""End ids and sampling defaults as the model's authors wrote them."""

import json
import shutil
from pathlib import Path

import pytest
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.core.types import ModelSource
from bakehouse_replica.generation import GenerationDefaults, generation_defaults
from bakehouse_replica.source import open_source
from gguf_files import write_gguf
from tiny_llama import random_model, tiny_config

SAMPLING: dict[str, object] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05}


def defaults_of(
    tiny: Path, tmp_path: Path, *, config: dict[str, object], generation: dict[str, object] | None
) -> GenerationDefaults:
    folder = shutil.copytree(tiny, tmp_path / "model")
    base = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(base | config))
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return generation_defaults(open_source(ModelSource(model=str(folder)), cache_root=tmp_path))


def test_every_end_id_of_both_files_counts(tiny_llama_folder: Path, tmp_path: Path) -> None:
    generation: dict[str, object] = {"eos_token_id": [9, 4, 2], "bos_token_id": 0}
    found = defaults_of(tiny_llama_folder, tmp_path, config={"eos_token_id": 7}, generation=generation)
    assert found == GenerationDefaults(eos_token_ids=(2, 4, 7, 9), bos_token_id=0)


def test_sampling_counts_where_the_model_asks_to_be_sampled(tiny_llama_folder: Path, tmp_path: Path) -> None:
    generation = {**SAMPLING, "do_sample": True, "repetition_penalty": 1.1}
    found = defaults_of(tiny_llama_folder, tmp_path, config={}, generation=generation)
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.6, 20, 0.95, 0.05)
    assert found.repetition_penalty == 1.1


def test_without_do_sample_the_numbers_are_leftovers(tiny_llama_folder: Path, tmp_path: Path) -> None:
    found = defaults_of(tiny_llama_folder, tmp_path, config={}, generation=dict(SAMPLING))
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (None, None, None, None)


def test_a_top_k_of_zero_is_none_at_all(tiny_llama_folder: Path, tmp_path: Path) -> None:
    found = defaults_of(tiny_llama_folder, tmp_path, config={}, generation={"do_sample": True, "top_k": 0})
    assert found.top_k is None


def test_a_model_without_a_generation_config_ends_as_its_config_says(
    tiny_llama_folder: Path, tmp_path: Path
) -> None:
    found = defaults_of(tiny_llama_folder, tmp_path, config={"eos_token_id": None}, generation=None)
    assert found == GenerationDefaults(eos_token_ids=(), bos_token_id=1)


def test_a_broken_generation_config_is_named(tiny_llama_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_llama_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text("{")
    files = open_source(ModelSource(model=str(folder)), cache_root=tmp_path)
    with pytest.raises(StartupError, match=r"generation_config\.json is not valid JSON"):
        generation_defaults(files)


def test_a_gguf_file_ends_at_its_end_of_text_and_its_end_of_turn(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(tiny_config()))
    found = generation_defaults(open_source(ModelSource(model=str(path)), cache_root=tmp_path))
    assert found == GenerationDefaults(eos_token_ids=(2, 7), bos_token_id=1)
