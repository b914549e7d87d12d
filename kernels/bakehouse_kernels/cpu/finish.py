"""What follows the sums of a tile of a product: scales, bias, residual, gated activation, in vector instructions.

The sums lie in the first-level cache, in rows of `shape.columns`. Of int8 they are integers, and their result is
`(sum - surplus) * (row scale * column scale)`, which takes it back that bytes of a row are unsigned.

It takes 4 % of the time of an int8 product of 32 rows, and 10 % of a gated one, whose exponentials are the most.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from bakehouse_kernels.cpu.compile import intrinsic
from bakehouse_kernels.cpu.exponential import exp_of_negatives
from bakehouse_kernels.cpu.tile import TileShape, declare, load, spread, store

_BIT, _INT, _LONG, _FLOAT = ir.IntType(1), ir.IntType(32), ir.IntType(64), ir.FloatType()

_FLOAT_BYTES = 4

# From a builder, the vectors of a row's sums and the row's number: its results, float32.
_Scale = Callable[[ir.IRBuilder, list[ir.Value], ir.Value], list[ir.Value]]


def finish_tile(shape: TileShape, *, is_int8: bool, is_gated: bool) -> Any:
    """For compiled code, from the sums of a tile to the product's result.

    `finish(n_rows, sums, out, out_stride, bias, up_bias, is_added, row_scale, surplus, column_scale)`: addresses,
    and bytes from one row of `out` to the next. The last three are of int8 alone, a float32 per row, an int32 and
    a float32 per column. Sums of int8 may have wrapped around: only what is left of them has to fit int32.

    Plain: writes `columns` float32 to each row, `result + bias`, on top of what stands there where `is_added` is
    1. Gated, with gate in the first vector and up in the second: writes `silu(gate + bias) * (up + up_bias)`.
    """
    floats, ints = ir.VectorType(_FLOAT, shape.lanes), ir.VectorType(_INT, shape.lanes)
    vector_bytes = _FLOAT_BYTES * shape.lanes

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: list[ir.Value]) -> ir.Value:
        n_rows, sums, out, out_stride, bias, up_bias, is_added, row_scale, surplus, column_scale = arguments

        def pair(address: ir.Value, kind: ir.Type) -> list[ir.Value]:
            return [load(builder, address, offset, kind, align=4) for offset in (0, vector_bytes)]

        scale: _Scale = _as_they_are
        if is_int8:
            scale = _int8_scale(row_scale, pair(surplus, ints), pair(column_scale, floats))
        biases = pair(bias, floats)
        if is_gated:
            biases[1] = load(builder, up_bias, 0, floats, align=4)
        is_on_top = builder.trunc(is_added, _BIT)

        def finish_row(r: ir.Value) -> None:
            row = builder.add(sums, builder.mul(r, _long(_FLOAT_BYTES * shape.columns)))
            place = builder.add(out, builder.mul(r, out_stride))
            results = scale(builder, pair(row, ints if is_int8 else floats), r)
            results = [
                builder.fadd(result, of_columns) for result, of_columns in zip(results, biases, strict=True)
            ]
            if is_gated:
                store(builder, _gated(builder, *results), place, 0)
                return
            # What is not added to is not read: its memory may be far away.
            olds = pair(builder.select(is_on_top, place, row), floats)
            for result, old, offset in zip(results, olds, (0, vector_bytes), strict=True):
                below = builder.select(is_on_top, old, ir.Constant(floats, None))
                store(builder, builder.fadd(below, result), place, offset)

        _for_each(builder, n_rows, finish_row)
        return context.get_dummy_value()

    @intrinsic
    def finish(
        _typing: Any,
        n_rows: Any,
        sums: Any,
        out: Any,
        out_stride: Any,
        bias: Any,
        up_bias: Any,
        is_added: Any,
        row_scale: Any,
        surplus: Any,
        column_scale: Any,
    ) -> Any:
        return types.void(*[types.int64] * 10), generate

    return finish


def _as_they_are(_builder: ir.IRBuilder, sums: list[ir.Value], _r: ir.Value) -> list[ir.Value]:
    return sums


def _int8_scale(row_scale: ir.Value, surplus: list[ir.Value], column_scale: list[ir.Value]) -> _Scale:
    def scaled(builder: ir.IRBuilder, sums: list[ir.Value], r: ir.Value) -> list[ir.Value]:
        address = builder.add(row_scale, builder.mul(r, _long(_FLOAT_BYTES)))
        of_row = spread(builder, load(builder, address, 0, _FLOAT, align=4), sums[0].type.count)
        return [
            builder.fmul(
                builder.sitofp(builder.sub(total, excess), of_columns.type), builder.fmul(of_row, of_columns)
            )
            for total, excess, of_columns in zip(sums, surplus, column_scale, strict=True)
        ]

    return scaled


def _gated(builder: ir.IRBuilder, gate: ir.Value, up: ir.Value) -> ir.Value:
    """`gate / (1 + e^-gate) * up`."""
    vector = gate.type
    one, zero = ir.Constant(vector, [1.0] * vector.count), ir.Constant(vector, None)
    magnitude = builder.call(declare(builder, f"llvm.fabs.v{vector.count}f32", vector, [vector]), [gate])
    decay = exp_of_negatives(builder, builder.fneg(magnitude))
    # e^gate / (1 + e^gate) for a negative gate: e^-gate would overflow.
    share = builder.select(builder.fcmp_ordered(">=", gate, zero), one, decay)
    weight = builder.fdiv(builder.fmul(gate, share), builder.fadd(one, decay))
    return builder.fmul(weight, up)


def _for_each(builder: ir.IRBuilder, n_rows: ir.Value, visit: Callable[[ir.Value], None]) -> None:
    """A loop over the rows, of which there is one at least."""
    before = builder.block
    loop, done = builder.append_basic_block("row"), builder.append_basic_block("rows_done")
    builder.branch(loop)
    builder.position_at_end(loop)
    r = builder.phi(_LONG)
    r.add_incoming(_long(0), before)
    visit(r)
    following = builder.add(r, _long(1))
    r.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, n_rows), loop, done)
    builder.position_at_end(done)


def _long(value: int) -> ir.Constant:
    return ir.Constant(_LONG, value)
