"""How many requests a second each system carries: figures 12, 16 and 17 of PagedAttention."""

import math
from collections.abc import Mapping
from statistics import mean

from benchmarks.papers.playing import play
from benchmarks.papers.setups import Lengths, Setup

# The figures' curves have all left the floor there, and are all but vertical.
NORMALISED_LATENCY_S = 0.2
LOWEST, HIGHEST = 1 / 32, 512.0  # requests a second
PRECISION = 1.03  # of a rate, as a factor


def normalised_latency_s(
    setup: Setup, lengths: Lengths, system: str, *, rate: float, duration_s: float, seed: int = 0
) -> float:
    """The mean over all requests that come within `duration_s`."""
    visits = lengths.visits(max(1, round(rate * duration_s)), rate=rate, seed=seed)
    return mean(record.normalised_latency_s for record in play(setup.machine(system), visits, setup.cost()))


def knee(setup: Setup, lengths: Lengths, system: str, *, duration_s: float, seed: int = 0) -> float:
    """The highest rate, in requests a second, with a mean latency of `NORMALISED_LATENCY_S` a token at most."""
    low, high = LOWEST, LOWEST * 2
    while high < HIGHEST and _carries(setup, lengths, system, high, duration_s, seed):
        low, high = high, high * 2
    while high / low > PRECISION:
        middle = math.sqrt(low * high)
        if _carries(setup, lengths, system, middle, duration_s, seed):
            low = middle
        else:
            high = middle
    return low


def gains(knees: Mapping[str, float]) -> dict[str, float]:
    """The rate of paged memory by that of each other system."""
    return {system: knees["paged"] / rate for system, rate in knees.items() if system != "paged"}


def _carries(setup: Setup, lengths: Lengths, system: str, rate: float, duration_s: float, seed: int) -> bool:
    latency_s = normalised_latency_s(setup, lengths, system, rate=rate, duration_s=duration_s, seed=seed)
    return latency_s <= NORMALISED_LATENCY_S
