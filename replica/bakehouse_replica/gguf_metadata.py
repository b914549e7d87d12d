"""What a GGUF file says about its model: scalars, tensor shapes and rope factors, cached after the first read.

The `gguf` package walks every token of the vocabulary to read a header: 2.4 s for 49,152 tokens, hence the cache.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bakehouse_replica.cache_files import write_whole
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.source import ModelFiles

# Imported where a file is opened: machines that serve folders of safetensors need no `gguf`.
if TYPE_CHECKING:
    from gguf import GGUFReader

Scalar = str | int | float | bool

_CACHE_NAME = "gguf-metadata-1.json"  # the number grows when the format changes


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFMetadata:
    """`shapes` are outermost dimension first, as torch gives them. `rope_factors` divide the rope frequencies."""

    scalars: Mapping[str, Scalar]
    shapes: Mapping[str, tuple[int, ...]]
    rope_factors: tuple[float, ...] | None

    @property
    def architecture(self) -> str:
        """The architecture's name in GGUF, the prefix of its keys: `llama`."""
        return str(self.scalars["general.architecture"])

    def integer(self, key: str) -> int | None:
        """The whole number under `key`, None where the file does not give it."""
        value = self.scalars.get(key)
        return None if value is None else int(value)

    def number(self, key: str) -> float | None:
        """The number under `key`, None where the file does not give it."""
        value = self.scalars.get(key)
        return None if value is None else float(value)


def read_gguf_metadata(files: ModelFiles) -> GGUFMetadata:
    """The metadata of a GGUF model; `StartupError` where the file cannot be read."""
    cached = files.cache_dir / _CACHE_NAME
    if cached.is_file():
        parts = json.loads(cached.read_text())
        factors = parts["rope_factors"]
        return GGUFMetadata(
            scalars=parts["scalars"],
            shapes={name: tuple(shape) for name, shape in parts["shapes"].items()},
            rope_factors=None if factors is None else tuple(factors),
        )
    metadata = _parse(open_gguf(files.path))
    write_whole(cached, lambda path: _write_json(path, metadata))
    return metadata


def open_gguf(path: Path) -> "GGUFReader":
    """A reader over the mapped file; `StartupError` where it is no GGUF file or cut short."""
    from gguf import GGUFReader  # see above

    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise StartupError(f"{path} is not a readable GGUF file: {error}") from error


def _parse(reader: "GGUFReader") -> GGUFMetadata:
    from gguf import GGUFValueType  # see above

    scalars = {
        name: field.contents()
        for name, field in reader.fields.items()
        if field.types and field.types[0] is not GGUFValueType.ARRAY
    }
    factors = [tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight"]
    return GGUFMetadata(
        scalars=scalars,
        shapes={tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors},
        rope_factors=tuple(float(factor) for factor in factors[0]) if factors else None,
    )


def _write_json(path: Path, metadata: GGUFMetadata) -> None:
    path.write_text(json.dumps(asdict(metadata)))
