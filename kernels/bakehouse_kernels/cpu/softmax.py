"""One step of the online softmax for one row of scores, in vector instructions (see `cpu.tile` for why).

Numba makes scalar code of it: a maximum may not be reordered where there may be a NaN.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from bakehouse_kernels.cpu.exponential import exp_of_negatives
from bakehouse_kernels.cpu.row_loops import folded
from bakehouse_kernels.cpu.tile import TileShape, load, spread

_INT, _LONG, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_LOWEST = -3.4028234663852886e38


def softmax_step(shape: TileShape) -> Any:
    """For compiled code: turn a block's scores of one row into weights, in place.

    `step(scores, panel_bytes, n_panels, low, high, highest, total, factor)`: address of the row's scores in the
    first panel, `[columns]`, and bytes to the next; the slots `low <= j < high` are visible, what stands in the
    others may be anything and weighs nothing. Then the addresses of three float32 of the row: the highest score so
    far and the sum of the weights relative to it, both brought up to date, and, written, the factor by which
    what was summed up before has to be multiplied. A NaN among the visible scores makes the sum one.
    """
    lanes = shape.lanes
    floats, ints = ir.VectorType(_FLOAT, lanes), ir.VectorType(_INT, lanes)

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: list[ir.Value]) -> ir.Value:
        scores, panel_bytes, n_panels, low, high, highest, total, factor = arguments
        bounds = [spread(builder, builder.trunc(bound, _INT), lanes) for bound in (low, high)]

        def vectors(visit: Any, start: ir.Value) -> ir.Value:
            """Fold `visit(value so far, address, whether visible)` over all vectors of the row."""
            before = builder.block
            loop, done = builder.append_basic_block("panel"), builder.append_basic_block("panels_done")
            builder.branch(loop)
            builder.position_at_end(loop)
            panel, value = builder.phi(_LONG), builder.phi(start.type)
            panel.add_incoming(ir.Constant(_LONG, 0), before)
            value.add_incoming(start, before)
            address = builder.add(scores, builder.mul(panel, panel_bytes))
            slot = builder.mul(builder.trunc(panel, _INT), ir.Constant(_INT, shape.columns))
            new = value
            for first in range(0, shape.columns, lanes):
                offsets = ir.Constant(ints, list(range(first, first + lanes)))
                slots = builder.add(spread(builder, slot, lanes), offsets)
                is_visible = builder.and_(
                    builder.icmp_signed(">=", slots, bounds[0]), builder.icmp_signed("<", slots, bounds[1])
                )
                new = visit(new, builder.add(address, ir.Constant(_LONG, 4 * first)), is_visible)
            following = builder.add(panel, ir.Constant(_LONG, 1))
            panel.add_incoming(following, loop)
            value.add_incoming(new, loop)
            builder.cbranch(builder.icmp_signed("<", following, n_panels), loop, done)
            builder.position_at_end(done)
            return new

        def raise_peak(peak: ir.Value, address: ir.Value, is_visible: ir.Value) -> ir.Value:
            score = load(builder, address, 0, floats, align=4)
            is_higher = builder.and_(is_visible, builder.fcmp_ordered(">", score, peak))
            return builder.select(is_higher, score, peak)

        peaks = vectors(raise_peak, ir.Constant(floats, [_LOWEST] * lanes))
        old = load(builder, highest, 0, _FLOAT, align=4)
        peak = folded(builder, peaks, _higher)
        peak = _higher(builder, old, peak)
        peak_vector = spread(builder, peak, lanes)

        def weigh(sums: ir.Value, address: ir.Value, is_visible: ir.Value) -> ir.Value:
            score = load(builder, address, 0, floats, align=4)
            weight = exp_of_negatives(builder, builder.fsub(score, peak_vector))
            weight = builder.select(is_visible, weight, ir.Constant(floats, None))
            builder.store(weight, builder.inttoptr(address, floats.as_pointer()), align=4)
            return builder.fadd(sums, weight)

        sums = vectors(weigh, ir.Constant(floats, None))
        shrink = builder.extract_element(
            exp_of_negatives(builder, spread(builder, builder.fsub(old, peak), lanes)), ir.Constant(_INT, 0)
        )
        before = builder.fmul(load(builder, total, 0, _FLOAT, align=4), shrink)
        _store(builder, builder.fadd(before, folded(builder, sums, ir.IRBuilder.fadd)), total)
        _store(builder, peak, highest)
        _store(builder, shrink, factor)
        return context.get_dummy_value()

    @intrinsic
    def step(
        _typing: Any,
        scores: Any,
        panel_bytes: Any,
        n_panels: Any,
        low: Any,
        high: Any,
        highest: Any,
        total: Any,
        factor: Any,
    ) -> Any:
        return types.void(*[types.int64] * 8), generate

    return step


def _higher(builder: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def _store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)
