"""Reads named tensors from safetensors or GGUF files, under Hugging Face's names and in its layout.

A linear weight is `[out, in]` here, and rotary pairs are (d, d + D/2), whatever the file does.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, cast

import torch
from safetensors import safe_open
from torch import Tensor

from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.gguf_metadata import open_gguf
from bakehouse_replica.model.spec import ModelSpec
from bakehouse_replica.source import ModelFiles

# Imported where a file is opened: machines that serve folders of safetensors need no `gguf`.
if TYPE_CHECKING:
    from gguf import ReaderTensor

# Buffers that some checkpoints carry though they follow from the configuration.
_DERIVED = ("rotary_emb.inv_freq", "rope_freqs.weight")


class Checkpoint(Protocol):
    """The tensors of a model, read one at a time; a context manager that closes the files."""

    def unread(self) -> frozenset[str]:
        """The file's names of the weights that nobody has read yet."""
        ...

    def read(self, name: str) -> Tensor:
        """The tensor `name`, on the CPU, in the dtype of the file or float32; `StartupError` if absent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_checkpoint(files: ModelFiles, spec: ModelSpec) -> Checkpoint:
    """The checkpoint of a model in whichever format it has."""
    if files.is_gguf:
        return GGUFCheckpoint(files.path, spec)
    return SafetensorsCheckpoint(files.weight_paths)


class SafetensorsCheckpoint:
    """One or more mapped safetensors files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._stack = ExitStack()
        self._reader_of: dict[str, safe_open] = {}
        self._read: set[str] = set()

    def __enter__(self) -> Self:
        for path in self._paths:
            reader = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            self._reader_of.update(dict.fromkeys(reader.keys(), reader))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader_of.clear()
        self._stack.close()

    def unread(self) -> frozenset[str]:
        """The weights that nobody has read yet."""
        return frozenset(name for name in self._reader_of.keys() - self._read if not name.endswith(_DERIVED))

    def read(self, name: str) -> Tensor:
        """The tensor `name` in the dtype of the file."""
        if name not in self._reader_of:
            raise StartupError(f"the safetensors files lack {name}")
        self._read.add(name)
        return cast(Tensor, self._reader_of[name].get_tensor(name))  # type: ignore[no-untyped-call]


class GGUFCheckpoint:
    """A mapped GGUF file whose tensors are dequantised to float32 as they are read."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self._path = path
        self._spec = spec
        from gguf import MODEL_ARCH, get_tensor_name_map  # see above

        self._names = get_tensor_name_map(MODEL_ARCH.LLAMA, spec.n_layers)
        self._tensor_of: dict[str, ReaderTensor] = {}
        self._read: set[str] = set()

    def __enter__(self) -> Self:
        self._tensor_of = {tensor.name: tensor for tensor in open_gguf(self._path).tensors}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tensor_of.clear()  # the reader's mapping goes with its last tensor

    def unread(self) -> frozenset[str]:
        """The weights, by their GGUF names, that nobody has read yet."""
        return frozenset(name for name in self._tensor_of.keys() - self._read if not name.endswith(_DERIVED))

    def read(self, name: str) -> Tensor:
        """The tensor `name` in float32."""
        from gguf.quants import dequantize  # see above

        gguf_name = str(self._names.get_name(name, (".weight", ".bias")))
        stored = self._tensor_of.get(gguf_name)
        if stored is None:
            raise StartupError(f"{self._path} lacks {gguf_name}, which holds {name}")
        self._read.add(gguf_name)
        # A copy, because a float32 tensor comes as a view of the mapped, read-only file.
        tensor = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())
        if ".q_proj." in name:
            return half_split_rows(tensor, self._spec.n_heads)
        if ".k_proj." in name:
            return half_split_rows(tensor, self._spec.n_kv_heads)
        return tensor


def half_split_rows(weight: Tensor, n_heads: int) -> Tensor:
    """Undo llama.cpp's order of query and key rows: interleaved pairs (2i, 2i+1) become (i, i + D/2)."""
    pairs = weight.reshape(n_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
