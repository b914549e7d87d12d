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
from bakehouse_kernels.cpu.exponential import exp_of_negative
from bakehouse_kernels.cpu.narrow import bfloat16_tile, int8_tile
from bakehouse_kernels.cpu.packing import COLUMNS, PackedWeight, WeightFormat
from bakehouse_kernels.cpu.pool import n_threads, shared, take
from bakehouse_kernels.cpu.recording import Caller
from bakehouse_kernels.cpu.rounding import round_row, round_row_to_bfloat16
from bakehouse_kernels.cpu.tile import SHAPE, STEP_BYTES, float32_tile

Floats = NDArray[np.float32]

_float32_tile = float32_tile(SHAPE)
_bfloat16_tile = bfloat16_tile(SHAPE)
_int8_tile = int8_tile(SHAPE)

# The formats in compiled code.
_FLOAT32, _BFLOAT16, _INT8 = range(3)
_FORMATS: dict[WeightFormat, int] = {"float32": _FLOAT32, "bfloat16": _BFLOAT16, "int8": _INT8}

_MAX_ROWS = SHAPE.max_rows
_HALF = COLUMNS // 2
_NONE = np.empty(0, np.float32)
_NUMBER_BYTES = 4

# Below this many multiply-adds waking another thread is not worth its 3 µs.
_MIN_SHARED_PRODUCTS = 100_000

# Below this many numbers the calling thread rounds all rows.
_MIN_SHARED_ROUNDING = 32_768

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


