"""The sampler: filters as transformers' warpers have them, noise by (seed, position), rows on their own."""

import math
from collections import Counter

import pytest
import torch
from bakehouse_replica.core.types import Sample, SamplingParams
from bakehouse_replica.model.sampler import draw, uniform
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

VOCABULARY = 2000


def sample_of(
    params: SamplingParams,
    *seeds: int,
    output_index: int = 0,
    prompt_ids: tuple[int, ...] = (),
    output_ids: tuple[int, ...] = (),
) -> Sample:
    return Sample(
        params=params,
        seeds=seeds or (0,),
        output_index=output_index,
        prompt_ids=prompt_ids,
        output_ids=output_ids,
    )


def random_logits(n_rows: int, vocabulary: int = VOCABULARY, seed: int = 0) -> Tensor:
    return torch.randn(n_rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def expected_distribution(logits_V: Tensor, params: SamplingParams) -> Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k is not None:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return torch.softmax(warpers(torch.LongTensor([[0]]), logits_V[None]), dim=-1)[0]


def drawn_from(logits_V: Tensor, params: SamplingParams, n_draws: int) -> list[int]:
    """`n_draws` ids of one distribution: one fork row with as many seeds."""
    (token_ids,) = draw(logits_V[None], [sample_of(params, *range(n_draws))], [7])
    return list(token_ids)


FILTERS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5),
    SamplingParams(top_k=1),
    SamplingParams(top_k=7),
    SamplingParams(top_k=900, temperature=3.0),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.999, temperature=5.0),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=0.00001, temperature=4.0),
    SamplingParams(top_k=40, top_p=0.8, temperature=1.5),
    SamplingParams(top_k=40, top_p=0.95, min_p=0.05, temperature=0.9),
    SamplingParams(top_k=10**6, top_p=0.9),
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_drawn_frequencies_follow_transformers_warpers(params: SamplingParams) -> None:
    """A chi-squared test whose false-alarm probability is 1e-6 per case (and the seeds are fixed)."""
    n_draws = 4000
    logits_V = random_logits(1)[0]
    expected_V = expected_distribution(logits_V, params).double() * n_draws
    counts_V = torch.bincount(torch.tensor(drawn_from(logits_V, params, n_draws)), minlength=VOCABULARY).double()
    assert counts_V[expected_V == 0].sum() == 0, "a filtered token was drawn"

    # Tokens expected less than five times share one bin, without which chi-squared is no good approximation.
    is_common_V = expected_V >= 5
    observed = torch.cat([counts_V[is_common_V], counts_V[~is_common_V].sum()[None]])
    expected = torch.cat([expected_V[is_common_V], expected_V[~is_common_V].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    if freedom == 0:
        return
    # Wilson and Hilferty: the cube root of chi-squared / freedom is all but normal; 4.753 is its 1 - 1e-6 point.
    spread = 2 / (9 * freedom)
    assert statistic < freedom * (1 - spread + 4.753 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_the_noise_picks_the_token_at_its_share_of_the_filtered_distribution(params: SamplingParams) -> None:
    for row, logits_V in enumerate(random_logits(20, seed=row_seed(params))):
        cumulative_V = expected_distribution(logits_V, params).double().cumsum(-1)
        target = uniform(row, 11)
        (token_ids,) = draw(logits_V[None], [sample_of(params, row)], [11])
        (token_id,) = token_ids
        # transformers sums in float32, hence a slack of 1e-5 at either edge.
        below = 0.0 if token_id == 0 else float(cumulative_V[token_id - 1])
        assert below - 1e-5 <= target <= float(cumulative_V[token_id]) + 1e-5


def row_seed(params: SamplingParams) -> int:
    return FILTERS.index(params)


def test_noise_is_pinned_by_seed_and_position() -> None:
    assert uniform(1, 2) == 0.643402507167421
    assert uniform(-(2**63), 0) != uniform(2**63 - 1, 0)
    assert len({uniform(seed, position) for seed in range(40) for position in range(40)}) == 1600


def test_noise_is_uniform_over_seeds_and_over_positions() -> None:
    """Kolmogorov-Smirnov with a false-alarm probability of 1e-6 each: sup distance below 2.69 / sqrt(n)."""
    n = 20_000
    for values in ([uniform(seed, 5) for seed in range(n)], [uniform(5, position) for position in range(n)]):
        distance = max(abs(value - (rank + 0.5) / n) for rank, value in enumerate(sorted(values)))
        assert distance < 2.69 / math.sqrt(n)


def test_rows_without_temperature_take_the_best_token() -> None:
    logits_RV = random_logits(5)
    samples = [sample_of(SamplingParams(temperature=0.0), 1, 2, 3) for _ in range(5)]
    assert draw(logits_RV, samples, [0] * 5) == [(best,) * 3 for best in logits_RV.argmax(-1).tolist()]


def mixed_samples() -> list[Sample]:
    history = {"prompt_ids": (1, 2, 3), "output_ids": (4, 4, 5)}
    return [
        *(sample_of(params, 17 + row) for row, params in enumerate(FILTERS)),
        sample_of(SamplingParams(temperature=0.0)),
        sample_of(SamplingParams(top_p=0.9), 5, 6, 7),
        sample_of(SamplingParams(repetition_penalty=1.5, presence_penalty=0.4), 3, output_index=3, **history),
        sample_of(SamplingParams(min_tokens=4, stop_token_ids=(0, 9)), 3, output_index=3),
    ]


def test_what_a_row_yields_never_depends_on_its_neighbours() -> None:
    # The vocabulary of the default model: wide enough for torch to split one row's reductions over threads.
    samples = mixed_samples()
    logits_RV = random_logits(len(samples), 49_152)
    positions = list(range(50, 50 + len(samples)))
    together = draw(logits_RV, samples, positions)
    alone = [draw(logits_RV[row : row + 1], [samples[row]], [positions[row]])[0] for row in range(len(samples))]
    assert together == alone
    backwards = draw(logits_RV.flip(0), samples[::-1], positions[::-1])
    assert together == backwards[::-1]


@pytest.mark.parametrize("first_candidates", [1, 2, 37, VOCABULARY])
def test_how_many_candidates_are_fetched_first_changes_nothing(first_candidates: int) -> None:
    samples = mixed_samples()
    logits_RV, positions = random_logits(len(samples)), [3] * len(samples)
    drawn = draw(logits_RV, samples, positions, first_candidates=first_candidates)
    assert drawn == draw(logits_RV, samples, positions)


def test_tokens_with_equal_logits_share_one_fate() -> None:
    logits_V = torch.zeros(VOCABULARY)
    logits_V[100:400] = 5.0
    for params in (SamplingParams(top_k=3), SamplingParams(top_p=0.01), SamplingParams(min_p=0.5)):
        token_ids = drawn_from(logits_V, params, 3000)
        assert set(token_ids) <= set(range(100, 400))
        # Each of 300 is missed with probability (299/300)^3000 = 4.5e-5: 40 missed is out of reach.
        assert len(set(token_ids)) > 260


def test_logits_are_not_modified() -> None:
    samples = mixed_samples()
    logits_RV = random_logits(len(samples))
    before = logits_RV.clone()
    draw(logits_RV, samples, [0] * len(samples))
    assert torch.equal(logits_RV, before)


def greedy_with(logits: dict[int, float], sample: Sample) -> int:
    logits_V = torch.full((50,), -20.0)
    for token_id, value in logits.items():
        logits_V[token_id] = value
    ((token_id,),) = draw(logits_V[None], [sample], [0])
    return token_id


def test_repetition_penalty_counts_prompt_and_output_as_transformers_does() -> None:
    logits_V = random_logits(1, 50)[0]
    prompt_ids, output_ids = (3, 4, 4, 30), (6, 30)
    penalised = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([prompt_ids + output_ids]), logits_V[None])[0]
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, repetition_penalty=1.8)
        sample = sample_of(params, 9, output_index=2, prompt_ids=prompt_ids, output_ids=output_ids)
        plain = sample_of(SamplingParams(temperature=temperature), 9)
        assert draw(logits_V[None], [sample], [6]) == draw(penalised[None], [plain], [6])


def test_presence_penalty_is_paid_once_and_frequency_penalty_per_occurrence() -> None:
    def best_of(logits: dict[int, float], params: SamplingParams) -> int:
        return greedy_with(logits, sample_of(params, output_index=3, prompt_ids=(2, 2, 2), output_ids=(1, 1, 1)))

    logits = {1: 10.0, 2: 9.5}
    assert best_of(logits, SamplingParams(temperature=0.0, presence_penalty=0.4)) == 1  # 9.6: the prompt is free
    assert best_of(logits, SamplingParams(temperature=0.0, frequency_penalty=0.4)) == 2  # 8.8
    assert best_of({1: 8.0, 2: 9.5}, SamplingParams(temperature=0.0, presence_penalty=-2.0)) == 1


def test_no_stop_id_is_drawn_before_min_tokens() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(7, 8))
    logits = {7: 5.0, 8: 4.0, 9: 3.0}
    assert [greedy_with(logits, sample_of(params, output_index=index)) for index in range(4)] == [9, 9, 7, 7]


@pytest.mark.parametrize("temperature", [1e-40, 1e-6])
def test_a_temperature_of_almost_nothing_is_greedy(temperature: float) -> None:
    logits_V = random_logits(1)[0]
    assert set(drawn_from(logits_V, SamplingParams(temperature=temperature), 50)) == {int(logits_V.argmax())}


def test_half_precision_logits_are_drawn_in_float32() -> None:
    logits_V = random_logits(1)[0].bfloat16()
    params = SamplingParams(top_p=0.9)
    assert Counter(drawn_from(logits_V, params, 200)) == Counter(drawn_from(logits_V.float(), params, 200))


def test_broken_logits_are_an_error_and_not_a_token() -> None:
    logits_RV = random_logits(2)
    logits_RV[1, 3] = math.nan
    with pytest.raises(AssertionError, match="no finite maximum"):
        draw(logits_RV, [sample_of(SamplingParams())] * 2, [0, 0])
