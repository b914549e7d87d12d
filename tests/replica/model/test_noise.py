"""The noise: one hash everywhere, exponential times, a race that rounding in the weights hardly ever turns."""

import math
from collections.abc import Sequence

import pytest
import torch
from bakehouse_kernels.layout import SURVEY_BLOCK as BLOCK
from bakehouse_kernels.noise import exponential
from bakehouse_replica.model.noise import noise_key, race, race_of_blocks
from torch import Tensor
from torch.nn import functional

MASK = (1 << 64) - 1


def plain_time(key: int, counter: int) -> float:
    """SplitMix64 in unbounded integers, as its authors print it."""
    state = (key + counter * 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    state ^= state >> 31
    signed = state - (1 << 64) if state >> 63 else state
    return -math.log(((signed >> 12) + 0.5) * 2.0**-52 + 0.5)


def plain_race_of_all(weight_V: Tensor, key: int) -> int:
    """Both rounds over lists; blocks count down from -1."""
    weights = weight_V.double().tolist()
    blocks = [weights[begin : begin + BLOCK] for begin in range(0, len(weights), BLOCK)]

    def winner(weights: Sequence[float], counters: Sequence[int]) -> int:
        times = [
            plain_time(key, counter) / weight if weight else math.inf
            for weight, counter in zip(weights, counters, strict=True)
        ]
        return times.index(min(times))

    block = winner([sum(weights) for weights in blocks], [-1 - index for index in range(len(blocks))])
    counters = range(block * BLOCK, block * BLOCK + len(blocks[block]))
    return counters[winner(blocks[block], counters)]


def weights(n_tokens: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return (torch.randn(n_tokens, generator=torch.Generator().manual_seed(seed)) * spread).exp()


def race_of(weight_K: Tensor, id_K: Tensor, keys: Sequence[int]) -> list[int]:
    """The winner of one race under each key."""
    shape = (len(keys), len(id_K))
    return race(weight_K.double().expand(shape), id_K.expand(shape), torch.tensor(keys)).tolist()


def race_of_all(weight_V: Tensor, keys: Sequence[int]) -> list[int]:
    """Both rounds, as the sampler runs them."""
    weight_BC = functional.pad(weight_V, (0, -len(weight_V) % BLOCK)).view(-1, BLOCK).double()
    key_N = torch.tensor(keys)
    block_N = race_of_blocks(weight_BC.sum(dim=-1).expand(len(keys), -1), key_N)
    return race(weight_BC[block_N], block_N[:, None] * BLOCK + torch.arange(BLOCK), key_N).tolist()


def times(keys: Sequence[int], counters: Sequence[int]) -> Tensor:
    return exponential(torch.tensor(keys)[:, None], torch.tensor(counters))


def test_noise_is_pinned_by_seed_position_and_token() -> None:
    assert noise_key(1, 2) == -6578062687609052266
    pinned = [2.697340736876962, 0.1236429216827374, 1.0175340506314994]
    assert times([noise_key(1, 2)], [0, 1, 49_151])[0].tolist() == pytest.approx(pinned, rel=1e-14)
    assert len({noise_key(seed, position) for seed in range(40) for position in range(40)}) == 1600
    assert noise_key(-(2**63), 0) != noise_key(2**63 - 1, 0)


def test_times_are_those_of_the_published_hash() -> None:
    keys = [0, 1, -1, 2**63 - 1, -(2**63), noise_key(3, 4)]
    counters = [0, 1, 255, 151_936, -1, -600]
    expected = [[plain_time(key, counter) for counter in counters] for key in keys]
    # The last bit of a logarithm is the library's own.
    torch.testing.assert_close(
        times(keys, counters), torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0
    )


@pytest.mark.parametrize("n_tokens", [1, 50, BLOCK, BLOCK + 1, 2000])
def test_both_rounds_choose_as_the_plain_form_does(n_tokens: int) -> None:
    weight_V = weights(n_tokens)
    keys = [noise_key(seed, 9) for seed in range(50)]
    assert race_of_all(weight_V, keys) == [plain_race_of_all(weight_V, key) for key in keys]


def test_times_are_exponential_over_tokens_and_over_seeds_and_over_positions() -> None:
    """Kolmogorov-Smirnov with a false-alarm probability of 1e-6 each: sup distance below 2.69 / sqrt(n)."""
    n = 20_000
    for drawn in (
        times([noise_key(5, 7)], range(n)),
        times([noise_key(seed, 7) for seed in range(n)], [11]),
        times([noise_key(5, position) for position in range(n)], [11]),
    ):
        share = 1 - torch.exp(-drawn.flatten().sort().values)
        distance = float((share - (torch.arange(n) + 0.5) / n).abs().max())
        assert distance < 2.69 / math.sqrt(n)


@pytest.mark.parametrize(("other_seed", "other_position"), [(1, 0), (0, 1), (-1, 1)])
def test_draws_of_neighbouring_seeds_and_positions_are_independent(other_seed: int, other_position: int) -> None:
    """Chi-squared over pairs of 5 tokens; false-alarm probability 1e-6 (58.4 at 16 degrees of freedom)."""
    n = 5000
    weight_V = torch.ones(5)
    first = race_of_all(weight_V, [noise_key(2 * seed, 30) for seed in range(n)])
    second = race_of_all(weight_V, [noise_key(2 * seed + other_seed, 30 + other_position) for seed in range(n)])
    counts = torch.zeros(5, 5).index_put_(
        (torch.tensor(first), torch.tensor(second)), torch.ones(n), accumulate=True
    )
    expected = counts.sum(1, keepdim=True) * counts.sum(0, keepdim=True) / n
    assert float(((counts - expected) ** 2 / expected).sum()) < 58.4


def test_a_token_without_weight_never_wins() -> None:
    weight_V = torch.zeros(1000)
    weight_V[[3, 700]] = torch.tensor([1e-30, 2e-30])
    keys = [noise_key(seed, 0) for seed in range(200)]
    assert set(race_of_all(weight_V, keys)) == {3, 700}
    assert set(race_of(weight_V[:10], torch.arange(10), keys)) == {3}


def test_the_winner_does_not_depend_on_the_order_or_scale_of_the_weights() -> None:
    weight_K, id_K = weights(300), torch.arange(1000, 1300)
    keys = [noise_key(seed, 1) for seed in range(100)]
    order_K = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    assert race_of(weight_K, id_K, keys) == race_of(weight_K[order_K] * 2.0**-20, id_K[order_K], keys)


def test_rounding_in_the_logits_hardly_ever_changes_a_token() -> None:
    """Each logit off by 1e-5 of itself: one number a row against the cumulative distribution changes 23 of these.

    The benchmark `sampling.py` finds about 1 in 6,000 changed for a model's logits; more than 8 at a mean of 1 has
    a probability of 1e-6.
    """
    generator = torch.Generator().manual_seed(2)
    n_changed = 0
    for position in range(60):
        logits_V = torch.randn(2000, generator=generator) * 2
        rounded_V = logits_V * (1 + 1e-5 * torch.randn(2000, generator=generator))
        keys = [noise_key(seed, position) for seed in range(100)]
        before, after = race_of_all(logits_V.exp(), keys), race_of_all(rounded_V.exp(), keys)
        n_changed += sum(a != b for a, b in zip(before, after, strict=True))
    assert n_changed <= 8
