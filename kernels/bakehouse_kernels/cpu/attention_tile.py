"""The matrix products of attention, over panels of one block and key head: scores, and sums of weighted values.

As `cpu.tile`, with what attention adds: panels may hold float16, which is widened on its way into the registers;
and each step asks for the line of memory that lies as far into the panel that comes next. Hardware does not look
ahead from one block to another, and a burst of requests before a block would hold up the work on it.

A tile of few rows takes two panels of values at once, so that there are sums enough to keep the multipliers busy.
Each sum is one accumulator over the steps in order in either case: its bits are the same.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types

from bakehouse_kernels.cpu.compile import intrinsic
from bakehouse_kernels.cpu.row_loops import prefetch
from bakehouse_kernels.cpu.tile import TileShape, load, multiply_add

_LONG, _FLOAT, _HALF = ir.IntType(64), ir.FloatType(), ir.HalfType()

_FLOAT_BYTES = 4
_N_VECTORS = 2
_LINE_BYTES = 64  # of the caches
_N_WIDE = 2  # panels that a tile of few rows takes at once
_HEIGHTS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True)
class _Panels:
    """Where the panels stand that a tile takes side by side, `panel_bytes` apart, and those to fetch ahead."""

    first: ir.Value
    following: ir.Value
    panel_bytes: ir.Value
    n_steps: ir.Value


# From a builder, a vector of sums, its row, panel and column in that: what has to be stored.
_Finish = Callable[[ir.IRBuilder, ir.Value, int, int, int], ir.Value]


def heights(shape: TileShape) -> tuple[int, ...]:
    """How many rows a tile may have, rising. Each number is a loop of its own, which takes time to compile."""
    return (*(n for n in _HEIGHTS if n < shape.max_rows), shape.max_rows)


def scores_tile(shape: TileShape) -> Any:
    """For compiled code: `out = q @ panel`, of a panel `[steps, columns]` of keys.

    `tile(n_rows, q, q_stride, panel, n_steps, out, following, element)`: addresses, and bytes from one row of `q`
    to the next; `n_rows` is one of `heights`, 1 ≤ `n_steps`. Writes float32 `[n_rows, columns]`. `following` is
    the address of the panel to fetch ahead; `element` an int16 where panels hold float16, else a float32.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]) -> ir.Value:
        n_rows, q, q_stride, panel, n_steps, out, following, _ = arguments
        is_half = signature.args[-1] == types.int16
        panels = _Panels(panel, following, _long(0), n_steps)

        def write(n: int) -> None:
            _write_tile(
                builder, shape, is_half, (n, 1), (q, q_stride), panels, (out, _long(0)), lambda _b, sums, *_: sums
            )

        _write_for_each(builder, n_rows, heights(shape), write)
        return context.get_dummy_value()

    @intrinsic
    def tile(
        _typing: Any,
        n_rows: Any,
        q: Any,
        q_stride: Any,
        panel: Any,
        n_steps: Any,
        out: Any,
        following: Any,
        element: Any,
    ) -> Any:
        return types.void(*[types.int64] * 7, element), generate

    return tile


def values_tile(shape: TileShape, *, is_wide: bool) -> Any:
    """For compiled code: `out = out * factor + weights @ panel`, of a panel `[steps, columns]` of values.

    `tile(n_rows, weights, stride, panel, panel_bytes, n_steps, out, out_bytes, factor, following, element)`: as
    `scores_tile`, where `factor` is the address of a float32 per row. A wide one takes two panels, `panel_bytes`
    and, at `out`, `out_bytes` apart, and at most half as many rows.
    """
    n_panels = _N_WIDE if is_wide else 1
    vector = ir.VectorType(_FLOAT, shape.lanes)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]) -> ir.Value:
        n_rows, weights, stride, panel, panel_bytes, n_steps, out, out_bytes, factor, following, _ = arguments
        is_half = signature.args[-1] == types.int16
        panels = _Panels(panel, following, panel_bytes, n_steps)

        def finish(builder: ir.IRBuilder, sums: ir.Value, r: int, p: int, column: int) -> ir.Value:
            address = builder.add(out, builder.mul(out_bytes, _long(p)))
            old = load(builder, address, _FLOAT_BYTES * (r * shape.columns + column), vector, align=_FLOAT_BYTES)
            return multiply_add(
                builder, sums, load(builder, factor, _FLOAT_BYTES * r, _FLOAT, align=_FLOAT_BYTES), old
            )

        def write(n: int) -> None:
            _write_tile(
                builder, shape, is_half, (n, n_panels), (weights, stride), panels, (out, out_bytes), finish
            )

        sizes = tuple(n for n in heights(shape) if n * n_panels <= shape.max_rows)
        _write_for_each(builder, n_rows, sizes, write)
        return context.get_dummy_value()

    @intrinsic
    def tile(
        _typing: Any,
        n_rows: Any,
        weights: Any,
        stride: Any,
        panel: Any,
        panel_bytes: Any,
        n_steps: Any,
        out: Any,
        out_bytes: Any,
        factor: Any,
        following: Any,
        element: Any,
    ) -> Any:
        return types.void(*[types.int64] * 10, element), generate

    return tile


