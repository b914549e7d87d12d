"""What the attention does with one block and key head: scores, weights, sums of values."""

import math

import numpy as np

from bakehouse_kernels.cpu.addresses import float32_at, int32_at, put_float32
from bakehouse_kernels.cpu.attention_call import COLUMNS, FLOAT_BYTES, Call, Scratch
from bakehouse_kernels.cpu.attention_plan import Rows, Run
from bakehouse_kernels.cpu.attention_tile import heights, scores_tile, values_tile
from bakehouse_kernels.cpu.compile import compiled
from bakehouse_kernels.cpu.softmax import softmax_step
from bakehouse_kernels.cpu.tile import SHAPE

_ROW_BYTES = COLUMNS * FLOAT_BYTES  # of scores and sums
_MAX_ROWS = SHAPE.max_rows

_HEIGHTS = heights(SHAPE)
_scores = scores_tile(SHAPE)
_values, _wide_values = (values_tile(SHAPE, is_wide=is_wide) for is_wide in (False, True))
_step = softmax_step(SHAPE)


@compiled(exact=True)
def attend_block(
    call: Call, rows: Rows, scratch: Scratch, h: int, begin: int, run: Run, part: int, following: int
) -> None:
    """The rows of a run, in a tile that begins at row `begin`, over one key head's part of their block.

    `h`: the head among those of the item. `part` and `following`: where its keys and values stand in the layer,
    and those to fetch ahead.
    """
    start, stop = (run.first - begin) * call.group, (run.after - begin) * call.group
    _score(call, scratch, h, start, stop, part, following)
    first_slot, after_slot = _weigh(call, rows, scratch, h, start, run)
    _add_values(call, scratch, h, start, stop, first_slot, after_slot, part, following)


@compiled(exact=True, inlined=True)
def _height(n_left: int) -> int:
    """Of the next tile, where so many rows are left."""
    height = 1
    for n in _HEIGHTS:
        if n <= n_left:
            height = n
    return height


@compiled(exact=True, inlined=True)
def _score(call: Call, scratch: Scratch, h: int, start: int, stop: int, part: int, following: int) -> None:
    """Scores of the states `start` to `stop`."""
    q_stride = call.head_dim * FLOAT_BYTES
    keys = call.key + part * call.n_key_panels * call.key_panel_bytes
    to_following = (following - part) * call.n_key_panels * call.key_panel_bytes
    m = start
    while m < stop:
        n, q = _height(stop - m), scratch.q + (h * scratch.n_states + m) * q_stride
        for p in range(call.n_key_panels):
            panel = keys + p * call.key_panel_bytes
            out = scratch.scores + (p * scratch.n_states + m) * _ROW_BYTES
            _scores(n, q, q_stride, panel, call.head_dim, out, panel + to_following, call.element)
        m += n


@compiled(exact=True, inlined=True)
def _weigh(call: Call, rows: Rows, scratch: Scratch, h: int, start: int, run: Run) -> tuple[int, int]:
    """Scores to weights; the slots that any of the rows sees, from the first to after the last."""
    panel_bytes, state = scratch.n_states * _ROW_BYTES, h * scratch.n_states * FLOAT_BYTES
    first_slot, after_slot, m = call.block_size, 0, start
    for r in range(run.first, run.after):
        high = int32_at(rows.positions, r) + 1 - run.b * call.block_size
        low, high = high - call.window, min(call.block_size, high)
        first_slot, after_slot = min(first_slot, max(0, low)), max(after_slot, high)
        for _ in range(call.group):
            row, offset = scratch.scores + m * _ROW_BYTES, m * FLOAT_BYTES
            if call.capped:
                _cap(call, row, panel_bytes)
            highest, total = scratch.highest + state + offset, scratch.total + state + offset
            _step(row, panel_bytes, call.n_key_panels, low, high, highest, total, scratch.factor + offset)
            m += 1
    return first_slot, after_slot


@compiled(exact=True)
def _cap(call: Call, row: int, panel_bytes: int) -> None:
    for p in range(call.n_key_panels):
        for c in range(COLUMNS):
            address = row + p * panel_bytes + c * FLOAT_BYTES
            capped = np.float32(math.tanh(float32_at(address) / call.softcap))
            put_float32(address, call.softcap * capped)


@compiled(exact=True, inlined=True)
def _add_values(
    call: Call,
    scratch: Scratch,
    h: int,
    start: int,
    stop: int,
    first_slot: int,
    after_slot: int,
    part: int,
    following: int,
) -> None:
    """The values of the slots `first_slot` to `after_slot`, by their weights, onto the states' sums."""
    out_bytes, slot_bytes = scratch.n_states * _ROW_BYTES, call.value_panel_bytes // call.block_size
    values = call.value + part * call.n_value_panels * call.value_panel_bytes
    to_following = (following - part) * call.n_value_panels * call.value_panel_bytes
    sums = scratch.sums + h * call.n_value_panels * out_bytes
    for p in range(first_slot // COLUMNS, -(-after_slot // COLUMNS)):  # panels of scores
        k, after_k = max(first_slot, p * COLUMNS), min(after_slot, (p + 1) * COLUMNS)
        weights = scratch.scores + p * out_bytes + (k - p * COLUMNS) * FLOAT_BYTES
        m = start
        while m < stop:
            n = _height(stop - m)
            _add_slots(
                call,
                n,
                weights + m * _ROW_BYTES,
                values + k * slot_bytes,
                after_k - k,
                sums + m * _ROW_BYTES,
                out_bytes,
                scratch.factor + m * FLOAT_BYTES,
                to_following,
            )
            m += n
        if after_k < after_slot:  # the sums are up to date
            for m in range(start, stop):
                put_float32(scratch.factor + m * FLOAT_BYTES, np.float32(1))


@compiled(exact=True, inlined=True)
def _add_slots(
    call: Call,
    n: int,
    weights: int,
    values: int,
    n_slots: int,
    out: int,
    out_bytes: int,
    factor: int,
    to_following: int,
) -> None:
    """Some slots of all panels of values onto the sums of n states, two panels at a time where that fits."""
    panel_bytes, v = call.value_panel_bytes, 0
    while v < call.n_value_panels:
        panel, sums = values + v * panel_bytes, out + v * out_bytes
        ahead = panel + to_following
        if n <= _MAX_ROWS // 2 and v + 1 < call.n_value_panels:
            _wide_values(
                n, weights, _ROW_BYTES, panel, panel_bytes, n_slots, sums, out_bytes, factor, ahead, call.element
            )
            v += 2
        else:
            _values(n, weights, _ROW_BYTES, panel, 0, n_slots, sums, 0, factor, ahead, call.element)
            v += 1
