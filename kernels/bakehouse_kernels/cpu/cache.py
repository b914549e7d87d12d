"""The cache as the attention of this device reads it: blocks laid out as panels of a tile's columns.

Keys stand `[P, H, K / C, D, C]`, so that a query times a panel gives the scores of C slots; values stand
`[P, H, D / C, K, C]`, so that the weights of a block's slots times a panel give C numbers of the result. C is the
width of a tile (`cpu.tile`); where it does not divide, the last panel has columns that nobody reads.

Numbers are float32, or float16: then a finite one beyond ±65504 is kept as that, the largest there is; a NaN or an
infinity stays what it is.
"""

import math
import mmap
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bakehouse_kernels.cpu.addresses import int64_at
from bakehouse_kernels.cpu.calls import NOTHING_WRONG, Cells, Kernel, Words, noting
from bakehouse_kernels.cpu.compile import compiled
from bakehouse_kernels.cpu.pool import shared, take
from bakehouse_kernels.cpu.recording import Caller
from bakehouse_kernels.cpu.row_loops import (
    FLOAT_BYTES,
    HALF_BYTES,
    claim_lines,
    copy_row,
    halve_row,
    rotate_row,
    scatter_floats,
    scatter_halves,
)
from bakehouse_kernels.cpu.tile import SHAPE
from bakehouse_kernels.layout import KVCache

_COLUMNS = SHAPE.columns

# Below this many rows one thread is as fast.
MIN_SHARED_ROWS = 8
_TURN = 8  # rows that a thread takes at a time


class _Write(NamedTuple):
    """What is rotated and written, by rows: addresses and numbers."""

    n_rows: int
    qkv: int  # float32 [T, N + 2 * H, D]
    cos: int  # [T, D]
    sin: int
    slots: int  # int64 [T]
    q: int  # [T, N, D]
    key: int  # the layer's, as the module says
    value: int
    is_half: bool  # keys and values: float16
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_blocks: int
    block_size: int
    n_key_panels: int
    n_value_panels: int


