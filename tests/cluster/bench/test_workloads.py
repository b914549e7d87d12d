"""The lengths of requests: presets as they are defined, everything repeatable."""

from collections import Counter
from random import Random

import pytest
from bakehouse_cluster.bench.workloads import (
    PRESETS,
    Demand,
    MixedLengths,
    SharedPrefixes,
    arriving,
    poisson_arrivals,
)


def demands(name: str, seed: int = 0) -> tuple[int, tuple[Demand, ...]]:
    preset = PRESETS[name]
    return preset.n_users, preset.workload.demands(preset.workload.n_requests, Random(seed))


def test_w1_is_one_user_with_64_in_and_64_out() -> None:
    n_users, asked = demands("W1")
    assert n_users == 1
    assert set(asked) == {Demand(n_input=64, n_output=64)}


def test_w2_is_64_requests_of_128_in_and_64_out_by_32_users() -> None:
    n_users, asked = demands("W2")
    assert n_users == 32
    assert asked == (Demand(n_input=128, n_output=64),) * 64


def test_w3_is_32_requests_of_one_prefix_of_768_and_32_of_their_own_by_16_users() -> None:
    n_users, asked = demands("W3")
    assert n_users == 16
    assert asked == (Demand(n_input=800, n_output=32, prefix_id=0, n_prefix=768),) * 32


def test_w4_is_48_requests_of_16_to_256_in_and_four_lengths_out_by_16_users() -> None:
    n_users, asked = demands("W4")
    assert n_users == 16
    assert Counter(one.n_output for one in asked) == {8: 12, 16: 12, 32: 12, 128: 12}
    lengths = [one.n_input or 0 for one in asked]
    assert 16 <= min(lengths) < 64 < 200 < max(lengths) <= 256


def test_the_same_seed_asks_for_the_same_and_another_for_something_else() -> None:
    assert demands("W4", seed=3) == demands("W4", seed=3)
    assert demands("W4", seed=3) != demands("W4", seed=4)


def test_outputs_that_do_not_divide_the_requests_differ_by_one_at_most() -> None:
    asked = MixedLengths(n_requests=10, input_range=(5, 5), outputs=(1, 2, 3)).demands(10, Random(0))
    assert Counter(one.n_output for one in asked) == {1: 4, 2: 3, 3: 3}


def test_several_prefixes_take_turns() -> None:
    workload = SharedPrefixes(n_requests=5, n_prefix=10, n_own=2, n_output=1, n_prefixes=2)
    assert [one.prefix_id for one in workload.demands(5, Random(0))] == [0, 1, 0, 1, 0]


def test_poisson_arrivals_have_the_mean_and_the_spread_of_their_rate() -> None:
    n_requests, rate = 10_000, 4.0
    arrivals = poisson_arrivals(n_requests, rate, Random(1))
    gaps = [later - earlier for earlier, later in zip((0.0, *arrivals), arrivals, strict=False)]
    assert min(gaps) > 0
    # The mean of n exponential gaps is off by more than 5 % with a probability of 6e-7 (5 standard deviations).
    assert sum(gaps) / n_requests == pytest.approx(1 / rate, rel=0.05)
    # A share 1/e of them is longer than the mean; by 5 standard deviations it is within 0.025.
    assert sum(gap > 1 / rate for gap in gaps) / n_requests == pytest.approx(0.368, abs=0.025)


def test_arrivals_are_set_without_changing_anything_else() -> None:
    _, asked = demands("W3")
    moved = arriving(asked[:2], (0.5, 1.5))
    assert [one.arrival_s for one in moved] == [0.5, 1.5]
    assert {one.n_input for one in moved} == {800}
