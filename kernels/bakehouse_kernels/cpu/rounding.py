"""Rows rounded to int8 or bfloat16 on their way into a product."""

import numpy as np
from numpy.typing import NDArray

from bakehouse_kernels.cpu.compile import compiled
from bakehouse_kernels.cpu.packing import LARGEST, ZERO

Floats = NDArray[np.float32]

# The largest of a row that counts as zero: 127 / 2^-119 still fits float32.
_SMALLEST = np.float32(2.0**-119)
_INFINITY_BITS = np.int32(0x7F800000)
_SIGN_BIT_OFF = np.int32(0x7FFFFFFF)
# Of a bfloat16 NaN; without it, one whose other bits are all in the lower half would become an infinity.
_QUIET = np.int32(0x40)


@compiled(exact=True)
def _largest_bits(bits_I: NDArray[np.int32]) -> np.int32:
    """Those of max|x|: bits of positive floats are in the order of their values, with NaN above infinity."""
    largest = np.int32(0)
    for i in range(len(bits_I)):
        largest = max(largest, np.int32(bits_I[i] & _SIGN_BIT_OFF))
    return largest


@compiled(exact=True)
def round_row(x_I: Floats, rounded: NDArray[np.uint8]) -> np.float32:
    """Write `round(x * (127 / max|x|)) + ZERO`, halves to even; the scale, NaN where x has a NaN or infinity."""
    largest_bits = _largest_bits(x_I.view(np.int32))
    largest = np.int32(largest_bits).view(np.float32)
    rounded[len(x_I) :] = ZERO
    if largest_bits >= _INFINITY_BITS:
        rounded[: len(x_I)] = ZERO
        return np.float32(np.nan)
    inverse = np.float32(LARGEST) / largest if largest > _SMALLEST else np.float32(0)
    for i in range(len(x_I)):
        rounded[i] = np.uint8(np.int32(np.rint(x_I[i] * inverse)) + np.int32(ZERO))
    return largest / np.float32(LARGEST)


@compiled(exact=True)
def round_row_to_bfloat16(x_I: Floats, rounded: NDArray[np.uint16]) -> None:
    """Write the bits of x rounded to nearest, halves to even, and zeros behind them; a NaN stays one."""
    bits_I = x_I.view(np.uint32)
    rounded[len(x_I) :] = np.uint16(0)
    for i in range(len(bits_I)):
        bits = bits_I[i]
        upper = np.uint32(bits >> np.uint32(16))
        up = np.uint32(np.uint32(0x7FFF) + np.uint32(upper & np.uint32(1)))
        nearest = np.uint32(np.uint32(bits + up) >> np.uint32(16))
        is_nan = np.uint32(bits & np.uint32(_SIGN_BIT_OFF)) > np.uint32(_INFINITY_BITS)
        rounded[i] = np.uint16(upper | np.uint32(_QUIET) if is_nan else nearest)