def new_cache(
    *, n_layers: int, n_blocks: int, block_size: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> KVCache:
    """An uninitialised cache of numbers of `dtype`. See `api.Ops.new_cache`."""
    key_shape = (n_blocks, n_kv_heads, -(-block_size // _COLUMNS), head_dim, _COLUMNS)
    value_shape = (n_blocks, n_kv_heads, -(-head_dim // _COLUMNS), block_size, _COLUMNS)
    n_keys, n_values = math.prod(key_shape), math.prod(value_shape)
    room = _in_large_pages(n_layers * (n_keys + n_values), dtype)
    key_room, value_room = room[: n_layers * n_keys], room[n_layers * n_keys :]
    return KVCache(
        key=tuple(key_room.view(n_layers, *key_shape)),
        value=tuple(value_room.view(n_layers, *value_shape)),
        block_size=block_size,
    )


def _in_large_pages(n_numbers: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised numbers in pages of 2 MB where the system has them to give: it does to private memory.

    Attention reads 24 KB here and 24 KB there: 32 rows at context 128 take 6.6 ms for 30 layers, with pages of
    4 KB 7.1.
    """
    memory = mmap.mmap(-1, n_numbers * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


def rope_and_write(
    qkv_TX: Tensor, cos_TD: Tensor, sin_TD: Tensor, cache: KVCache, layer: int, slots_T: Tensor, crew: Caller
) -> Tensor:
    """Rotate queries and keys, and write keys and values; the rotated queries. See `api.Ops.rope_and_write`."""
    key, value = cache.key[layer], cache.value[layer]
    n_kv_heads, n_key_panels, head_dim = key.shape[1:4]
    rows = (qkv_TX.shape[0], head_dim)
    n_heads = qkv_TX.shape[1] // head_dim - 2 * n_kv_heads
    assert cos_TD.shape == sin_TD.shape == rows, f"cos {tuple(cos_TD.shape)}, sin {tuple(sin_TD.shape)} for {rows}"
    for tensor in (qkv_TX, cos_TD, sin_TD):
        assert tensor.dtype == torch.float32, f"rows are float32, not {tensor.dtype}"
    assert slots_T.dtype == torch.int64, f"slots are int64, not {slots_T.dtype}"
    qkv_TX, cos_TD, sin_TD, slots_T = (x.contiguous() for x in (qkv_TX, cos_TD, sin_TD, slots_T))
    q_TND = crew.empty(rows[0], n_heads, head_dim)
    call = _Write(
        n_rows=rows[0],
        qkv=qkv_TX.data_ptr(),
        cos=cos_TD.data_ptr(),
        sin=sin_TD.data_ptr(),
        slots=slots_T.data_ptr(),
        q=q_TND.data_ptr(),
        key=key.data_ptr(),
        value=value.data_ptr(),
        is_half=key.dtype == torch.float16,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        n_blocks=cache.n_blocks,
        block_size=cache.block_size,
        n_key_panels=n_key_panels,
        n_value_panels=value.shape[2],
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


@compiled(inlined=True)
def _strides(call: _Write) -> tuple[int, int, int]:
    """Bytes of a row of a panel, and of one head's keys and values in a block."""
    row_bytes = _COLUMNS * (HALF_BYTES if call.is_half else FLOAT_BYTES)
    return (
        row_bytes,
        call.n_key_panels * call.head_dim * row_bytes,
        call.n_value_panels * call.block_size * row_bytes,
    )


@compiled(inlined=True)
def _places(call: _Write, t: int) -> tuple[int, int]:
    """Where the first head's key and value of row `t` begin.

    The numbers of a key stand one in each row of its panel, those of a value side by side in a row of each panel.
    """
    row_bytes, keys_bytes, values_bytes = _strides(call)
    slot = int64_at(call.slots, t)
    block = slot // call.block_size
    offset = slot - block * call.block_size
    panel, column = offset // _COLUMNS, offset % _COLUMNS
    key = (
        block * call.n_kv_heads * keys_bytes + panel * call.head_dim * row_bytes + column * (row_bytes // _COLUMNS)
    )
    return call.key + key, call.value + block * call.n_kv_heads * values_bytes + offset * row_bytes


@compiled()
def _claim_row(call: _Write, t: int) -> None:
    """Have the lines brought that row `t` is written to: 64 for each key of 64 numbers, all in different places.

    Waiting for them one by one is what would take the time.
    """
    row_bytes, keys_bytes, values_bytes = _strides(call)
    key, value = _places(call, t)
    for h in range(call.n_kv_heads):
        claim_lines(key + h * keys_bytes, call.head_dim, row_bytes)
        claim_lines(value + h * values_bytes, call.n_value_panels, call.block_size * row_bytes)


@compiled()
def _write_row(call: _Write, t: int, turned: int, halved: int) -> None:
    """Rotate row `t`, and write its keys and values; `turned` and `halved` have room for a head each."""
    head_dim, head_bytes = call.head_dim, call.head_dim * FLOAT_BYTES
    row_bytes, keys_bytes, values_bytes = _strides(call)
    cos, sin = call.cos + t * head_bytes, call.sin + t * head_bytes
    head, q = (
        call.qkv + t * (call.n_heads + 2 * call.n_kv_heads) * head_bytes,
        call.q + t * call.n_heads * head_bytes,
    )
    for n in range(call.n_heads):
        rotate_row(head + n * head_bytes, head_dim // 2, cos, sin, q + n * head_bytes)
    key, value = _places(call, t)
    for h in range(call.n_kv_heads):
        rotate_row(head + (call.n_heads + h) * head_bytes, head_dim // 2, cos, sin, turned)
        if call.is_half:
            halve_row(turned, head_dim, halved)
            scatter_halves(halved, head_dim, key + h * keys_bytes, row_bytes)
        else:
            scatter_floats(turned, head_dim, key + h * keys_bytes, row_bytes)
        numbers = head + (call.n_heads + call.n_kv_heads + h) * head_bytes
        for p in range(call.n_value_panels):
            out = value + h * values_bytes + p * call.block_size * row_bytes
            part, width = numbers + p * _COLUMNS * FLOAT_BYTES, min(_COLUMNS, head_dim - p * _COLUMNS)
            if call.is_half:
                halve_row(part, width, out)
            else:
                copy_row(part, width, out)


@compiled()
def _write_some_rows(call: _Write, taken: NDArray[np.int64]) -> None:
    """Rows as long as there are any."""
    room = np.empty((2, call.head_dim), np.float32)
    turned, halved = room[0].ctypes.data, room[1].ctypes.data
    first = take(taken, _TURN)
    while first < call.n_rows:
        after = min(first + _TURN, call.n_rows)
        _claim_row(call, first)
        for t in range(first, after):
            if t + 1 < after:
                _claim_row(call, t + 1)
            _write_row(call, t, turned, halved)
        first = take(taken, _TURN)


_share_rows = shared(_write_some_rows)


@compiled()
def _rope_and_write(cells: Cells, call: _Write) -> int:
    """Returns the first row whose slot is not in the cache, and writes nothing then; else `NOTHING_WRONG`."""
    n_slots = call.n_blocks * call.block_size
    for t in range(call.n_rows):
        if not 0 <= int64_at(call.slots, t) < n_slots:
            return t
    _share_rows(cells, call, np.zeros(1, np.int64))
    return NOTHING_WRONG


_note = noting(_rope_and_write)


@compiled()
def _note_rope_and_write(cells: Cells, call: _Write) -> tuple[int, Words]:
    return _note((cells, call))


_ROPE_AND_WRITE = Kernel(_rope_and_write, _note_rope_and_write)
