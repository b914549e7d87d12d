"""An exponential that compiles to vector code, as a Numba function and as LLVM instructions."""

import math

import numpy as np
from llvmlite import ir

from bakehouse_kernels.cpu.compile import compiled
from bakehouse_kernels.cpu.tile import declare

_LOG2_E = np.float32(math.log2(math.e))
_LN_2 = np.float32(math.log(2.0))
_SMALLEST_EXPONENT = np.float32(-126.0)
_SERIES = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)
_INT = ir.IntType(32)

# Adding this to a float32 below 2^22 leaves its nearest integer in the lowest bits.
_ROUNDER = 12582912.0


@compiled()
def exp_of_negative(x: np.float32) -> np.float32:
    """`e^x` for x ≤ 0 as `2^i * e^r` with |r| ≤ ln(2)/2, and `e^r` by its Taylor series up to r⁷/5040.

    The series is within 5e-9 of `e^r`, below float32's own rounding; results under 2^-126 become 2^-126.
    Plain arithmetic, so that a loop around it is vectorised, as it is not around the C library's `expf`.
    """
    exponent = max(x * _LOG2_E, _SMALLEST_EXPONENT)
    whole = np.int32(math.floor(exponent + np.float32(0.5)))
    r = (exponent - np.float32(whole)) * _LN_2
    series = np.float32(1 / 5040)
    series = series * r + np.float32(1 / 720)
    series = series * r + np.float32(1 / 120)
    series = series * r + np.float32(1 / 24)
    series = series * r + np.float32(1 / 6)
    series = series * r + np.float32(1 / 2)
    series = series * r + np.float32(1)
    series = series * r + np.float32(1)
    # `whole + 127` in the exponent bits of a float32 is 2^whole.
    power: np.float32 = np.int32((whole + np.int32(127)) << np.int32(23)).view(np.float32)
    return series * power


def exp_of_negatives(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """As `exp_of_negative`, of a vector; NaN of NaN."""
    vector = x.type

    def constant(value: float | np.float32) -> ir.Constant:
        return ir.Constant(vector, [float(value)] * vector.count)

    fused = declare(builder, f"llvm.fmuladd.v{vector.count}f32", vector, [vector] * 3)
    exponent = builder.fmul(x, constant(_LOG2_E))
    is_small = builder.fcmp_ordered("<", exponent, constant(_SMALLEST_EXPONENT))
    exponent = builder.select(is_small, constant(_SMALLEST_EXPONENT), exponent)
    shifted = builder.fadd(exponent, constant(_ROUNDER))
    whole = builder.fsub(shifted, constant(_ROUNDER))
    r = builder.fmul(builder.fsub(exponent, whole), constant(_LN_2))
    series = constant(_SERIES[0])
    for coefficient in _SERIES[1:]:
        series = builder.call(fused, [series, r, constant(coefficient)])
    # The integer in the exponent bits of a float32, above 1.0's, is 2^whole.
    ints = ir.VectorType(_INT, vector.count)
    bits = builder.shl(builder.bitcast(shifted, ints), ir.Constant(ints, [23] * vector.count))
    one = ir.Constant(ints, [0x3F800000] * vector.count)
    power = builder.bitcast(builder.add(bits, one), vector)
    return builder.fmul(series, power)
