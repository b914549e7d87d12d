"""What a step of a tile does with numbers narrower than float32, of which four bytes hold several.

bfloat16: two inputs at once, two numbers of a row against two of each column, summed in float32. `vdpbf16ps` does
that, where there is one (AVX512-BF16); it takes numbers below 2^-126 for zero, and rounds a step's sum in its own
way. Elsewhere both halves of a lane are widened to float32 and multiplied one after the other.

int8: four unsigned bytes of a row against four signed bytes of each column, summed into 32 bits. `vpdpbusd` does
that, where there is one (AVX-512 VNNI, AVX-VNNI); elsewhere 16-bit products do, with the same sums.
"""

from llvmlite import ir

from bakehouse_kernels.cpu.tile import FLOAT32, Arithmetic, TileShape, declare, spread

_BYTE, _SHORT, _INT, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()


class _BFloat16(ir.Type):  # type: ignore[misc]  # llvmlite has no hints
    """LLVM's name for it, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


def bfloat16_arithmetic(shape: TileShape) -> Arithmetic:
    """`sums` and, for each, two products of a number of `x` and one of `weights`."""
    multiply_add = _multiply_add_pairs if shape.has_bfloat16_dot else _multiply_add_halves
    return Arithmetic(element=_INT, total=_FLOAT, multiply_add=multiply_add)


def _multiply_add_pairs(builder: ir.IRBuilder, sums: ir.Value, x: ir.Value, weights: ir.Value) -> ir.Value:
    lanes = sums.type.count
    pairs = ir.VectorType(_BFloat16(), 2 * lanes)
    operation = declare(
        builder, f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}", sums.type, [sums.type, pairs, pairs]
    )
    pairs_of_row = builder.bitcast(spread(builder, x, lanes), pairs)
    return builder.call(operation, [sums, pairs_of_row, builder.bitcast(weights, pairs)])


def _multiply_add_halves(builder: ir.IRBuilder, sums: ir.Value, x: ir.Value, weights: ir.Value) -> ir.Value:
    """Without `vdpbf16ps`: the first half of a lane, then the second, as the upper bits of a float32."""
    lanes = sums.type.count
    ints = ir.VectorType(_INT, lanes)
    for second in (False, True):
        if second:
            number = builder.and_(x, ir.Constant(_INT, 0xFFFF0000))
            column = builder.and_(weights, ir.Constant(ints, [0xFFFF0000] * lanes))
        else:
            number = builder.shl(x, ir.Constant(_INT, 16))
            column = builder.shl(weights, ir.Constant(ints, [16] * lanes))
        sums = FLOAT32.multiply_add(
            builder, sums, builder.bitcast(number, _FLOAT), builder.bitcast(column, sums.type)
        )
    return sums


def int8_arithmetic(shape: TileShape) -> Arithmetic:
    """`sums` and, for each, four products of an unsigned byte of `x` and a signed one of `weights`."""
    multiply_add = _multiply_add_bytes if shape.has_byte_dot else _multiply_add_shorts
    return Arithmetic(element=_INT, total=_INT, multiply_add=multiply_add)


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
        row = builder.and_(builder.lshr(x, ir.Constant(_INT, 8)) if odd else x, ir.Constant(_INT, 0x00FF00FF))
        bytes_of_row = builder.bitcast(spread(builder, row, lanes), shorts)
        products = builder.mul(builder.sext(bytes_of_row, pairs), builder.sext(column, pairs))
        for half in (0, 1):  # LLVM makes one instruction of the two: `vpmaddwd`
            every_second = ir.Constant(ir.VectorType(_INT, lanes), [2 * i + half for i in range(lanes)])
            sums = builder.add(sums, builder.shuffle_vector(products, products, every_second))
    return sums
