"""Paged attention over the block table, for decode rows and prefill chunks alike, without gathering blocks.

A work item is a tile of query rows, of one sequence or of several, and some key heads with their groups of query
heads. It goes over the block indices, and at each over its rows: those that stand in the same block there are
multiplied with it together, as small matrix products (`cpu.attention_tile`). Rows of sequences that share blocks
are neighbours in a tile, so a common prefix comes from memory once per tile and not once per sequence.

A row's sums run over the blocks of its own context in order, from its first visible block, whatever tile, chunk or
thread it falls into: its result does not depend, in any bit, on its neighbours or on chunking.

All is compiled `exact`: the exponential of the softmax rounds by adding a large number and taking it away again,
which fast-math would make nothing of.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bakehouse_kernels.api import AttentionPlan
from bakehouse_kernels.cpu.addresses import float32_at, int32_at, put_float32
from bakehouse_kernels.cpu.attention_block import attend_block
from bakehouse_kernels.cpu.attention_call import (
    COLUMNS,
    FLOAT_BYTES,
    Call,
    Scratch,
    n_numbers,
    scratch_at,
)
from bakehouse_kernels.cpu.attention_plan import CpuPlan, Rows, next_run
from bakehouse_kernels.cpu.calls import Cells, Kernel, Words, noting
from bakehouse_kernels.cpu.compile import compiled
from bakehouse_kernels.cpu.pool import n_threads, shared, take
from bakehouse_kernels.cpu.recording import Caller
from bakehouse_kernels.cpu.row_loops import clear_row, scale_row
from bakehouse_kernels.layout import KVCache

Floats = NDArray[np.float32]
Counter = NDArray[np.int64]

_ROW_BYTES = COLUMNS * FLOAT_BYTES
_LOWEST = np.float32(np.finfo(np.float32).min)

# Rows of a tile: with 3 query heads of 64 to a key head their sums and queries take 24 KB, beside the 8 or 16 KB
# of a block's keys and values.
MAX_TILE_ROWS = 16
# Items for each thread, where there are rows enough: with fewer, the threads end at different times.
_ITEMS_A_THREAD = 4


def paged_attention(
    q_TND: Tensor,
    cache: KVCache,
    layer: int,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    crew: Caller,
) -> Tensor:
    """`softmax(cap(q · k * scale)) · v` over the visible positions; `[T, N, D]`. See `api.Ops.paged_attention`."""
    assert isinstance(plan, CpuPlan), "a plan from `plan_attention`"
    key, value = cache.key[layer], cache.value[layer]
    (_, n_heads, head_dim), (_, n_kv_heads, n_key_panels, key_dim, _) = q_TND.shape, key.shape
    assert n_heads % n_kv_heads == 0, f"{n_heads} query heads do not divide into {n_kv_heads} key heads"
    assert head_dim == key_dim, f"head dimension {head_dim} against {key_dim}"
    assert q_TND.dtype == torch.float32, f"queries are float32, not {q_TND.dtype}"
    q_TND = q_TND.contiguous()
    out_TND = crew.empty(*q_TND.shape)
    row_bytes = COLUMNS * key.itemsize
    call = Call(
        q=q_TND.data_ptr(),
        out=out_TND.data_ptr(),
        key=key.data_ptr(),
        value=value.data_ptr(),
        element=np.int16(0) if key.dtype == torch.float16 else np.float32(0),
        n_kv_heads=n_kv_heads,
        group=n_heads // n_kv_heads,
        head_dim=head_dim,
        block_size=cache.block_size,
        n_key_panels=n_key_panels,
        n_value_panels=value.shape[2],
        key_panel_bytes=head_dim * row_bytes,
        value_panel_bytes=cache.block_size * row_bytes,
        scale=np.float32(scale),
        window=cache.n_blocks * cache.block_size if window is None else window,
        capped=softcap is not None,
        softcap=np.float32(1.0 if softcap is None else softcap),
    )
    crew.run(_ATTEND, call, plan.rows)
    return out_TND


@compiled(exact=True)
def _attend_items(
    call: Call, rows: Rows, tile_rows: int, heads_an_item: int, room: Floats, rooms_taken: Counter, taken: Counter
) -> None:
    """Do items while there are any: item i is tile `i // P` and part `i % P` of the key heads, P parts in all.

    Tile j owns the entries `j * tile_rows : (j + 1) * tile_rows` of the plan.
    """
    n_parts = call.n_kv_heads // heads_an_item
    address = room.ctypes.data + take(rooms_taken, 1) * room.shape[1] * FLOAT_BYTES
    scratch = scratch_at(call, address, heads_an_item, tile_rows * call.group)
    n_items = -(-rows.n // tile_rows) * n_parts
    i = take(taken, 1)
    while i < n_items:
        first_head = i % n_parts * heads_an_item
        first = i // n_parts * tile_rows
        end = min(rows.n, first + tile_rows)
        after = end
        while first < end:
            # What a row does not see weighs nothing, but nothing times a NaN is one: then each row by itself.
            if _attend_rows(call, rows, first, after, first_head, scratch) or after == first + 1:
                first, after = after, after + 1
            else:
                after = first + 1
        i = take(taken, 1)


_share_items = shared(_attend_items)


@compiled(exact=True)
def _attend(cells: Cells, call: Call, rows: Rows) -> None:
    n_items = n_threads(cells) * _ITEMS_A_THREAD
    # Rows with contexts of their own read all heads of a block, which lie side by side; rows that share blocks
    # come in larger tiles, a head each, so that fewer tiles read the same.
    heads_an_item = call.n_kv_heads if n_items <= rows.n == int32_at(rows.n_beginnings, 0) else 1
    n_tiles = n_items * heads_an_item // call.n_kv_heads + 1
    tile_rows = min(MAX_TILE_ROWS, rows.n // n_tiles + 1)
    room = np.empty((n_threads(cells), n_numbers(call, heads_an_item, tile_rows * call.group)), np.float32)
    _share_items(cells, call, rows, tile_rows, heads_an_item, room, np.zeros(1, np.int64), np.zeros(1, np.int64))


@compiled(exact=True)
def _attend_rows(call: Call, rows: Rows, begin: int, end: int, first_head: int, scratch: Scratch) -> bool:
    """Online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867) over the blocks, rows inside.

    Returns whether all results are finite.
    """
    _begin_rows(call, rows, begin, end, first_head, scratch)
    first_block, after_block = 1 << 30, 0
    for r in range(begin, end):
        position = int32_at(rows.positions, r)
        first_block = min(first_block, max(0, position - call.window + 1) // call.block_size)
        after_block = max(after_block, position // call.block_size + 1)
    run = next_run(rows, call.block_size, call.window, begin, end, after_block, first_block, begin)
    while run.block >= 0:
        following = next_run(rows, call.block_size, call.window, begin, end, after_block, run.b, run.after)
        part, last_h = run.block * call.n_kv_heads + first_head, scratch.n_heads - 1
        after_last = following.block * call.n_kv_heads + first_head if following.block >= 0 else part + last_h
        for h in range(scratch.n_heads):
            ahead = part + h + 1 if h < last_h else after_last
            attend_block(call, rows, scratch, h, begin, run, part + h, ahead)
        run = following
    return _finish_rows(call, rows, begin, end, first_head, scratch)


@compiled(exact=True)
def _begin_rows(call: Call, rows: Rows, begin: int, end: int, first_head: int, scratch: Scratch) -> None:
    head_bytes = call.head_dim * FLOAT_BYTES
    clear_row(scratch.sums, scratch.n_heads * call.n_value_panels * scratch.n_states * COLUMNS)
    for h in range(scratch.n_heads):
        for r in range(begin, end):
            first_n = (int32_at(rows.rows, r) * call.n_kv_heads + first_head + h) * call.group
            first_m = h * scratch.n_states + (r - begin) * call.group
            # The query heads of a group stand side by side here as there.
            scale_row(
                call.q + first_n * head_bytes,
                call.group * call.head_dim,
                call.scale,
                scratch.q + first_m * head_bytes,
            )
            for m in range(first_m, first_m + call.group):
                put_float32(scratch.highest + m * FLOAT_BYTES, _LOWEST)
                put_float32(scratch.total + m * FLOAT_BYTES, np.float32(0))


@compiled(exact=True)
def _finish_rows(call: Call, rows: Rows, begin: int, end: int, first_head: int, scratch: Scratch) -> bool:
    is_finite = True
    for h in range(scratch.n_heads):
        for r in range(begin, end):
            for g in range(call.group):
                n = (int32_at(rows.rows, r) * call.n_kv_heads + first_head + h) * call.group + g
                m = (r - begin) * call.group + g
                total = float32_at(scratch.total + (h * scratch.n_states + m) * FLOAT_BYTES)
                for p in range(call.n_value_panels):
                    sums = scratch.sums + ((h * call.n_value_panels + p) * scratch.n_states + m) * _ROW_BYTES
                    out = call.out + (n * call.head_dim + p * COLUMNS) * FLOAT_BYTES
                    width = min(COLUMNS, call.head_dim - p * COLUMNS)
                    is_finite &= scale_row(sums, width, np.float32(1) / total, out)
    return is_finite


_note = noting(_attend)


@compiled(exact=True)
def _note_attend(cells: Cells, call: Call, rows: Rows) -> tuple[int, Words]:
    return _note((cells, call, rows))


_ATTEND = Kernel(_attend, _note_attend)
