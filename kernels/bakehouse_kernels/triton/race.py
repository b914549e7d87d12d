"""The race for a draw inside kernels: noise of each counter under a key, and the least time over weight.

    time = -log(uniform(hash(key, counter))) / weight

The hash is SplitMix64 and the uniform number an odd multiple of 2^-53, as in `noise`, where the source is named.
"""

import triton
import triton.language as tl

from bakehouse_kernels.noise import FIRST_MULTIPLIER, SECOND_MULTIPLIER, STRIDE

_STRIDE: tl.constexpr = tl.constexpr(STRIDE)
_FIRST: tl.constexpr = tl.constexpr(FIRST_MULTIPLIER)
_SECOND: tl.constexpr = tl.constexpr(SECOND_MULTIPLIER)


@triton.jit
def times(key, counter, weight):
    """When each counter (int64) of some weight (float64) arrives under `key` (int64); never where it weighs 0."""
    wraps = tl.uint64  # unsigned, so that shifts let zeros in
    hashed = key.to(wraps, bitcast=True) + counter.to(wraps, bitcast=True) * tl.full([1], _STRIDE, wraps)
    hashed = (hashed ^ (hashed >> 30)) * tl.full([1], _FIRST, wraps)
    hashed = (hashed ^ (hashed >> 27)) * tl.full([1], _SECOND, wraps)
    hashed = hashed ^ (hashed >> 31)
    upper = (hashed.to(tl.int64, bitcast=True) >> 12).to(tl.float64)
    uniform = (upper + 0.5) * 2.220446049250313e-16 + 0.5
    return tl.where(weight > 0.0, -tl.log(uniform) / tl.where(weight > 0.0, weight, 1.0), float("inf"))


@triton.jit
def winner(time, counter):
    """The counter that arrives first; of those at the same time the smallest."""
    return tl.min(tl.where(time == tl.min(time), counter, 0x7FFFFFFFFFFFFFFF))
