"""A decoder's weights, converted once from any checkpoint and mapped from the cache afterwards.

Shape legend in `bakehouse_kernels.layout`; X is the fused query, key and value width (N + 2H)·D.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from bakehouse_replica.cache_files import write_whole
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.model.checkpoint import Checkpoint, open_checkpoint
from bakehouse_replica.model.dummy_weights import dummy_tensors
from bakehouse_replica.model.residual_rotation import ResidualRotation
from bakehouse_replica.model.sharding import UNDIVIDED, Shard, Sliceable, cut
from bakehouse_replica.model.spec import ModelSpec
from bakehouse_replica.source import ModelFiles

logger = logging.getLogger(__name__)

Progress = Callable[[float], None]
"""Is told the share of the work that is done, from 0 to 1."""

Tensors = dict[str, Tensor]
"""By the names that `convert` gives."""

_FORMAT = 1  # grows when names or layouts below change


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Matrices are `[in, out]` contiguous; query, key and value are fused, and so are gate and up."""

    attention_norm_E: Tensor
    qkv_EX: Tensor
    output_QE: Tensor
    feed_forward_norm_E: Tensor
    gate_up_EF2: Tensor
    down_FE: Tensor
    qkv_bias_X: Tensor | None = None
    output_bias_E: Tensor | None = None
    gate_up_bias_F2: Tensor | None = None
    down_bias_E: Tensor | None = None
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A whole decoder. `head_VE` is `embedding_VE` itself where the two are tied and not rotated."""

    embedding_VE: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_E: Tensor
    head_VE: Tensor


def load_weights(
    files: ModelFiles,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    rotated: bool = False,
    shard: Shard = UNDIVIDED,
    on_progress: Progress | None = None,
) -> DecoderWeights:
    """The weights of a model, from the cache where an earlier start has left them there.

    `rotated`: as `residual_rotation` leaves them, which is done and cached in float32. On the CPU tensors of the
    cached dtype are views of the mapped file, so all replicas of a machine share their memory. With a `shard` they
    are that rank's parts, of which nothing else is read, in memory of their own, each tensor moved before the next
    is read.
    Raises `StartupError` where the checkpoint lacks a tensor, has one more, or has one of another shape. Dummy
    weights are made on `device`, always the same ones there, and neither rotated nor cached.
    """
    part = _Part(spec, shard, device, dtype)
    if files.has_dummy_weights:
        return assembled(dummy_tensors(spec, dtype=dtype, device=device, part_of=part.of_one), spec)
    cached_dtype = torch.float32 if rotated else dtype
    kind = f"{str(cached_dtype).removeprefix('torch.')}{'-rotated' if rotated else ''}"
    cached = files.cache_dir / f"weights-{_FORMAT}-{kind}.safetensors"

    def make() -> Tensors:
        return convert(files, spec, dtype=cached_dtype, rotated=rotated, on_progress=on_progress)

    tensors = _load_cached(cached, part) or _convert_once(make, cached, part)
    return assembled(tensors, spec)


class _Part:
    """What one rank takes of all weights."""

    def __init__(self, spec: ModelSpec, shard: Shard, device: torch.device, dtype: torch.dtype) -> None:
        self._spec = spec
        self._shard = shard
        self._device = device
        self._dtype = dtype

    def of_one(self, name: str, whole: Sliceable) -> Tensor | None:
        own = cut(name.rpartition(".")[2], whole, self._spec, self._shard)
        return None if own is None else own.to(self._device, self._dtype)

    def of_file(self, path: Path) -> Tensors:
        if self._shard.size == 1:
            return self.of(load_file(path))
        with safe_open(path, framework="pt") as file:
            names: list[str] = file.keys()
            return self._cut({name: file.get_slice(name) for name in names})

    def of(self, tensors: Tensors) -> Tensors:
        if self._shard.size > 1:
            return self._cut(tensors)
        return {name: tensor.to(self._device, self._dtype) for name, tensor in tensors.items()}

    def _cut(self, whole: Mapping[str, Sliceable]) -> Tensors:
        parts = {}
        for name, stored in whole.items():
            own = self.of_one(name, stored)
            if own is not None:
                parts[name] = own
        return parts


def _load_cached(path: Path, part: _Part) -> Tensors | None:
    if not path.is_file():
        return None
    try:
        return part.of_file(path)
    except SafetensorError as error:
        logger.warning("%s is damaged and will be made again: %s", path, error)
        return None


def _convert_once(make: Callable[[], Tensors], cached: Path, part: _Part) -> Tensors:
    """Convert under a lock: of replicas that start together one works and the others map its file."""
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{cached}.lock")
        lock.acquire()
    except OSError as error:
        logger.warning("the cache folder %s cannot be used: %s", cached.parent, error)
        return part.of(make())
    try:
        made_meanwhile = _load_cached(cached, part)
        if made_meanwhile is not None:
            return made_meanwhile
        for leftover in cached.parent.glob(f".{cached.name}.*"):  # of a start that was killed
            leftover.unlink()
        tensors = make()
        is_cached = write_whole(cached, lambda path: save_file(tensors, path))
        return part.of_file(cached) if is_cached else part.of(tensors)
    finally:
        lock.release()


def convert(
    files: ModelFiles,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    rotated: bool = False,
    on_progress: Progress | None = None,
) -> dict[str, Tensor]:
    """The checkpoint's tensors in the decoder's layout, by the names that `load_weights` caches them under.

    `rotated` needs float32.
    """
    rotation = ResidualRotation(spec.hidden_size) if rotated else None
    tensors: dict[str, Tensor] = {}
    with open_checkpoint(files, spec) as checkpoint:
        read = _Reader(checkpoint, files.name, dtype)
        width, vocabulary = spec.hidden_size, spec.vocabulary_size
        tensors["embedding_VE"] = read.tensor("model.embed_tokens.weight", vocabulary, width)
        tensors["final_norm_E"] = read.tensor("model.norm.weight", width)
        if not spec.has_tied_head:
            tensors["head_VE"] = read.tensor("lm_head.weight", vocabulary, width)
        if rotation is not None:
            embedding_VE = tensors["embedding_VE"]
            head_VE = tensors.get("head_VE", embedding_VE)
            tensors = rotation.turn_ends(embedding_VE, tensors["final_norm_E"], head_VE)
        for layer in range(spec.n_layers):
            converted = _convert_layer(read, spec, f"model.layers.{layer}")
            if rotation is not None:
                converted = rotation.turn_layer(converted)
            tensors.update({f"layers.{layer}.{name}": tensor for name, tensor in converted.items()})
            if on_progress is not None:
                on_progress((layer + 1) / spec.n_layers)
        unread = checkpoint.unread() - ({"lm_head.weight"} if spec.has_tied_head else set())
    if unread:
        shown = ", ".join(sorted(unread)[:3])
        raise StartupError(
            f"model {files.name!r}: {len(unread)} tensors have no place in this decoder, such as {shown}"
        )
    return tensors


class _Reader:
    """Reads tensors of a checkpoint in the wanted dtype and checks their shapes."""

    def __init__(self, checkpoint: Checkpoint, model_name: str, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._model_name = model_name
        self._dtype = dtype

    def tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self._checkpoint.read(name)
        if tuple(tensor.shape) != shape:
            raise StartupError(
                f"model {self._model_name!r}: {name} has shape {tuple(tensor.shape)}, "
                f"but the configuration says {shape}"
            )
        return tensor.to(self._dtype).contiguous()

    def fused(self, prefix: str, parts: Mapping[str, int], n_in: int) -> Tensor:
        """The linear weights of `parts` (name → outputs) side by side, `[in, out]`."""
        weights = [self.tensor(f"{prefix}.{name}.weight", n_out, n_in) for name, n_out in parts.items()]
        return torch.cat(weights).t().contiguous()

    def fused_bias(self, prefix: str, parts: Mapping[str, int]) -> Tensor:
        return torch.cat([self.tensor(f"{prefix}.{name}.bias", n_out) for name, n_out in parts.items()])


def _convert_layer(read: _Reader, spec: ModelSpec, prefix: str) -> dict[str, Tensor]:
    width, inner = spec.hidden_size, spec.feed_forward_size
    n_query, n_key = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    attention, feed_forward = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = {"q_proj": n_query, "k_proj": n_key, "v_proj": n_key}
    gate_up = {"gate_proj": inner, "up_proj": inner}
    tensors = {
        "attention_norm_E": read.tensor(f"{prefix}.input_layernorm.weight", width),
        "qkv_EX": read.fused(attention, qkv, width),
        "output_QE": read.fused(attention, {"o_proj": width}, n_query),
        "feed_forward_norm_E": read.tensor(f"{prefix}.post_attention_layernorm.weight", width),
        "gate_up_EF2": read.fused(feed_forward, gate_up, width),
        "down_FE": read.fused(feed_forward, {"down_proj": width}, inner),
    }
    if spec.has_qkv_bias:
        tensors["qkv_bias_X"] = read.fused_bias(attention, qkv)
    if spec.has_output_bias:
        tensors["output_bias_E"] = read.fused_bias(attention, {"o_proj": width})
    if spec.has_feed_forward_bias:
        tensors["gate_up_bias_F2"] = read.fused_bias(feed_forward, gate_up)
        tensors["down_bias_E"] = read.fused_bias(feed_forward, {"down_proj": width})
    if spec.has_qk_norm:
        tensors["q_norm_D"] = read.tensor(f"{attention}.q_norm.weight", spec.head_dim)
        tensors["k_norm_D"] = read.tensor(f"{attention}.k_norm.weight", spec.head_dim)
    return tensors


def assembled(tensors: Mapping[str, Tensor], spec: ModelSpec) -> DecoderWeights:
    """The decoder whose tensors have the names that `convert` gives."""
    layers = []
    for layer in range(spec.n_layers):
        prefix = f"layers.{layer}."
        parts = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        layers.append(LayerWeights(**parts))
    embedding_VE = tensors["embedding_VE"]
    return DecoderWeights(
        embedding_VE=embedding_VE,
        layers=tuple(layers),
        final_norm_E=tensors["final_norm_E"],
        head_VE=tensors.get("head_VE", embedding_VE),
    )
