"""One tile of a product: its sums, then what follows them.

All is in addresses: each array handed on costs an atomic count of references, and two threads that fight for these
counts took as long for them as for the products.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bakehouse_kernels.cpu.addresses import float32_rows
from bakehouse_kernels.cpu.compile import compiled
from bakehouse_kernels.cpu.finish import finish_tile
from bakehouse_kernels.cpu.narrow import bfloat16_arithmetic, int8_arithmetic
from bakehouse_kernels.cpu.packing import COLUMNS, WeightFormat
from bakehouse_kernels.cpu.tile import FLOAT32, LINE_BYTES, SHAPE, STEP_BYTES, fetch_ahead, sums_tile

Floats = NDArray[np.float32]

MAX_ROWS = SHAPE.max_rows

_float32_sums = sums_tile(SHAPE, FLOAT32)
_bfloat16_sums = sums_tile(SHAPE, bfloat16_arithmetic(SHAPE))
_int8_sums = sums_tile(SHAPE, int8_arithmetic(SHAPE))
_finish, _finish_gated = (finish_tile(SHAPE, is_int8=False, is_gated=is_gated) for is_gated in (False, True))
_finish_int8, _finish_gated_int8 = (
    finish_tile(SHAPE, is_int8=True, is_gated=is_gated) for is_gated in (False, True)
)

# The formats of what is multiplied, in compiled code.
IN_FLOAT32, IN_BFLOAT16, IN_INT8 = range(3)
FORMATS: dict[WeightFormat, int] = {"float32": IN_FLOAT32, "bfloat16": IN_BFLOAT16, "int8": IN_INT8}

_HALF = COLUMNS // 2
_NUMBER_BYTES = 4
_ROW_BYTES = COLUMNS * _NUMBER_BYTES

# Where a thread's working memory has the sums of a tile, the results of one that is cut off, and two rows of bias.
_SUMS, _CUT, _BIAS, _UP_BIAS, ROOM = (
    n * _ROW_BYTES for n in (0, MAX_ROWS, 2 * MAX_ROWS, 2 * MAX_ROWS + 1, 2 * MAX_ROWS + 2)
)


class Tiles(NamedTuple):
    """A call as its tiles need it. `x` is what is multiplied, rounded or not; `bias` is 0 where there is none."""

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


@compiled(exact=True)
def do_tile(tiles: Tiles, first_row: int, n_rows: int, panel: int, room: int, ahead: int) -> None:
    """A tile of the result, with working memory at `room`, where no bias stands."""
    width = _HALF if tiles.gated else COLUMNS
    column = panel * width
    out = tiles.out + (first_row * tiles.n_out + column) * _NUMBER_BYTES
    _add_up(tiles, first_row, n_rows, panel, room + _SUMS, ahead)
    if column + width > tiles.n_out:
        _finish_cut_tile(tiles, first_row, n_rows, panel, out, room)
        return
    bias, up_bias = room + _BIAS, room + _UP_BIAS
    if tiles.bias:
        bias = tiles.bias + column * _NUMBER_BYTES
        up_bias = bias + tiles.n_out * _NUMBER_BYTES
    _finish_tile(
        tiles, first_row, n_rows, panel, room + _SUMS, out, tiles.n_out * _NUMBER_BYTES, bias, up_bias, tiles.added
    )


@compiled(exact=True)
def fetch_result(tiles: Tiles, first_row: int, n_rows: int, panel: int) -> None:
    """Ask for the memory that a tile will write: rows of the head's result lie pages apart."""
    for r in range(first_row, first_row + n_rows):
        out = tiles.out + (r * tiles.n_out + panel * COLUMNS) * _NUMBER_BYTES
        for offset in range(0, _ROW_BYTES, LINE_BYTES):
            fetch_ahead(out + offset)


@compiled(exact=True)
def _add_up(tiles: Tiles, first_row: int, n_rows: int, panel: int, sums: int, ahead: int) -> None:
    weights = tiles.panels + panel * tiles.n_steps * COLUMNS * STEP_BYTES
    x = tiles.x + first_row * tiles.x_stride
    if tiles.format == IN_INT8:
        _int8_sums(n_rows, x, tiles.x_stride, weights, tiles.n_steps, sums, ahead)
    elif tiles.format == IN_BFLOAT16:
        _bfloat16_sums(n_rows, x, tiles.x_stride, weights, tiles.n_steps, sums, ahead)
    else:
        _float32_sums(n_rows, x, tiles.x_stride, weights, tiles.n_steps, sums, ahead)


@compiled(exact=True)
def _finish_tile(
    tiles: Tiles,
    first_row: int,
    n_rows: int,
    panel: int,
    sums: int,
    out: int,
    out_stride: int,
    bias: int,
    up_bias: int,
    added: bool,
) -> None:
    """What follows the sums of a whole tile, to `out`; `bias` and `up_bias` are those of its columns."""
    column = panel * _ROW_BYTES
    scale, surplus = tiles.row_scale + first_row * _NUMBER_BYTES, tiles.surplus + column
    of_columns = tiles.column_scale + column
    is_added = 1 if added else 0
    if tiles.format == IN_INT8:
        if tiles.gated:
            _finish_gated_int8(n_rows, sums, out, out_stride, bias, up_bias, 0, scale, surplus, of_columns)
        else:
            _finish_int8(n_rows, sums, out, out_stride, bias, bias, is_added, scale, surplus, of_columns)
    elif tiles.gated:
        _finish_gated(n_rows, sums, out, out_stride, bias, up_bias, 0, 0, 0, 0)
    else:
        _finish(n_rows, sums, out, out_stride, bias, bias, is_added, 0, 0, 0)


@compiled(exact=True)
def _finish_cut_tile(tiles: Tiles, first_row: int, n_rows: int, panel: int, out: int, room: int) -> None:
    """Of a panel with more columns than the product has left: finished in `room`, then copied."""
    column = panel * (_HALF if tiles.gated else COLUMNS)
    n_columns = tiles.n_out - column
    biases = float32_rows(room + _BIAS, 2, COLUMNS)
    if tiles.bias:
        _copy(float32_rows(tiles.bias + column * _NUMBER_BYTES, 1, n_columns)[0], biases[0])
        if tiles.gated:
            up = tiles.bias + (tiles.n_out + column) * _NUMBER_BYTES
            _copy(float32_rows(up, 1, n_columns)[0], biases[1])
    _finish_tile(
        tiles,
        first_row,
        n_rows,
        panel,
        room + _SUMS,
        room + _CUT,
        _ROW_BYTES,
        room + _BIAS,
        room + _UP_BIAS,
        False,
    )
    for r in range(n_rows):
        result = float32_rows(room + _CUT + r * _ROW_BYTES, 1, n_columns)[0]
        row = float32_rows(out + r * tiles.n_out * _NUMBER_BYTES, 1, n_columns)[0]
        if tiles.added:
            for c in range(n_columns):
                result[c] += row[c]
        _copy(result, row)
    biases[:] = 0


@compiled(exact=True)
def _copy(x: Floats, out: Floats) -> None:
    for i in range(len(x)):  # a slice assignment would take twice as long
        out[i] = x[i]
