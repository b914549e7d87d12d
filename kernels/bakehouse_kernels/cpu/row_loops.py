"""Passes over the numbers of a row, written as LLVM instructions: vectors first, then what is left one by one.

Numba vectorises such a loop only where it can prove that rows do not overlap, and hands arrays from function to
function at the price of a short row. These take addresses. A number's result does not depend on where in the row
it stands, except in `square_sum`, whose order of additions is the same on all machines.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from bakehouse_kernels.cpu.compile import intrinsic
from bakehouse_kernels.cpu.tile import HAS_HALF, SHAPE, declare, load, spread

_BYTE, _INT, _LONG, _FLOAT, _HALF = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.HalfType()

FLOAT_BYTES, HALF_BYTES = 4, 2
LARGEST_HALF = 65504.0
_LARGEST = 3.4028234663852886e38
_INFINITY = float("inf")
_SUM_LANES = 64  # sums side by side: four vectors of AVX-512, so that none waits for its last addition

# From the index of a number, how many from there on, and the value so far: the new one.
Visit = Callable[[ir.Value, int, ir.Value], ir.Value]


def loop(
    builder: ir.IRBuilder, begin: ir.Value, end: ir.Value, stride: int, start: ir.Value, visit: Visit
) -> tuple[ir.Value, ir.Value]:
    """Visit `stride` numbers at a time as long as so many are left; the index after them, and the last value."""
    before = builder.block
    head, body, done = (builder.append_basic_block(f"row_{name}") for name in ("head", "body", "done"))
    builder.branch(head)
    builder.position_at_end(head)
    i, value = builder.phi(_LONG), builder.phi(start.type)
    following = builder.add(i, ir.Constant(_LONG, stride))
    builder.cbranch(builder.icmp_signed("<=", following, end), body, done)
    builder.position_at_end(body)
    new = visit(i, stride, value)
    i.add_incoming(begin, before)
    value.add_incoming(start, before)
    i.add_incoming(following, builder.block)
    value.add_incoming(new, builder.block)
    builder.branch(head)
    builder.position_at_end(done)
    return i, value


def folded(builder: ir.IRBuilder, vector: ir.Value, combine: Any) -> ir.Value:
    """One number from a vector, halving it: an order that never changes."""
    n = vector.type.count
    while n > 1:
        n //= 2
        halves = [
            builder.shuffle_vector(
                vector, vector, ir.Constant(ir.VectorType(_INT, n), list(range(first, first + n)))
            )
            for first in (0, n)
        ]
        vector = combine(builder, *halves)
    return builder.extract_element(vector, ir.Constant(_INT, 0))


def _over_row(builder: ir.IRBuilder, n: ir.Value, start: ir.Value, visit: Visit) -> ir.Value:
    after, value = loop(builder, ir.Constant(_LONG, 0), n, SHAPE.lanes, start, visit)
    return loop(builder, after, n, 1, value, visit)[1]


def _at(builder: ir.IRBuilder, row: ir.Value, i: ir.Value, n_bytes: int = FLOAT_BYTES) -> ir.Value:
    return builder.add(row, builder.mul(i, ir.Constant(_LONG, n_bytes)))


def _floats(builder: ir.IRBuilder, row: ir.Value, i: ir.Value, n: int) -> ir.Value:
    return load(builder, _at(builder, row, i), 0, ir.VectorType(_FLOAT, n), align=FLOAT_BYTES)


def _store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, align: int = FLOAT_BYTES) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def _magnitude(builder: ir.IRBuilder, numbers: ir.Value) -> ir.Value:
    function = declare(builder, f"llvm.fabs.v{numbers.type.count}f32", numbers.type, [numbers.type])
    return builder.call(function, [numbers])


_NOTHING = ir.Constant(ir.IntType(1), 1)


@intrinsic
def scale_row(_typing: Any, row: Any, n: Any, factor: Any, out: Any) -> Any:
    """`out = row * factor`, n numbers; whether all of them are finite."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, arguments: list[ir.Value]) -> ir.Value:
        row, n, factor, out = arguments

        def visit(i: ir.Value, width: int, is_finite: ir.Value) -> ir.Value:
            numbers = builder.fmul(_floats(builder, row, i, width), spread(builder, factor, width))
            _store(builder, numbers, _at(builder, out, i))
            largest = ir.Constant(numbers.type, [_LARGEST] * width)
            are_finite = builder.fcmp_ordered("<=", _magnitude(builder, numbers), largest)
            mask = builder.bitcast(are_finite, ir.IntType(width))
            return builder.and_(is_finite, builder.icmp_signed("==", mask, ir.Constant(mask.type, -1)))

        return _over_row(builder, n, _NOTHING, visit)

    return types.boolean(types.int64, types.int64, types.float32, types.int64), generate


