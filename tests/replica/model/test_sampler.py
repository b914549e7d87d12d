"""The sampler: filters as transformers' warpers have them, rows on their own, log-probabilities of the raw row."""

import math
from collections import Counter
from functools import cache

import pytest
import torch
from bakehouse_kernels.cpu.ops import CpuOps
from bakehouse_kernels.cpu.pool import n_cores
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Draw, Sample
from bakehouse_replica.model.logprobs import token_logprobs
from bakehouse_replica.model.sampler import draw
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

VOCABULARY = 2000


@cache
def served() -> CpuOps:
    return CpuOps(n_threads=min(2, n_cores()))


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


def ids_of(draws: tuple[Draw, ...]) -> list[int]:
    """The one token of each draw."""
    return [token_id for drawn in draws for (token_id,) in [drawn.token_ids]]


def drawn_from(logits_V: Tensor, params: SamplingParams, n_draws: int) -> list[int]:
    """`n_draws` ids of one distribution: one fork row with as many seeds."""
    (draws,) = draw(served(), logits_V[None], [sample_of(params, *range(n_draws))], [7])
    return ids_of(draws)


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


def test_rows_without_temperature_take_the_best_token() -> None:
    logits_RV = random_logits(5)
    samples = [sample_of(SamplingParams(temperature=0.0), 1, 2, 3) for _ in range(5)]
    best = logits_RV.argmax(-1).tolist()
    assert list(map(ids_of, draw(served(), logits_RV, samples, [0] * 5))) == [[token_id] * 3 for token_id in best]


def mixed_samples() -> list[Sample]:
    penalised = SamplingParams(repetition_penalty=1.5, presence_penalty=0.4)
    biased = SamplingParams(logit_bias=((8, 20.0),), bad_words_ids=((4, 5, 6), (8,)), top_k=30)
    return [
        *(sample_of(params, 17 + row) for row, params in enumerate(FILTERS)),
        sample_of(SamplingParams(temperature=0.0)),
        sample_of(SamplingParams(top_p=0.9), 5, 6, 7),
        sample_of(penalised, 3, output_index=3, prompt_ids=(1, 2, 3), output_ids=(4, 4, 5)),
        sample_of(biased, 6, output_index=3, output_ids=(4, 4, 5)),
        sample_of(SamplingParams(min_tokens=4, stop_token_ids=(0, 9)), 3, output_index=3),
        sample_of(SamplingParams(logprobs=3, temperature=2.0), 4, 5),
        sample_of(SamplingParams(allowed_token_ids=(20, 30, 40), logprobs=0), 7, 8),
    ]


def test_what_a_row_yields_never_depends_on_its_neighbours() -> None:
    # The vocabulary of the default model: wide enough for torch to split one row's reductions over threads.
    samples = mixed_samples()
    logits_RV = random_logits(len(samples), 49_152)
    positions = list(range(50, 50 + len(samples)))
    together = draw(served(), logits_RV, samples, positions)
    alone = [
        draw(served(), logits_RV[row : row + 1], [samples[row]], [positions[row]])[0]
        for row in range(len(samples))
    ]
    assert together == alone
    backwards = draw(served(), logits_RV.flip(0), samples[::-1], positions[::-1])
    assert together == backwards[::-1]


@pytest.mark.parametrize("first_candidates", [1, 2, 37, VOCABULARY])
def test_how_many_candidates_are_fetched_first_changes_nothing(first_candidates: int) -> None:
    samples = mixed_samples()
    logits_RV, positions = random_logits(len(samples)), [3] * len(samples)
    drawn = draw(served(), logits_RV, samples, positions, first_candidates=first_candidates)
    assert drawn == draw(served(), logits_RV, samples, positions)


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
    draw(served(), logits_RV, samples, [0] * len(samples))
    assert torch.equal(logits_RV, before)


@pytest.mark.parametrize("temperature", [1e-40, 1e-6])
def test_a_temperature_of_almost_nothing_is_greedy(temperature: float) -> None:
    logits_V = random_logits(1)[0]
    assert set(drawn_from(logits_V, SamplingParams(temperature=temperature), 50)) == {int(logits_V.argmax())}


def test_half_precision_logits_are_drawn_in_float32() -> None:
    logits_V = random_logits(1)[0].bfloat16()
    params = SamplingParams(top_p=0.9)
    assert Counter(drawn_from(logits_V, params, 200)) == Counter(drawn_from(logits_V.float(), params, 200))


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(logprobs=1)])
def test_broken_logits_are_an_error_and_not_a_token(params: SamplingParams) -> None:
    logits_RV = random_logits(2)
    logits_RV[1, 3] = math.nan
    with pytest.raises(AssertionError, match="no finite maximum"):
        draw(served(), logits_RV, [sample_of(params)] * 2, [0, 0])


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_logprobs_are_those_of_the_row_as_the_model_left_it(temperature: float) -> None:
    logits_RV = random_logits(1)
    params = SamplingParams(
        temperature=temperature,
        top_k=50,
        logprobs=4,
        repetition_penalty=1.4,
        frequency_penalty=1.0,
        logit_bias=((5, 30.0), (6, -100.0)),
        bad_words_ids=((int(logits_RV.argmax()),),),
    )
    sample = sample_of(params, *range(20), output_index=2, prompt_ids=(1, 2), output_ids=(5, 7))
    (draws,) = draw(served(), logits_RV, [sample], [4])
    for drawn in draws:
        assert drawn.logprobs == token_logprobs(served(), logits_RV, drawn.token_ids, 4)


def test_logprobs_come_only_where_they_are_asked_for_and_change_no_token() -> None:
    logits_RV = random_logits(3)
    plain, silent, told = (SamplingParams(logprobs=logprobs) for logprobs in (None, 0, 2))
    (nothing, value, values) = draw(
        served(), logits_RV[:1].expand(3, -1), [sample_of(params, 5) for params in (plain, silent, told)], [9] * 3
    )
    assert nothing[0].token_ids == value[0].token_ids == values[0].token_ids
    assert nothing[0].logprobs == ()
    assert [len(drawn.logprobs[0].top) for drawn in (value[0], values[0])] == [0, 2]


def test_a_row_asked_alone_or_among_greedy_rows_has_the_same_logprobs() -> None:
    logits_RV = random_logits(4, 49_152)
    asks = sample_of(SamplingParams(temperature=0.0, logprobs=5))
    greedy = sample_of(SamplingParams(temperature=0.0))
    together = draw(served(), logits_RV, [greedy, asks, greedy, asks], [0] * 4)
    for row in (1, 3):
        assert together[row] == draw(served(), logits_RV[row : row + 1], [asks], [0])[0]
