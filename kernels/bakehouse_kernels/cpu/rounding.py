"""Rows rounded to 8 bits on their way into a product."""

import numpy as np
from numpy.typing import NDArray

from bakehouse_kernels.cpu.compile import compiled
from bakehouse_kernels.cpu.packing import LARGEST, ZERO

Floats = NDArray[np.float32]

# The largest of a row that counts as zero: 127 / 2^-119 still fits float32.
_SMALLEST = np.float32(2.0**-119)
_INFINITY_BITS = np.int32(0x7F800000)
_SIGN_BIT_OFF = np.int32(0x7FFFFFFF)


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
