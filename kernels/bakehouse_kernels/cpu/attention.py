"""Paged attention over the block table, for decode rows and prefill chunks alike, without gathering blocks.

A work item is a tile of query rows, of one sequence or of several, and one key head with its group of query heads.
It goes over the block indices, and at each over its rows: those that stand in the same block there are multiplied
with it together, as one small matrix product (`cpu.tile`). Rows of sequences that share blocks are neighbours in a
tile, so a common prefix comes from memory once per tile and not once per sequence.

A row's sums run over the blocks of its own context in order, from its first visible block, whatever tile, chunk or
thread it falls into: its result does not depend, in any bit, on its neighbours or on chunking.

All is compiled `exact`: the exponential of the softmax rounds by adding a large number and taking it away again,
which fast-math would make nothing of.
"""

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bakehouse_kernels.api import AttentionPlan
from bakehouse_kernels.cpu.addresses import borrowed
from bakehouse_kernels.cpu.attention_call import (
    Call,
    Scratch,
    n_panels,
    numbers_a_state,
    scratch_in,
    without_counts,
)
from bakehouse_kernels.cpu.attention_plan import CpuPlan
from bakehouse_kernels.cpu.calls import Cells, Kernel, Words, noting
from bakehouse_kernels.cpu.compile import compiled
from bakehouse_kernels.cpu.pool import n_threads, shared, take
from bakehouse_kernels.cpu.recording import Caller
from bakehouse_kernels.cpu.softmax import softmax_step
from bakehouse_kernels.cpu.tile import SHAPE, adding_tile, fetch_ahead, float32_tile
from bakehouse_kernels.layout import KVCache

Floats = NDArray[np.float32]
Counter = NDArray[np.int64]

_LOWEST = np.float32(np.finfo(np.float32).min)
_COLUMNS = SHAPE.columns
_MAX_ROWS = SHAPE.max_rows
_FLOAT_BYTES = 4
_PANEL_ROW_BYTES = _COLUMNS * _FLOAT_BYTES
_LINE_BYTES = 64  # of the caches
_LARGEST = np.float32(np.finfo(np.float32).max)

# Rows of a tile: with 3 query heads of 64 to a key head their sums and queries take 24 KB, beside the 16 KB of a
# block's keys and values.
MAX_TILE_ROWS = 16
# Items for each thread, where there are rows enough: with fewer, the threads end at different times.
_ITEMS_A_THREAD = 4

_multiply = float32_tile(SHAPE)
_add = adding_tile(SHAPE)
_step = softmax_step(SHAPE)


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
    n_heads, n_kv_heads = q_TND.shape[1], key.shape[1]
    assert n_heads % n_kv_heads == 0, f"{n_heads} query heads do not divide into {n_kv_heads} key heads"
    assert q_TND.shape[2] == key.shape[3], f"head dimension {q_TND.shape[2]} against {key.shape[3]}"
    q_TND = q_TND.contiguous()
    out_TND = crew.empty(*q_TND.shape)
    call = Call(
        q_TND=q_TND.numpy(),
        out_TND=out_TND.numpy(),
        key=key.data_ptr(),
        value=value.data_ptr(),
        n_kv_heads=n_kv_heads,
        block_size=cache.block_size,
        scale=np.float32(scale),
        window=cache.n_blocks * cache.block_size if window is None else window,
        capped=softcap is not None,
        softcap=np.float32(1.0 if softcap is None else softcap),
    )
    crew.run(_ATTEND, call, plan)
    return out_TND


