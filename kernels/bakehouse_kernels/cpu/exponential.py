"""An exponential that compiles to vector code."""

import math

import numpy as np

from bakehouse_kernels.cpu.compile import compiled

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
SMALLEST_EXPONENT = -126.0
SERIES = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)

_LOG2_E = np.float32(LOG2_E)
_LN_2 = np.float32(LN_2)
_SMALLEST_EXPONENT = np.float32(SMALLEST_EXPONENT)


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