@intrinsic
def clear_row(_typing: Any, out: Any, n: Any) -> Any:
    """`out = 0`, n numbers."""

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: list[ir.Value]) -> ir.Value:
        out, n = arguments

        def visit(i: ir.Value, width: int, value: ir.Value) -> ir.Value:
            _store(builder, ir.Constant(ir.VectorType(_FLOAT, width), None), _at(builder, out, i))
            return value

        _over_row(builder, n, _NOTHING, visit)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def copy_row(_typing: Any, row: Any, n: Any, out: Any) -> Any:
    """`out = row`, n numbers."""

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: list[ir.Value]) -> ir.Value:
        row, n, out = arguments

        def visit(i: ir.Value, width: int, value: ir.Value) -> ir.Value:
            _store(builder, _floats(builder, row, i, width), _at(builder, out, i))
            return value

        _over_row(builder, n, _NOTHING, visit)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def square_sum(_typing: Any, row: Any, n: Any) -> Any:
    """The sum of the squares of n numbers."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, arguments: list[ir.Value]) -> ir.Value:
        row, n = arguments

        def visit(i: ir.Value, width: int, sums: ir.Value) -> ir.Value:
            numbers = _floats(builder, row, i, width)
            fused = declare(builder, f"llvm.fmuladd.v{width}f32", numbers.type, [numbers.type] * 3)
            return builder.call(fused, [numbers, numbers, sums])

        zeros = ir.Constant(ir.VectorType(_FLOAT, _SUM_LANES), None)
        after, sums = loop(builder, ir.Constant(_LONG, 0), n, _SUM_LANES, zeros, visit)
        total = folded(builder, sums, ir.IRBuilder.fadd)
        one = ir.VectorType(_FLOAT, 1)
        total = builder.insert_element(ir.Constant(one, None), total, ir.Constant(_INT, 0))
        total = loop(builder, after, n, 1, total, visit)[1]
        return builder.extract_element(total, ir.Constant(_INT, 0))

    return types.float32(types.int64, types.int64), generate


@intrinsic
def scale_row_by(_typing: Any, row: Any, n: Any, factor: Any, factors: Any, out: Any) -> Any:
    """`out = row * factor * factors`, n numbers of each row."""

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: list[ir.Value]) -> ir.Value:
        row, n, factor, factors, out = arguments

        def visit(i: ir.Value, width: int, value: ir.Value) -> ir.Value:
            numbers = builder.fmul(_floats(builder, row, i, width), spread(builder, factor, width))
            _store(builder, builder.fmul(numbers, _floats(builder, factors, i, width)), _at(builder, out, i))
            return value

        _over_row(builder, n, _NOTHING, visit)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64, types.int64), generate


@intrinsic
def rotate_row(_typing: Any, row: Any, half: Any, cos: Any, sin: Any, out: Any) -> Any:
    """`out = row * cos + concat(-row[half:], row[:half]) * sin`, 2 * half numbers of each row."""

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: list[ir.Value]) -> ir.Value:
        row, half, cos, sin, out = arguments

        def visit(i: ir.Value, width: int, value: ir.Value) -> ir.Value:
            j = builder.add(half, i)
            first, second = (_floats(builder, row, place, width) for place in (i, j))
            fused = declare(builder, f"llvm.fmuladd.v{width}f32", first.type, [first.type] * 3)
            for place, x, other in ((i, first, builder.fneg(second)), (j, second, first)):
                cosine, sine = (_floats(builder, of, place, width) for of in (cos, sin))
                turned = builder.call(fused, [x, cosine, builder.fmul(other, sine)])
                _store(builder, turned, _at(builder, out, place))
            return value

        _over_row(builder, half, _NOTHING, visit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic
def halve_row(_typing: Any, row: Any, n: Any, out: Any) -> Any:
    """n numbers as float16, rounded to nearest; a finite one beyond ±65504 becomes that, NaN and infinity stay."""

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: list[ir.Value]) -> ir.Value:
        row, n, out = arguments

        def visit(i: ir.Value, width: int, value: ir.Value) -> ir.Value:
            numbers = _floats(builder, row, i, width)
            for relation, bound, infinity in (("<", LARGEST_HALF, _INFINITY), (">", -LARGEST_HALF, -_INFINITY)):
                most, beyond = (ir.Constant(numbers.type, [x] * width) for x in (bound, infinity))
                is_beyond = builder.and_(
                    builder.fcmp_ordered(relation, most, numbers), builder.fcmp_ordered(relation, numbers, beyond)
                )
                numbers = builder.select(is_beyond, most, numbers)
            halves = builder.fptrunc(numbers, ir.VectorType(_HALF, width))
            _store(builder, halves, _at(builder, out, i, HALF_BYTES), HALF_BYTES)
            return value

        if HAS_HALF:  # elsewhere never called, but compiled all the same
            _over_row(builder, n, _NOTHING, visit)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _strided(element: ir.Type, n_bytes: int) -> Any:
    @intrinsic
    def scatter(_typing: Any, row: Any, n: Any, out: Any, stride: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: list[ir.Value]) -> ir.Value:
            row, n, out, stride = arguments

            def visit(i: ir.Value, _width: int, value: ir.Value) -> ir.Value:
                number = load(builder, _at(builder, row, i, n_bytes), 0, element, align=n_bytes)
                _store(builder, number, builder.add(out, builder.mul(i, stride)), n_bytes)
                return value

            loop(builder, ir.Constant(_LONG, 0), n, 1, _NOTHING, visit)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), generate

    return scatter


# `scatter(row, n, out, stride)`: n numbers of a row, so many bytes apart.
scatter_floats = _strided(ir.IntType(32), FLOAT_BYTES)
scatter_halves = _strided(ir.IntType(16), HALF_BYTES)


@intrinsic
def claim_lines(_typing: Any, address: Any, n: Any, stride: Any) -> Any:
    """Have n lines of memory, so many bytes apart, brought into the first-level cache to be written."""

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: list[ir.Value]) -> ir.Value:
        address, n, stride = arguments

        def visit(i: ir.Value, _width: int, value: ir.Value) -> ir.Value:
            prefetch(builder, builder.add(address, builder.mul(i, stride)), writes=True)
            return value

        loop(builder, ir.Constant(_LONG, 0), n, 1, _NOTHING, visit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


def prefetch(builder: ir.IRBuilder, address: ir.Value, *, writes: bool) -> None:
    """Have a line of memory brought into the first-level cache to be written, or into the second to be read.

    The first waits for 24 lines at a time or so. Chunks of 8 KB here and there, read by one thread of a Zen 4: 10
    GB/s, 11 when asked for into the first level one chunk ahead, 19 into the second.
    """
    pointer = _BYTE.as_pointer()
    operation = declare(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, _INT, _INT, _INT])
    options = (int(writes), 3 if writes else 2, 1)  # nearness, and that it is not code
    builder.call(operation, [builder.inttoptr(address, pointer), *(ir.Constant(_INT, x) for x in options)])
