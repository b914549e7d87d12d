"""Matrix products with packed weights, and what follows them: bias, residual, gated activation.

The result is cut into tiles of up to `SHAPE.max_rows` rows by the columns of a panel. Threads take tiles as they
go: panel by panel, all rows of a block under one panel before the next, so that a block reads each weight once.

Each row of the input is brought into the weight's format first:

    bfloat16   rounded to nearest, and summed in float32; NaN and infinity stay what they are
    int8       rounded to integers in -127..127 with a scale of its own; sums of their products are exact, and a
               result is `sum * (row scale * column scale)`. A row with a NaN or an infinity gives NaN everywhere
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bakehouse_kernels.cpu.addresses import float32_rows
from bakehouse_kernels.cpu.calls import Cells, Kernel, Words, noting
from bakehouse_kernels.cpu.compile import compiled
from bakehouse_kernels.cpu.packing import COLUMNS, PackedWeight
from bakehouse_kernels.cpu.pool import n_threads, report, shared, take, wait_for
from bakehouse_kernels.cpu.product_tile import (
    FORMATS,
    IN_FLOAT32,
    IN_INT8,
    MAX_ROWS,
    ROOM,
    Tiles,
    do_tile,
    fetch_result,
)
from bakehouse_kernels.cpu.recording import Caller
from bakehouse_kernels.cpu.rounding import round_row, round_row_to_bfloat16
from bakehouse_kernels.cpu.tile import STEP_BYTES

Floats = NDArray[np.float32]

_NONE = np.empty(0, np.float32)

# Below this many multiply-adds waking another thread is not worth its 3 µs.
_MIN_SHARED_PRODUCTS = 100_000

# The rows of a block take this much, which beside a panel stays in a core's second-level cache.
_BLOCK_BYTES = 384 * 1024

# A thread takes this part of an even share at a time.
_TURNS = 8

# Addresses, counts and arrays of a call, as `_prepared` names them: what crosses into compiled code cheaply.
_Arguments = tuple[int, int, int, int, int, int, int, int, Floats, NDArray[np.int32], Floats, bool, bool, int, int]


class _Product(NamedTuple):
    """A call: rows at address `x`, `x_stride` bytes apart; but for float32, what is multiplied is `rounded`."""

    n_threads: int
    rows_taken: NDArray[np.int64]
    rows_rounded: NDArray[np.int64]
    tiles_taken: NDArray[np.int64]
    x: int
    x_stride: int
    n_rows: int
    n_in: int
    format: int
    rounded: NDArray[np.uint8]
    row_scale: Floats
    panels: int
    n_steps: int
    n_panels: int
    column_scale: Floats
    surplus: NDArray[np.int32]
    bias: Floats
    gated: bool
    added: bool
    out: int
    n_out: int


def linear(x_TI: Tensor, weight: PackedWeight, bias_O: Tensor | None, crew: Caller) -> Tensor:
    """`x @ weight + bias`, or of a gated weight `silu(x @ gate + bias) * (x @ up + bias)`; `[T, O]`."""
    out_TO = crew.empty(x_TI.shape[0], weight.n_out)
    _multiply(x_TI, weight, bias_O, out_TO, added=False, crew=crew)
    return out_TO


def add_linear(x_TO: Tensor, input_TI: Tensor, weight: PackedWeight, bias_O: Tensor | None, crew: Caller) -> None:
    """`x += input @ weight + bias`."""
    shape = (input_TI.shape[0], weight.n_out)
    assert x_TO.shape == shape, f"{tuple(x_TO.shape)} to add {shape} to"
    assert x_TO.is_contiguous(), "contiguous rows to add to"
    _multiply(input_TI, weight, bias_O, x_TO, added=True, crew=crew)


def _multiply(
    x_TI: Tensor, weight: PackedWeight, bias: Tensor | None, out_TO: Tensor, *, added: bool, crew: Caller
) -> None:
    n_rows, n_in = x_TI.shape
    assert n_in == weight.n_in, f"rows of {n_in} for a weight of {weight.n_in} inputs"
    if x_TI.stride(1) != 1:
        x_TI = x_TI.contiguous()
    panels = weight.panels
    arguments: _Arguments = (
        x_TI.data_ptr(),
        x_TI.stride(0) * STEP_BYTES,
        n_rows,
        n_in,
        FORMATS[weight.format],
        panels.data_ptr(),
        panels.shape[1],
        panels.shape[0],
        weight.scale,
        weight.surplus,
        _NONE if bias is None else bias.numpy(),
        weight.gated,
        added,
        out_TO.data_ptr(),
        weight.n_out,
    )
    run = crew.run if n_rows * panels.numel() >= _MIN_SHARED_PRODUCTS else crew.run_alone
    run(_MULTIPLY, arguments)


@compiled(exact=True)
def _round_rows(call: _Product) -> None:
    """Rows as long as there are any, and until all are done."""
    turn = max(1, call.n_rows // (call.n_threads * _TURNS))
    first = take(call.rows_taken, turn)
    while first < call.n_rows:
        after = min(first + turn, call.n_rows)
        for t in range(first, after):
            row = float32_rows(call.x + t * call.x_stride, 1, call.n_in)[0]
            if call.format == IN_INT8:
                call.row_scale[t] = round_row(row, call.rounded[t])
            else:
                round_row_to_bfloat16(row, call.rounded[t].view(np.uint16))
        report(call.rows_rounded, after - first)
        first = take(call.rows_taken, turn)
    wait_for(call.rows_rounded, call.n_rows)


@compiled(exact=True)
def _tiles_of(call: _Product) -> Tiles:
    return Tiles(
        call.x if call.format == IN_FLOAT32 else call.rounded.ctypes.data,
        call.x_stride if call.format == IN_FLOAT32 else call.n_steps * STEP_BYTES,
        call.panels,
        call.n_steps,
        call.format,
        call.row_scale.ctypes.data,
        call.surplus.ctypes.data,
        call.column_scale.ctypes.data,
        call.bias.ctypes.data if len(call.bias) > 0 else 0,
        call.gated,
        call.added,
        call.out,
        call.n_out,
    )


@compiled(exact=True)
def _do_some_tiles(call: _Product) -> None:
    """Rows to round, then tiles of the result, as long as there are any."""
    if call.format != IN_FLOAT32:
        _round_rows(call)
    tiles = _tiles_of(call)
    n_tiles = (call.n_rows + MAX_ROWS - 1) // MAX_ROWS  # of all rows; as even as can be, so that none is low
    n_block = max(1, min(n_tiles, _BLOCK_BYTES // (MAX_ROWS * call.n_steps * STEP_BYTES)))
    n_items = n_tiles * call.n_panels
    turn = max(1, n_items // (call.n_threads * _TURNS))
    if turn > n_block:
        turn -= turn % n_block  # whole panels, so that no two threads read the same
    half_panel = call.n_steps * COLUMNS * STEP_BYTES // 2
    others = (call.n_threads - 1) * (turn // n_block)
    room = np.zeros(ROOM, np.uint8)
    first = take(call.tiles_taken, turn)
    while first < n_items:
        end = min(first + turn, n_items)
        for item in range(first, end):
            block = item // (n_block * call.n_panels)
            n_here = min(n_block, n_tiles - block * n_block)
            panel, within = divmod(item - block * n_block * call.n_panels, n_here)
            tile = block * n_block + within
            first_row, after = tile * call.n_rows // n_tiles, (tile + 1) * call.n_rows // n_tiles
            following = panel + 1 if item + n_here - within < end else panel + 1 + others
            # Where each tile has a panel of its own, hardware looks ahead, and would only be disturbed.
            half = 2 * panel if n_here == 1 else 2 * following + within % 2
            if n_here > 1 and not call.gated:
                fetch_result(tiles, first_row, after - first_row, panel)
            do_tile(tiles, first_row, after - first_row, panel, room.ctypes.data, call.panels + half * half_panel)
        first = take(call.tiles_taken, turn)


@compiled(exact=True)
def _prepared(
    n_threads: int,
    x: int,
    x_stride: int,
    n_rows: int,
    n_in: int,
    weight_format: int,
    panels: int,
    n_steps: int,
    n_panels: int,
    column_scale: Floats,
    surplus: NDArray[np.int32],
    bias: Floats,
    gated: bool,
    added: bool,
    out: int,
    n_out: int,
) -> _Product:
    """The call, with room for its rounded rows."""
    n_rounded = 0 if weight_format == IN_FLOAT32 else n_rows
    return _Product(
        n_threads,
        np.zeros(1, np.int64),
        np.zeros(1, np.int64),
        np.zeros(1, np.int64),
        x,
        x_stride,
        n_rows,
        n_in,
        weight_format,
        np.empty((n_rounded, n_steps * STEP_BYTES), np.uint8),
        np.empty(n_rounded, np.float32),
        panels,
        n_steps,
        n_panels,
        column_scale,
        surplus,
        bias,
        gated,
        added,
        out,
        n_out,
    )


_share_tiles = shared(_do_some_tiles)


@compiled(exact=True)
def _multiply_with(cells: Cells, arguments: _Arguments) -> None:
    _share_tiles(cells, _prepared(n_threads(cells), *arguments))


_note = noting(_multiply_with)


@compiled(exact=True)
def _note_multiply(cells: Cells, arguments: _Arguments) -> tuple[int, Words]:
    return _note((cells, arguments))


_MULTIPLY = Kernel(_multiply_with, _note_multiply)
