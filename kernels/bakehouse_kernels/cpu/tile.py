"""The inner loop of a matrix product, written as LLVM instructions: a tile of the result that stays in registers.

One step reads a vector pair of the weights and one number of each row, and multiplies them into the tile's sums:

    sums[r, :] += x[r, k] * panel[k, :]          r < rows of the tile, panel `[steps, 2 vectors]`

With 12 rows a step is 24 multiply-adds for 14 reads, so the multipliers are the limit and not the caches; 12 x 2
sums, the pair of weights and one spread-out number fill most of the 32 registers of AVX-512 and of NEON. AVX2 and
SSE have 16: there a tile has 6 rows. Numba's own language cannot say this: a loop over an array of sums becomes
traffic with memory. LLVM's generic vectors compile for every machine; the one instruction named is `vpdpbusd`.

A step of the int8 tile takes four inputs at once: four unsigned bytes of a row against four signed bytes of each
column, summed into 32 bits. `vpdpbusd` does that, where there is one (AVX-512 VNNI, AVX-VNNI); elsewhere
16-bit products do, with the same sums.

Each sum is one accumulator that runs over the steps in order: a row's bits do not depend on the rows beside it.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types

from bakehouse_kernels.cpu.compile import intrinsic

_BYTE, _SHORT, _INT, _LONG, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()

# Bytes of one number of a row and of one lane of a panel: a float32, or four int8.
STEP_BYTES = 4

_N_VECTORS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """How a machine's registers are used: 32-bit lanes of a vector, rows of the tallest tile."""

    lanes: int
    max_rows: int
    has_byte_dot: bool

    @property
    def columns(self) -> int:
        """Columns of a tile, and of a panel of packed weights."""
        return _N_VECTORS * self.lanes


def shape_for(features: dict[str, bool]) -> TileShape:
    """The tile for a machine with these features, as LLVM names them."""
    if features.get("avx512f") and features.get("avx512bw"):
        return TileShape(lanes=16, max_rows=12, has_byte_dot=features.get("avx512vnni", False))
    if features.get("avx2") and features.get("fma"):
        return TileShape(lanes=8, max_rows=6, has_byte_dot=features.get("avxvnni", False))
    return TileShape(lanes=4, max_rows=12 if features.get("neon") else 6, has_byte_dot=False)


SHAPE = shape_for(dict(llvmlite.binding.get_host_cpu_features()))


# From a builder, the sums so far, a number of a row and a vector of weights: the new sums.
MultiplyAdd = Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], ir.Value]

# From a builder, a vector of sums, its row and first column in the tile, further arguments: the float32 result.
_Finish = Callable[[ir.IRBuilder, ir.Value, int, int, list[ir.Value]], ir.Value]


def float32_tile(shape: TileShape) -> Any:
    """For compiled code, the tile of a float32 panel `[steps, columns]`.

    `tile(n_rows, x, x_stride, panel, n_steps, out)`: addresses, and bytes from one row of `x` to the next; `panel`
    is aligned to its vectors, 1 ≤ `n_rows` ≤ `shape.max_rows`, 1 ≤ `n_steps`. Writes float32 `[n_rows, columns]`.
    """

    def finish(builder: ir.IRBuilder, sums: ir.Value, r: int, column: int, further: list[ir.Value]) -> ir.Value:
        return sums

    @intrinsic
    def tile(_typing: Any, n_rows: Any, x: Any, x_stride: Any, panel: Any, n_steps: Any, out: Any) -> Any:
        return types.void(*[types.int64] * 6), _generator(shape, _FLOAT, multiply_add, finish)

    return tile


def adding_tile(shape: TileShape) -> Any:
    """As `float32_tile`, onto what stands at `out` already: `out * factor + x @ panel`, a factor for each row.

    `tile(n_rows, x, x_stride, panel, n_steps, out, factor)`: the last is the address of a float32 per row.
    """
    vector = ir.VectorType(_FLOAT, shape.lanes)

    def finish(builder: ir.IRBuilder, sums: ir.Value, r: int, column: int, further: list[ir.Value]) -> ir.Value:
        out, factor = further
        old = load(builder, out, 4 * (r * shape.columns + column), vector, align=4)
        of_row = spread(builder, load(builder, factor, 4 * r, _FLOAT, align=4), shape.lanes)
        return builder.call(_fused(builder, vector), [of_row, old, sums])

    @intrinsic
    def tile(
        _typing: Any, n_rows: Any, x: Any, x_stride: Any, panel: Any, n_steps: Any, out: Any, factor: Any
    ) -> Any:
        generate = _generator(shape, _FLOAT, multiply_add, finish)

        def with_out(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]) -> ir.Value:
            *others, factor_address = arguments
            return generate(context, builder, signature, [*others, others[-1], factor_address])

        return types.void(*[types.int64] * 7), with_out

    return tile


