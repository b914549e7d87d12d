"""Which weight of a decoder splits along which axis where several ranks share it: a table beside the model.

Every rank has whole heads, so that attention needs no word from the others; the matrix after it, and the one that
ends the feed-forward network, are split by rows, so that each rank's product is a summand of the whole one. The
residual stream (E) is never split: a rotation of it (`residual_rotation`) changes nothing here.

Shape legend in `bakehouse_kernels.layout`; X is the fused width of query, key and value, V the vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.model.spec import ModelSpec

# Tiles of kernels are as wide; where a length is a multiple of it, so is each rank's share.
_UNIT = 16


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` ranks that share a decoder, counted from 0."""

    rank: int
    size: int


UNDIVIDED = Shard(rank=0, size=1)


class _Along(StrEnum):
    """What stands along an axis, and how ranks share it."""

    QUERY = "query heads"
    KEY = "key or value heads"
    INNER = "feed-forward width"
    VOCABULARY = "vocabulary"


@dataclass(frozen=True, slots=True)
class _Split:
    """The axis that is split, and what stands along it end to end, each part split for itself."""

    axis: int
    parts: tuple[_Along, ...]


_QKV = (_Along.QUERY, _Along.KEY, _Along.KEY)
_GATE_UP = (_Along.INNER, _Along.INNER)
_TABLE: Mapping[str, _Split] = {
    "embedding_VE": _Split(0, (_Along.VOCABULARY,)),
    "head_VE": _Split(0, (_Along.VOCABULARY,)),
    "qkv_EX": _Split(1, _QKV),
    "qkv_bias_X": _Split(0, _QKV),
    "output_QE": _Split(0, (_Along.QUERY,)),
    "gate_up_EF2": _Split(1, _GATE_UP),
    "gate_up_bias_F2": _Split(0, _GATE_UP),
    "down_FE": _Split(0, (_Along.INNER,)),
}
# Added once, to the sum of all ranks' products.
_FIRST_RANK_ALONE = frozenset({"output_bias_E", "down_bias_E"})


class Sliceable(Protocol):
    """A tensor in memory, or one in a file of which no more is read than what is asked for."""

    def __getitem__(self, index: slice | tuple[slice, ...], /) -> Tensor: ...


def check_sizes(spec: ModelSpec, size: int) -> None:
    """Raises `StartupError`, which names the sizes that would work, where `size` ranks cannot share the heads."""
    if _shares_heads(spec, size):
        return
    fitting = [str(n) for n in range(1, spec.n_heads + 1) if _shares_heads(spec, n)]
    choices = f"{', '.join(fitting[:-1])} or {fitting[-1]}" if len(fitting) > 1 else f"only {fitting[0]}"
    raise StartupError(
        f"--tensor-parallel is {size}, among which the model's {spec.n_heads} query heads and {spec.n_kv_heads} "
        f"key-value heads do not divide; {choices} would work"
    )


def _shares_heads(spec: ModelSpec, size: int) -> bool:
    shares_keys = spec.n_kv_heads % size == 0 or size % spec.n_kv_heads == 0
    return spec.n_heads % size == 0 and shares_keys


def local_spec(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """What one rank computes of a decoder that `check_sizes` lets pass; the vocabulary is still the whole one."""
    return replace(
        spec,
        n_heads=spec.n_heads // shard.size,
        n_kv_heads=max(1, spec.n_kv_heads // shard.size),
        feed_forward_size=len(_share(spec.feed_forward_size, shard)),
    )


def own_tokens(n_vocabulary: int, shard: Shard) -> range:
    """The token ids whose embedding and logits are this rank's."""
    return _share(n_vocabulary, shard)


def own_ranges(name: str, spec: ModelSpec, shard: Shard) -> tuple[int, tuple[range, ...]] | None:
    """The axis along which a weight of the whole decoder `spec` is split, and the rank's ranges of it in order.

    None for a weight of which each rank has the whole. `name` is a field of `DecoderWeights` or `LayerWeights`.
    """
    split = _TABLE.get(name)
    if split is None:
        return None
    ranges, begin = [], 0
    for along in split.parts:
        length, own = _along(along, spec, shard)
        ranges.append(range(begin + own.start, begin + own.stop))
        begin += length
    return split.axis, tuple(ranges)


def cut(name: str, whole: Sliceable, spec: ModelSpec, shard: Shard) -> Tensor | None:
    """The rank's part of a weight, in memory of its own unless it is the whole; None where it has none of it."""
    if name in _FIRST_RANK_ALONE and shard.rank > 0:
        return None
    found = own_ranges(name, spec, shard) if shard.size > 1 else None
    if found is None:
        return whole[:]
    axis, ranges = found
    before = (slice(None),) * axis
    return torch.cat([whole[(*before, slice(own.start, own.stop))] for own in ranges], dim=axis)


def _along(along: _Along, spec: ModelSpec, shard: Shard) -> tuple[int, range]:
    """How long a part is, and the rank's range of it."""
    match along:
        case _Along.QUERY:
            n_own = spec.n_heads // shard.size
            return spec.n_heads * spec.head_dim, _heads(shard.rank * n_own, n_own, spec)
        case _Along.KEY:
            # Where there are more ranks than heads, as many neighbours have copies of the same one.
            first = shard.rank * spec.n_kv_heads // shard.size
            n_own = max(1, spec.n_kv_heads // shard.size)
            return spec.n_kv_heads * spec.head_dim, _heads(first, n_own, spec)
        case _Along.INNER:
            return spec.feed_forward_size, _share(spec.feed_forward_size, shard)
        case _Along.VOCABULARY:
            return spec.vocabulary_size, _share(spec.vocabulary_size, shard)


def _heads(first: int, n_heads: int, spec: ModelSpec) -> range:
    return range(first * spec.head_dim, (first + n_heads) * spec.head_dim)


def _share(length: int, shard: Shard) -> range:
    """The rank's share of `length`; no two ranks' differ by more than a unit."""
    unit = _UNIT if length % _UNIT == 0 and length >= _UNIT * shard.size else 1
    n_units = length // unit
    return range(unit * (shard.rank * n_units // shard.size), unit * ((shard.rank + 1) * n_units // shard.size))
