"""The noise that decides draws, keyed by integers: the same on every machine and device.

The hash is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014) in integers of 64
bits that wrap; times are float64.
"""

from torch import Tensor

STRIDE = 0x9E3779B97F4A7C15
FIRST_MULTIPLIER = 0xBF58476D1CE4E5B9
SECOND_MULTIPLIER = 0x94D049BB133111EB


def exponential(key: Tensor, counter: Tensor) -> Tensor:
    """The time of each counter under each key, both int64; broadcasts. Exponential of mean 1, finite, above 0."""
    hashed = key + counter * _signed(STRIDE)
    hashed = (hashed ^ _shifted(hashed, 30)) * _signed(FIRST_MULTIPLIER)
    hashed = (hashed ^ _shifted(hashed, 27)) * _signed(SECOND_MULTIPLIER)
    hashed = hashed ^ _shifted(hashed, 31)
    # The upper 52 bits as odd multiples of 2^-53: exact in float64, never 0 or 1.
    return (hashed >> 12).double().add_(0.5).mul_(2.0**-52).add_(0.5).log_().neg_()


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shifted(hashed: Tensor, n_bits: int) -> Tensor:
    """Shifted to the right with zeros coming in; torch's own shift copies the sign."""
    return (hashed >> n_bits).bitwise_and_((1 << (64 - n_bits)) - 1)