def multiply_add(builder: ir.IRBuilder, sums: ir.Value, x: ir.Value, weights: ir.Value) -> ir.Value:
    """`sums + x * weights` of float32."""
    return builder.call(_fused(builder, sums.type), [spread(builder, x, sums.type.count), weights, sums])


def _fused(builder: ir.IRBuilder, vector: ir.VectorType) -> ir.Function:
    """`a * b + c`, rounded once where the machine can."""
    return declare(builder, f"llvm.fmuladd.v{vector.count}f32", vector, [vector] * 3)


@intrinsic
def fetch_ahead(_typing: Any, address: Any) -> Any:
    """For compiled code: have the line of memory at `address` brought into the second-level cache."""

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: list[ir.Value]) -> ir.Value:
        pointer = _BYTE.as_pointer()
        operation = declare(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, _INT, _INT, _INT])
        reads, near, of_data = _int(0), _int(2), _int(1)
        builder.call(operation, [builder.inttoptr(arguments[0], pointer), reads, near, of_data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def int8_tile(shape: TileShape) -> Any:
    """For compiled code, the tile of an int8 panel `[steps, columns, 4]` under rows of unsigned bytes.

    `tile(n_rows, x, x_stride, panel, n_steps, out, row_scale, surplus, column_scale)` as `float32_tile`'s, then
    the addresses of a float32 per row, an int32 and a float32 per column. Writes
    `(sum - surplus) * (row_scale * column_scale)`. Sums wrap around: only that difference has to fit int32.
    """
    sums_type, float_type = ir.VectorType(_INT, shape.lanes), ir.VectorType(_FLOAT, shape.lanes)

    def finish(builder: ir.IRBuilder, sums: ir.Value, r: int, column: int, further: list[ir.Value]) -> ir.Value:
        row_scale, surplus, column_scale = further
        exact = builder.sub(sums, load(builder, surplus, 4 * column, sums_type, align=4))
        of_row = spread(builder, load(builder, row_scale, 4 * r, _FLOAT, align=4), shape.lanes)
        scale = builder.fmul(of_row, load(builder, column_scale, 4 * column, float_type, align=4))
        return builder.fmul(builder.sitofp(exact, float_type), scale)

    @intrinsic
    def tile(
        _typing: Any,
        n_rows: Any,
        x: Any,
        x_stride: Any,
        panel: Any,
        n_steps: Any,
        out: Any,
        row_scale: Any,
        surplus: Any,
        column_scale: Any,
    ) -> Any:
        return types.void(*[types.int64] * 9), _generator(shape, _INT, int8_multiply_add(shape), finish)

    return tile


def int8_multiply_add(shape: TileShape) -> MultiplyAdd:
    """`sums` and, for each, four products of an unsigned byte of `x` and a signed one of `weights`."""
    return _multiply_add_bytes if shape.has_byte_dot else _multiply_add_shorts


def _multiply_add_bytes(builder: ir.IRBuilder, sums: ir.Value, x: ir.Value, weights: ir.Value) -> ir.Value:
    lanes = sums.type.count
    byte_type = ir.VectorType(_BYTE, 4 * lanes)
    operation = declare(
        builder, f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", sums.type, [sums.type, byte_type, byte_type]
    )
    bytes_of_row = builder.bitcast(spread(builder, x, lanes), byte_type)
    return builder.call(operation, [sums, bytes_of_row, builder.bitcast(weights, byte_type)])


def _multiply_add_shorts(builder: ir.IRBuilder, sums: ir.Value, x: ir.Value, weights: ir.Value) -> ir.Value:
    """Without `vpdpbusd`: bytes 0 and 2 of a lane, then 1 and 3, widened to 16 bits."""
    lanes = sums.type.count
    shorts, pairs = ir.VectorType(_SHORT, 2 * lanes), ir.VectorType(_INT, 2 * lanes)
    eight = ir.Constant(shorts, [8] * 2 * lanes)
    bytes_of_columns = builder.bitcast(weights, shorts)
    for odd in (False, True):
        column = builder.ashr(bytes_of_columns if odd else builder.shl(bytes_of_columns, eight), eight)
        row = builder.and_(builder.lshr(x, _int(8)) if odd else x, _int(0x00FF00FF))
        bytes_of_row = builder.bitcast(spread(builder, row, lanes), shorts)
        products = builder.mul(builder.sext(bytes_of_row, pairs), builder.sext(column, pairs))
        for half in (0, 1):  # LLVM makes one instruction of the two: `vpmaddwd`
            every_second = ir.Constant(ir.VectorType(_INT, lanes), [2 * i + half for i in range(lanes)])
            sums = builder.add(sums, builder.shuffle_vector(products, products, every_second))
    return sums


def _generator(shape: TileShape, element: ir.Type, multiply_add: MultiplyAdd, finish: _Finish) -> Any:
    """What writes the instructions of a tile function: a loop for each number of rows, and which one to take."""

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: list[ir.Value]) -> ir.Value:
        n_rows, *others = arguments
        done = builder.append_basic_block("tile_done")
        blocks = [builder.append_basic_block(f"tile_{n}") for n in range(1, shape.max_rows + 1)]
        switch = builder.switch(n_rows, blocks[-1])
        for n, block in enumerate(blocks[:-1], start=1):
            switch.add_case(_long(n), block)
        for n, block in enumerate(blocks, start=1):
            builder.position_at_end(block)
            _write_loop(builder, shape, element, multiply_add, finish, n, others)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return generate


def _write_loop(
    builder: ir.IRBuilder,
    shape: TileShape,
    element: ir.Type,
    multiply_add: MultiplyAdd,
    finish: _Finish,
    n_rows: int,
    arguments: list[ir.Value],
) -> None:
    """The loop over the steps of a tile with `n_rows`, and its results to memory."""
    x, x_stride, panel, n_steps, out, *further = arguments
    vector = ir.VectorType(element, shape.lanes)
    vector_bytes = STEP_BYTES * shape.lanes
    before = builder.block
    rows = [builder.add(x, builder.mul(x_stride, _long(r))) for r in range(n_rows)]
    loop, done = builder.append_basic_block("steps"), builder.append_basic_block("finish")
    builder.branch(loop)

    builder.position_at_end(loop)
    step = builder.phi(_LONG)
    sums = [[builder.phi(vector) for _ in range(_N_VECTORS)] for _ in range(n_rows)]
    address = builder.add(panel, builder.mul(step, _long(_N_VECTORS * vector_bytes)))
    weights = [load(builder, address, v * vector_bytes, vector, align=vector_bytes) for v in range(_N_VECTORS)]
    offset = builder.mul(step, _long(STEP_BYTES))
    numbers = [load(builder, builder.add(row, offset), 0, element, align=STEP_BYTES) for row in rows]
    new = [
        [multiply_add(builder, sums[r][v], numbers[r], weights[v]) for v in range(_N_VECTORS)]
        for r in range(n_rows)
    ]
    following = builder.add(step, _long(1))
    builder.cbranch(builder.icmp_signed("<", following, n_steps), loop, done)
    step.add_incoming(_long(0), before)
    step.add_incoming(following, loop)
    for r, v in itertools.product(range(n_rows), range(_N_VECTORS)):
        sums[r][v].add_incoming(ir.Constant(vector, None), before)
        sums[r][v].add_incoming(new[r][v], loop)

    builder.position_at_end(done)
    for r, v in itertools.product(range(n_rows), range(_N_VECTORS)):
        result = finish(builder, new[r][v], r, v * shape.lanes, further)
        address = builder.add(out, _long((r * _N_VECTORS + v) * vector_bytes))
        builder.store(result, builder.inttoptr(address, result.type.as_pointer()), align=STEP_BYTES)


def load(builder: ir.IRBuilder, address: ir.Value, offset: int, kind: ir.Type, *, align: int) -> ir.Value:
    pointer = builder.inttoptr(builder.add(address, _long(offset)), kind.as_pointer())
    return builder.load(pointer, align=align)


def spread(builder: ir.IRBuilder, number: ir.Value, lanes: int) -> ir.Value:
    """A vector with `number` in every lane."""
    vector = ir.VectorType(number.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), number, _int(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_INT, lanes), [0] * lanes))


def declare(builder: ir.IRBuilder, name: str, returned: ir.Type, arguments: list[ir.Type]) -> ir.Function:
    module = builder.module
    if name in module.globals:
        return module.globals[name]
    return ir.Function(module, ir.FunctionType(returned, arguments), name)


def _int(value: int) -> ir.Constant:
    return ir.Constant(_INT, value)


def _long(value: int) -> ir.Constant:
    return ir.Constant(_LONG, value)