class _Tiles(NamedTuple):
    """A call as its tiles need it, in addresses alone: each array handed on costs an atomic count of references.

    Two threads that fight for these counts took as long for them as for the products. `x` is the address of what
    is multiplied, rounded or not; `bias` is 0 where there is none.
    """

    x: int
    x_stride: int
    panels: int
    n_steps: int
    format: int
    row_scale: int
    surplus: int
    column_scale: int
    bias: int
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
        _FORMATS[weight.format],
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
def _round_some_rows(call: _Product) -> None:
    """Rows as long as there are any."""
    turn = max(1, call.n_rows // (call.n_threads * _TURNS))
    first = take(call.rows_taken, turn)
    while first < call.n_rows:
        for t in range(first, min(first + turn, call.n_rows)):
            row = float32_rows(call.x + t * call.x_stride, 1, call.n_in)[0]
            if call.format == _INT8:
                call.row_scale[t] = round_row(row, call.rounded[t])
            else:
                round_row_to_bfloat16(row, call.rounded[t].view(np.uint16))
        first = take(call.rows_taken, turn)


@compiled(exact=True)
def _do_tile(tiles: _Tiles, first_row: int, n_rows: int, panel: int, sums: int) -> None:
    """A tile of the result; at `sums` is room for it."""
    weights = tiles.panels + panel * tiles.n_steps * COLUMNS * STEP_BYTES
    rows, column = tiles.x + first_row * tiles.x_stride, panel * COLUMNS * _NUMBER_BYTES
    if tiles.format == _INT8:
        row_scale = tiles.row_scale + first_row * _NUMBER_BYTES
        surplus, column_scale = tiles.surplus + column, tiles.column_scale + column
        _int8_tile(n_rows, rows, tiles.x_stride, weights, tiles.n_steps, sums, row_scale, surplus, column_scale)
    elif tiles.format == _BFLOAT16:
        _bfloat16_tile(n_rows, rows, tiles.x_stride, weights, tiles.n_steps, sums)
    else:
        _float32_tile(n_rows, rows, tiles.x_stride, weights, tiles.n_steps, sums)
    if tiles.gated:
        _finish_gated(tiles, first_row, n_rows, panel * _HALF, sums)
    else:
        _finish(tiles, first_row, n_rows, panel * COLUMNS, sums)


@compiled(exact=True)
def _finish(tiles: _Tiles, first_row: int, n_rows: int, first_column: int, sums: int) -> None:
    """Bias and residual."""
    n_columns = min(COLUMNS, tiles.n_out - first_column)
    for r in range(n_rows):
        values = float32_rows(sums + r * COLUMNS * _NUMBER_BYTES, 1, n_columns)[0]
        out = float32_rows(
            tiles.out + ((first_row + r) * tiles.n_out + first_column) * _NUMBER_BYTES, 1, n_columns
        )[0]
        if tiles.bias:
            _add(values, float32_rows(tiles.bias + first_column * _NUMBER_BYTES, 1, n_columns)[0])
        if tiles.added:
            _add(out, values)
        else:
            _copy(values, out)


@compiled(exact=True)
def _finish_gated(tiles: _Tiles, first_row: int, n_rows: int, first_feature: int, sums: int) -> None:
    """`silu(gate) * up`; the bias is that of all gates, then of all ups."""
    n_here = min(_HALF, tiles.n_out - first_feature)
    for r in range(n_rows):
        gate = float32_rows(sums + r * COLUMNS * _NUMBER_BYTES, 1, n_here)[0]
        up = float32_rows(sums + (r * COLUMNS + _HALF) * _NUMBER_BYTES, 1, n_here)[0]
        if tiles.bias:
            _add(gate, float32_rows(tiles.bias + first_feature * _NUMBER_BYTES, 1, n_here)[0])
            _add(up, float32_rows(tiles.bias + (tiles.n_out + first_feature) * _NUMBER_BYTES, 1, n_here)[0])
        out = tiles.out + ((first_row + r) * tiles.n_out + first_feature) * _NUMBER_BYTES
        _gate(gate, up, float32_rows(out, 1, n_here)[0])


@compiled(exact=True)
def _copy(x: Floats, out: Floats) -> None:
    for i in range(len(x)):  # a slice assignment would take twice as long
        out[i] = x[i]


@compiled(exact=True)
def _add(x: Floats, y: Floats) -> None:
    for i in range(len(x)):
        x[i] += y[i]


@compiled(exact=True)
def _gate(gate: Floats, up: Floats, out: Floats) -> None:
    """`gate / (1 + e^-gate) * up`."""
    for i in range(len(out)):
        decay = exp_of_negative(-abs(gate[i]))
        # e^gate / (1 + e^gate) for a negative gate: e^-gate would overflow.
        share = np.float32(1) if gate[i] >= np.float32(0) else decay
        out[i] = gate[i] * share / (np.float32(1) + decay) * up[i]


@compiled(exact=True)
def _do_some_tiles(call: _Product) -> None:
    """Tiles of the result as long as there are any."""
    tiles = _Tiles(
        call.x if call.format == _FLOAT32 else call.rounded.ctypes.data,
        call.x_stride if call.format == _FLOAT32 else call.n_steps * STEP_BYTES,
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
    n_tiles = (call.n_rows + _MAX_ROWS - 1) // _MAX_ROWS  # of all rows; as even as can be, so that none is low
    n_block = min(n_tiles, max(1, _BLOCK_BYTES // (_MAX_ROWS * call.n_steps * STEP_BYTES)))
    n_items = n_tiles * call.n_panels
    turn = max(1, n_items // (call.n_threads * _TURNS))
    sums = np.empty((_MAX_ROWS, COLUMNS), np.float32)
    first = take(call.tiles_taken, turn)
    while first < n_items:
        for item in range(first, min(first + turn, n_items)):
            block = item // (n_block * call.n_panels)
            n_here = min(n_block, n_tiles - block * n_block)
            panel, within = divmod(item - block * n_block * call.n_panels, n_here)
            tile = block * n_block + within
            first_row, after = tile * call.n_rows // n_tiles, (tile + 1) * call.n_rows // n_tiles
            _do_tile(tiles, first_row, after - first_row, panel, sums.ctypes.data)
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
    n_rounded = 0 if weight_format == _FLOAT32 else n_rows
    return _Product(
        n_threads,
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


_share_rows = shared(_round_some_rows)
_share_tiles = shared(_do_some_tiles)


@compiled(exact=True)
def _multiply_with(cells: Cells, arguments: _Arguments) -> None:
    call = _prepared(n_threads(cells), *arguments)
    if call.format != _FLOAT32:
        if call.n_rows * call.n_in < _MIN_SHARED_ROUNDING:
            _round_some_rows(call)
        else:
            _share_rows(cells, call)
    _share_tiles(cells, call)


_note = noting(_multiply_with)


@compiled(exact=True)
def _note_multiply(cells: Cells, arguments: _Arguments) -> tuple[int, Words]:
    return _note((cells, arguments))


_MULTIPLY = Kernel(_multiply_with, _note_multiply)