def _write_for_each(
    builder: ir.IRBuilder, n: ir.Value, sizes: tuple[int, ...], write: Callable[[int], None]
) -> None:
    """The code of `write` for each size, and a switch over `n` that takes one of them."""
    done = builder.append_basic_block("tile_done")
    blocks = [builder.append_basic_block(f"tile_{rows}") for rows in sizes]
    switch = builder.switch(n, blocks[-1])
    for rows, block in zip(sizes, blocks, strict=True):
        if block is not blocks[-1]:
            switch.add_case(_long(rows), block)
        builder.position_at_end(block)
        write(rows)
        builder.branch(done)
    builder.position_at_end(done)


def _write_tile(
    builder: ir.IRBuilder,
    shape: TileShape,
    is_half: bool,
    size: tuple[int, int],
    x: tuple[ir.Value, ir.Value],
    panels: _Panels,
    out: tuple[ir.Value, ir.Value],
    finish: _Finish,
) -> None:
    """The loop over the steps for `size` rows and panels, and its results to memory."""
    n_rows, n_panels = size
    vector, element_bytes = ir.VectorType(_FLOAT, shape.lanes), 2 if is_half else _FLOAT_BYTES
    step_bytes = shape.columns * element_bytes
    each = list(itertools.product(range(n_rows), range(n_panels), range(_N_VECTORS)))
    before = builder.block
    rows = [builder.add(x[0], builder.mul(x[1], _long(r))) for r in range(n_rows)]
    offsets = [builder.mul(panels.panel_bytes, _long(p)) for p in range(n_panels)]
    loop, done = builder.append_basic_block("steps"), builder.append_basic_block("finish")
    builder.branch(loop)

    builder.position_at_end(loop)
    step = builder.phi(_LONG)
    sums = {place: builder.phi(vector) for place in each}
    of_step = builder.mul(step, _long(step_bytes))
    for offset in offsets:
        address = builder.add(builder.add(panels.following, offset), of_step)
        for line in range(0, step_bytes, _LINE_BYTES):
            prefetch(builder, builder.add(address, _long(line)), writes=False)
    addresses = [builder.add(builder.add(panels.first, offset), of_step) for offset in offsets]
    numbers = [
        [_load_wide(builder, address, v * shape.lanes * element_bytes, vector, is_half) for v in range(_N_VECTORS)]
        for address in addresses
    ]
    x_offset = builder.mul(step, _long(_FLOAT_BYTES))
    of_rows = [load(builder, builder.add(row, x_offset), 0, _FLOAT, align=_FLOAT_BYTES) for row in rows]
    new = {(r, p, v): multiply_add(builder, sums[r, p, v], of_rows[r], numbers[p][v]) for r, p, v in each}
    following = builder.add(step, _long(1))
    builder.cbranch(builder.icmp_signed("<", following, panels.n_steps), loop, done)
    step.add_incoming(_long(0), before)
    step.add_incoming(following, loop)
    for place in each:
        sums[place].add_incoming(ir.Constant(vector, None), before)
        sums[place].add_incoming(new[place], loop)

    builder.position_at_end(done)
    for r, p, v in each:
        result = finish(builder, new[r, p, v], r, p, v * shape.lanes)
        address = builder.add(out[0], builder.mul(out[1], _long(p)))
        address = builder.add(address, _long((r * _N_VECTORS + v) * shape.lanes * _FLOAT_BYTES))
        builder.store(result, builder.inttoptr(address, vector.as_pointer()), align=_FLOAT_BYTES)


def _load_wide(
    builder: ir.IRBuilder, address: ir.Value, offset: int, vector: ir.VectorType, is_half: bool
) -> ir.Value:
    """A vector of float32, perhaps widened."""
    if not is_half:
        return load(builder, address, offset, vector, align=_FLOAT_BYTES * vector.count)
    halves = load(builder, address, offset, ir.VectorType(_HALF, vector.count), align=2 * vector.count)
    return builder.fpext(halves, vector)


def _long(value: int) -> ir.Constant:
    return ir.Constant(_LONG, value)