@compiled(exact=True)
def _attend_items(
    call: Call, plan: CpuPlan, tile_rows: int, room: Floats, rooms_taken: Counter, taken: Counter
) -> None:
    """Do items while there are any: item i is tile `i // H` and key head `i % H`.

    Tile j owns the entries `j * tile_rows : (j + 1) * tile_rows` of the plan.
    """
    n_kv_heads = call.n_kv_heads
    call, plan = without_counts(call, plan)
    scratch = scratch_in(borrowed(room)[take(rooms_taken, 1)], tile_rows * call.q_TND.shape[1] // n_kv_heads, call)
    n_rows = len(plan.rows)
    n_items = -(-n_rows // tile_rows) * n_kv_heads
    i = take(taken, 1)
    while i < n_items:
        first = i // n_kv_heads * tile_rows
        end = min(n_rows, first + tile_rows)
        after = end
        while first < end:
            # What a row does not see weighs nothing, but nothing times a NaN is one: then each row by itself.
            if _attend_rows(call, plan, first, after, i % n_kv_heads, scratch) or after == first + 1:
                first, after = after, after + 1
            else:
                after = first + 1
        i = take(taken, 1)


_share_items = shared(_attend_items)


@compiled(exact=True)
def _attend(cells: Cells, call: Call, plan: CpuPlan) -> None:
    n_tiles = n_threads(cells) * _ITEMS_A_THREAD // call.n_kv_heads + 1
    tile_rows = min(MAX_TILE_ROWS, len(plan.rows) // n_tiles + 1)
    n_states = tile_rows * call.q_TND.shape[1] // call.n_kv_heads
    room = np.empty((n_threads(cells), n_states * numbers_a_state(call)), np.float32)
    _share_items(cells, call, plan, tile_rows, room, np.zeros(1, np.int64), np.zeros(1, np.int64))


@compiled(exact=True)
def _attend_rows(call: Call, plan: CpuPlan, begin: int, end: int, kv_head: int, scratch: Scratch) -> bool:
    """Online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867) over the blocks, rows inside.

    Returns whether all results are finite.
    """
    block_size, window = call.block_size, call.window
    _begin_rows(call, plan, begin, end, kv_head, scratch)
    first_block, last_block = 1 << 30, -1
    for r in range(begin, end):
        position = plan.positions[r]
        first_block = min(first_block, max(0, position - window + 1) // block_size)
        last_block = max(last_block, position // block_size)
    for b in range(first_block, last_block + 1):
        r = begin
        while r < end:
            block = _block_of(plan, r, b, block_size, window)
            after = r + 1
            while after < end and _block_of(plan, after, b, block_size, window) == block:
                after += 1
            following = (
                _block_of(plan, after, b, block_size, window)
                if after < end
                else _block_of(plan, begin, b + 1, block_size, window)
            )
            if following >= 0:
                _fetch_ahead(*_keys(call, following, kv_head))
                _fetch_ahead(*_values(call, following, kv_head))
            if block >= 0:
                _attend_block(call, plan, scratch, kv_head, b, block, begin, r, after)
            r = after
    return _finish_rows(call, plan, begin, end, kv_head, scratch)


@compiled(exact=True)
def _begin_rows(call: Call, plan: CpuPlan, begin: int, end: int, kv_head: int, scratch: Scratch) -> None:
    q_TND, q_MD = call.q_TND, scratch.q_MD
    group = q_TND.shape[1] // call.n_kv_heads
    for r in range(begin, end):
        for g in range(group):
            m = (r - begin) * group + g
            scratch.highest_M[m], scratch.total_M[m] = _LOWEST, np.float32(0)
            for d in range(q_MD.shape[1]):
                q_MD[m, d] = q_TND[plan.rows[r], kv_head * group + g, d] * call.scale
            for p in range(scratch.sums.shape[0]):
                for c in range(_COLUMNS):
                    scratch.sums[p, m, c] = np.float32(0)


@compiled(exact=True)
def _finish_rows(call: Call, plan: CpuPlan, begin: int, end: int, kv_head: int, scratch: Scratch) -> bool:
    group = call.q_TND.shape[1] // call.n_kv_heads
    is_finite = True
    for r in range(begin, end):
        for g in range(group):
            m, out_D = (r - begin) * group + g, call.out_TND[plan.rows[r], kv_head * group + g]
            inverse = np.float32(1) / scratch.total_M[m]
            for p in range(scratch.sums.shape[0]):
                for c in range(min(_COLUMNS, len(out_D) - p * _COLUMNS)):
                    result = scratch.sums[p, m, c] * inverse
                    is_finite &= abs(result) <= _LARGEST
                    out_D[p * _COLUMNS + c] = result
    return is_finite


@compiled(exact=True)
def _block_of(plan: CpuPlan, r: int, b: int, block_size: int, window: int) -> int:
    """The block that row `r` of the plan sees at index `b`, -1 where it sees nothing there."""
    position = plan.positions[r]
    if b > position // block_size or (b + 1) * block_size <= position - window + 1:
        return -1
    return int(plan.block_table[plan.sequences[r], b])


@compiled(exact=True)
def _keys(call: Call, block: int, kv_head: int) -> tuple[int, int]:
    """Address and bytes of a head's keys in a block."""
    n_bytes = n_panels(call.block_size) * call.q_TND.shape[2] * _PANEL_ROW_BYTES
    return call.key + (block * call.n_kv_heads + kv_head) * n_bytes, n_bytes


@compiled(exact=True)
def _values(call: Call, block: int, kv_head: int) -> tuple[int, int]:
    """Address and bytes of a head's values in a block."""
    n_bytes = n_panels(call.q_TND.shape[2]) * call.block_size * _PANEL_ROW_BYTES
    return call.value + (block * call.n_kv_heads + kv_head) * n_bytes, n_bytes


@compiled(exact=True)
def _fetch_ahead(address: int, n_bytes: int) -> None:
    """Ask for a head's part of a block: hardware does not, across pages of memory."""
    for offset in range(0, n_bytes, _LINE_BYTES):
        fetch_ahead(address + offset)


@compiled(exact=True)
def _attend_block(
    call: Call,
    plan: CpuPlan,
    scratch: Scratch,
    kv_head: int,
    b: int,
    block: int,
    begin: int,
    first: int,
    after: int,
) -> None:
    """Rows `first` to `after` of the plan over one block; their tile begins at row `begin`."""
    block_size, head_dim = call.block_size, call.q_TND.shape[2]
    group, n_key_panels = call.q_TND.shape[1] // call.n_kv_heads, scratch.scores.shape[0]
    start, stop = (first - begin) * group, (after - begin) * group
    q, scores, sums = scratch.q_MD.ctypes.data, scratch.scores.ctypes.data, scratch.sums.ctypes.data
    highest, total = scratch.highest_M.ctypes.data, scratch.total_M.ctypes.data
    factor = scratch.factor_M.ctypes.data
    q_stride, panel_bytes = head_dim * _FLOAT_BYTES, scratch.scores.shape[1] * _PANEL_ROW_BYTES
    keys, values = _keys(call, block, kv_head)[0], _values(call, block, kv_head)[0]
    for m in range(start, stop, _MAX_ROWS):
        for p in range(n_key_panels):
            panel, out = keys + p * head_dim * _PANEL_ROW_BYTES, scores + p * panel_bytes + m * _PANEL_ROW_BYTES
            _multiply(min(_MAX_ROWS, stop - m), q + m * q_stride, q_stride, panel, head_dim, out)
    first_slot, after_slot = block_size, 0
    for m in range(start, stop):
        position = plan.positions[begin + m // group]
        low, high = position - call.window + 1 - b * block_size, min(block_size, position + 1 - b * block_size)
        first_slot, after_slot = min(first_slot, max(0, low)), max(after_slot, high)
        if call.capped:
            for p in range(n_key_panels):
                for c in range(_COLUMNS):
                    capped = np.float32(math.tanh(scratch.scores[p, m, c] / call.softcap))
                    scratch.scores[p, m, c] = call.softcap * capped
        row, offset = scores + m * _PANEL_ROW_BYTES, m * _FLOAT_BYTES
        _step(row, panel_bytes, n_key_panels, low, high, highest + offset, total + offset, factor + offset)
    for p in range(first_slot // _COLUMNS, -(-after_slot // _COLUMNS)):  # panels of scores
        k, after_k = max(first_slot, p * _COLUMNS), min(after_slot, (p + 1) * _COLUMNS)
        weights = scores + p * panel_bytes + (k - p * _COLUMNS) * _FLOAT_BYTES
        for m in range(start, stop, _MAX_ROWS):
            row, height, factors = (
                weights + m * _PANEL_ROW_BYTES,
                min(_MAX_ROWS, stop - m),
                factor + m * _FLOAT_BYTES,
            )
            for v in range(scratch.sums.shape[0]):
                panel = values + (v * block_size + k) * _PANEL_ROW_BYTES
                out = sums + (v * scratch.sums.shape[1] + m) * _PANEL_ROW_BYTES
                _add(height, row, _PANEL_ROW_BYTES, panel, after_k - k, out, factors)
        for m in range(start, stop):
            scratch.factor_M[m] = np.float32(1)


_note = noting(_attend)


@compiled(exact=True)
def _note_attend(cells: Cells, call: Call, plan: CpuPlan) -> tuple[int, Words]:
    return _note((cells, call, plan))


_ATTEND = Kernel(_attend, _note_attend)
