"""The inner loop of a matrix product, written as LLVM instructions: a tile of the result that stays in registers.

One step reads a vector pair of the weights and one number of each row, and multiplies them into the tile's sums:

    sums[r, :] += x[r, k] * panel[k, :]          r < rows of the tile, panel `[steps, 2 vectors]`

With 12 rows a step is 24 multiply-adds for 14 reads, so the multipliers are the limit and not the caches; 12 x 2
sums, the pair of weights and one spread-out number fill most of the 32 registers of AVX-512 and of NEON. AVX2 and
SSE have 16: there a tile has 6 rows. Numba's own language cannot say this: a loop over an array of sums becomes
traffic with memory. LLVM's generic vectors compile for every machine; what a step of narrower numbers than float32
does, two or four inputs at once, is in `narrow.py`.

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

_BYTE, _INT, _LONG, _FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()

# Bytes of one number of a row and of one lane of a panel: a float32, two bfloat16 or four int8.
STEP_BYTES = 4

LINE_BYTES = 64  # of the caches

_N_VECTORS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """How a machine's registers are used: 32-bit lanes of a vector, rows of the tallest tile."""

    lanes: int
    max_rows: int
    has_byte_dot: bool
    has_bfloat16_dot: bool

    @property
    def columns(self) -> int:
        """Columns of a tile, and of a panel of packed weights."""
        return _N_VECTORS * self.lanes


def shape_for(features: dict[str, bool]) -> TileShape:
    """The tile for a machine with these features, as LLVM names them."""
    if features.get("avx512f") and features.get("avx512bw"):
        return TileShape(
            lanes=16,
            max_rows=12,
            has_byte_dot=features.get("avx512vnni", False),
            has_bfloat16_dot=features.get("avx512bf16", False),
        )
    if features.get("avx2") and features.get("fma"):
        has_byte_dot = features.get("avxvnni", False)
        return TileShape(lanes=8, max_rows=6, has_byte_dot=has_byte_dot, has_bfloat16_dot=False)
    max_rows = 12 if features.get("neon") else 6
    return TileShape(lanes=4, max_rows=max_rows, has_byte_dot=False, has_bfloat16_dot=False)


_FEATURES = dict(llvmlite.binding.get_host_cpu_features())
SHAPE = shape_for(_FEATURES)
HAS_HALF: bool = _FEATURES.get("f16c", False) or _FEATURES.get("neon", False)
"""Whether this machine turns float16 into float32 and back."""


# From a builder, the sums so far, a number of a row and a vector of weights: the new sums.
MultiplyAdd = Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], ir.Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """What a step multiplies: types of a number of a row and lane of a panel, of a sum, and the operation."""

    element: ir.Type
    total: ir.Type
    multiply_add: MultiplyAdd


def sums_tile(shape: TileShape, arithmetic: Arithmetic) -> Any:
    """For compiled code, the tile of a panel `[steps, columns]` in some arithmetic; writes `[n_rows, columns]`.

    `tile(n_rows, x, x_stride, panel, n_steps, out, ahead)`: addresses, and bytes from one row of `x` to the next;
    `panel` is aligned to its vectors, 1 ≤ `n_rows` ≤ `shape.max_rows`, 1 ≤ `n_steps`. Each step asks for one line
    of the memory from `ahead` on, wherever that lies, to be brought into the second-level cache.
    """

    @intrinsic
    def tile(
        _typing: Any, n_rows: Any, x: Any, x_stride: Any, panel: Any, n_steps: Any, out: Any, ahead: Any
    ) -> Any:
        return types.void(*[types.int64] * 7), _generator(shape, arithmetic)

    return tile


def multiply_add(builder: ir.IRBuilder, sums: ir.Value, x: ir.Value, weights: ir.Value) -> ir.Value:
    """`sums + x * weights` of float32."""
    return builder.call(_fused(builder, sums.type), [spread(builder, x, sums.type.count), weights, sums])


FLOAT32 = Arithmetic(element=_FLOAT, total=_FLOAT, multiply_add=multiply_add)


def _fused(builder: ir.IRBuilder, vector: ir.VectorType) -> ir.Function:
    """`a * b + c`, rounded once where the machine can."""
    return declare(builder, f"llvm.fmuladd.v{vector.count}f32", vector, [vector] * 3)


@intrinsic
def fetch_ahead(_typing: Any, address: Any) -> Any:
    """For compiled code: have the line of memory at `address` brought into the second-level cache."""

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: list[ir.Value]) -> ir.Value:
        _fetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _fetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    pointer = _BYTE.as_pointer()
    operation = declare(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, _INT, _INT, _INT])
    reads, near, of_data = _int(0), _int(2), _int(1)
    builder.call(operation, [builder.inttoptr(address, pointer), reads, near, of_data])


def _generator(shape: TileShape, arithmetic: Arithmetic) -> Any:
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
            _write_loop(builder, shape, arithmetic, n, others)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return generate


def _write_loop(
    builder: ir.IRBuilder,
    shape: TileShape,
    arithmetic: Arithmetic,
    n_rows: int,
    arguments: list[ir.Value],
) -> None:
    """The loop over the steps of a tile with `n_rows`, and its results to memory."""
    x, x_stride, panel, n_steps, out, ahead = arguments
    vector = ir.VectorType(arithmetic.element, shape.lanes)
    sums_vector = ir.VectorType(arithmetic.total, shape.lanes)
    vector_bytes = STEP_BYTES * shape.lanes
    before = builder.block
    rows = [builder.add(x, builder.mul(x_stride, _long(r))) for r in range(n_rows)]
    loop, done = builder.append_basic_block("steps"), builder.append_basic_block("finish")
    builder.branch(loop)

    builder.position_at_end(loop)
    step = builder.phi(_LONG)
    sums = [[builder.phi(sums_vector) for _ in range(_N_VECTORS)] for _ in range(n_rows)]
    address = builder.add(panel, builder.mul(step, _long(_N_VECTORS * vector_bytes)))
    weights = [load(builder, address, v * vector_bytes, vector, align=vector_bytes) for v in range(_N_VECTORS)]
    offset = builder.mul(step, _long(STEP_BYTES))
    _fetch(builder, builder.add(ahead, builder.mul(step, _long(LINE_BYTES))))
    numbers = [load(builder, builder.add(row, offset), 0, arithmetic.element, align=STEP_BYTES) for row in rows]
    new = [
        [arithmetic.multiply_add(builder, sums[r][v], numbers[r], weights[v]) for v in range(_N_VECTORS)]
        for r in range(n_rows)
    ]
    following = builder.add(step, _long(1))
    builder.cbranch(builder.icmp_signed("<", following, n_steps), loop, done)
    step.add_incoming(_long(0), before)
    step.add_incoming(following, loop)
    for r, v in itertools.product(range(n_rows), range(_N_VECTORS)):
        sums[r][v].add_incoming(ir.Constant(sums_vector, None), before)
        sums[r][v].add_incoming(new[r][v], loop)

    builder.position_at_end(done)
    for r, v in itertools.product(range(n_rows), range(_N_VECTORS)):
        store(builder, new[r][v], out, (r * _N_VECTORS + v) * vector_bytes)


def load(builder: ir.IRBuilder, address: ir.Value, offset: int, kind: ir.Type, *, align: int) -> ir.Value:
    pointer = builder.inttoptr(builder.add(address, _long(offset)), kind.as_pointer())
    return builder.load(pointer, align=align)


def store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, offset: int) -> None:
    pointer = builder.inttoptr(builder.add(address, _long(offset)), value.type.as_pointer())
    builder.store(value, pointer, align=4)


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
