"""The cache as the attention of this device reads it: blocks laid out as panels of a tile's columns.

Keys stand `[P, H, K / C, D, C]`, so that a query times a panel gives the scores of C slots; values stand
`[P, H, D / C, K, C]`, so that the weights of a block's slots times a panel give C numbers of the result. C is the
width of a tile (`cpu.tile`); where it does not divide, the last panel has columns that nobody reads.
"""

import math
import mmap
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bakehouse_kernels.cpu.addresses import borrowed
from bakehouse_kernels.cpu.calls import NOTHING_WRONG, Cells, Kernel, Words, noting
from bakehouse_kernels.cpu.compile import compiled
from bakehouse_kernels.cpu.pool import shared, take
from bakehouse_kernels.cpu.recording import Caller
from bakehouse_kernels.cpu.tile import SHAPE
from bakehouse_kernels.layout import KVCache

Floats = NDArray[np.float32]

_COLUMNS = SHAPE.columns

# Below this many rows one thread is as fast.
MIN_SHARED_ROWS = 8
_TURN = 4  # rows that a thread takes at a time


class _Write(NamedTuple):
    """What is rotated and written, by rows; the layer's keys and values as the module describes them."""

    qkv_TND: Floats
    cos_TD: Floats
    sin_TD: Floats
    key: Floats
    value: Floats
    block_size: int
    slots_T: NDArray[np.int64]
    q_TND: Floats


def new_cache(*, n_layers: int, n_blocks: int, block_size: int, n_kv_heads: int, head_dim: int) -> KVCache:
    """An uninitialised cache. See `api.Ops.new_cache`."""
    key_shape = (n_blocks, n_kv_heads, -(-block_size // _COLUMNS), head_dim, _COLUMNS)
    value_shape = (n_blocks, n_kv_heads, -(-head_dim // _COLUMNS), block_size, _COLUMNS)
    return KVCache(
        key=tuple(_in_large_pages(key_shape) for _ in range(n_layers)),
        value=tuple(_in_large_pages(value_shape) for _ in range(n_layers)),
        block_size=block_size,
    )


def _in_large_pages(shape: tuple[int, ...]) -> Tensor:
    """An uninitialised tensor in pages of 2 MB where the system has them to give.

    Attention reads 8 KB here and 8 KB there: 32 rows at context 160 take 10.4 ms for 30 layers, with pages of 4 KB
    13.2, much of it for finding them.
    """
    n_bytes = math.prod(shape) * torch.float32.itemsize
    memory = mmap.mmap(-1, n_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)


def rope_and_write(
    qkv_TX: Tensor, cos_TD: Tensor, sin_TD: Tensor, cache: KVCache, layer: int, slots_T: Tensor, crew: Caller
) -> Tensor:
    """Rotate queries and keys, and write keys and values; the rotated queries. See `api.Ops.rope_and_write`."""
    key, value = cache.key[layer], cache.value[layer]
    n_kv_heads, head_dim = key.shape[1], key.shape[3]
    rows = (qkv_TX.shape[0], head_dim)
    qkv_TND = qkv_TX.contiguous().view(rows[0], qkv_TX.shape[1] // head_dim, head_dim)
    assert cos_TD.shape == sin_TD.shape == rows, f"cos {tuple(cos_TD.shape)}, sin {tuple(sin_TD.shape)} for {rows}"
    assert slots_T.dtype == torch.int64, f"slots are int64, not {slots_T.dtype}"
    q_TND = crew.empty(rows[0], qkv_TND.shape[1] - 2 * n_kv_heads, head_dim)
    call = _Write(
        qkv_TND.numpy(),
        cos_TD.contiguous().numpy(),
        sin_TD.contiguous().numpy(),
        key.numpy(),
        value.numpy(),
        cache.block_size,
        slots_T.contiguous().numpy(),
        q_TND.numpy(),
    )
    run = crew.run if rows[0] >= MIN_SHARED_ROWS else crew.run_alone
    wrong_slot = run(_ROPE_AND_WRITE, call)
    if wrong_slot != NOTHING_WRONG:
        raise IndexError(f"slot {slots_T[wrong_slot]} in a cache of {cache.n_blocks * cache.block_size}")
    return q_TND


def copy_blocks(cache: KVCache, source_C: Tensor, target_C: Tensor) -> None:
    """Copy blocks `source[i]` onto `target[i]` in all layers."""
    for layer in (*cache.key, *cache.value):
        layer.index_copy_(0, target_C, layer.index_select(0, source_C))


@compiled()
def _write_row(call: _Write, t: int) -> None:
    """Row `t`: its keys are 64 numbers in 64 lines of the caches, which is what takes the time."""
    qkv_TND, cos_TD, sin_TD, key, value, block_size, slots_T, q_TND = call
    n_queries, n_kv_heads, head_dim = q_TND.shape[1], key.shape[1], q_TND.shape[2]
    half = head_dim // 2
    for n in range(n_queries):
        for d in range(half):
            first, second = qkv_TND[t, n, d], qkv_TND[t, n, half + d]
            q_TND[t, n, d] = first * cos_TD[t, d] - second * sin_TD[t, d]
            q_TND[t, n, half + d] = second * cos_TD[t, half + d] + first * sin_TD[t, half + d]
    block, offset = slots_T[t] // block_size, slots_T[t] % block_size
    panel, column = offset // _COLUMNS, offset % _COLUMNS
    for h in range(n_kv_heads):
        n = n_queries + h
        for d in range(half):
            first, second = qkv_TND[t, n, d], qkv_TND[t, n, half + d]
            key[block, h, panel, d, column] = first * cos_TD[t, d] - second * sin_TD[t, d]
            key[block, h, panel, half + d, column] = second * cos_TD[t, half + d] + first * sin_TD[t, half + d]
        for d in range(head_dim):
            value[block, h, d // _COLUMNS, offset, d % _COLUMNS] = qkv_TND[t, n + n_kv_heads, d]


@compiled()
def _write_some_rows(call: _Write, taken: NDArray[np.int64]) -> None:
    """Rows as long as there are any."""
    own = _Write(
        borrowed(call.qkv_TND),
        borrowed(call.cos_TD),
        borrowed(call.sin_TD),
        borrowed(call.key),
        borrowed(call.value),
        call.block_size,
        borrowed(call.slots_T),
        borrowed(call.q_TND),
    )
    n_rows = len(own.slots_T)
    first = take(taken, _TURN)
    while first < n_rows:
        for t in range(first, min(first + _TURN, n_rows)):
            _write_row(own, t)
        first = take(taken, _TURN)


_share_rows = shared(_write_some_rows)


@compiled()
def _rope_and_write(cells: Cells, call: _Write) -> int:
    """Returns the first row whose slot is not in the cache, and writes nothing then; else `NOTHING_WRONG`."""
    n_slots = call.key.shape[0] * call.block_size
    for t in range(len(call.slots_T)):
        if not 0 <= call.slots_T[t] < n_slots:
            return t
    _share_rows(cells, call, np.zeros(1, np.int64))
    return NOTHING_WRONG


_note = noting(_rope_and_write)


@compiled()
def _note_rope_and_write(cells: Cells, call: _Write) -> tuple[int, Words]:
    return _note((cells, call))


_ROPE_AND_WRITE = Kernel(_rope_and_write, _note_rope_and_write)
