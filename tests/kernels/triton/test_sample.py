"""Draws against their definition: ties, extremes, masks, rows without a token."""

import math

import pytest
import torch
from bakehouse_kernels.layout import DrawTensors
from bakehouse_kernels.reference_draw import draw as draw_by_definition
from bakehouse_kernels.triton.sample import draw
from torch import Tensor

TEMPERATURES = (0.0, 0.7, 1.0, 3.0, 100.0, 1e-30)
TOP_KS = (0, 0, 1, 5, 300, 599, 5000)
TOP_PS = (1.0, 1.0, 0.9, 0.5, 1e-9, 0.999)
MIN_PS = (0.0, 0.0, 0.0, 0.1, 1.0)


def asks_of(n_rows: int, **given: float) -> DrawTensors:
    """The same for all rows, each with noise of its own: temperature, top_k, top_p, min_p."""
    return DrawTensors(
        temperature_R=torch.full((n_rows,), given.get("temperature", 1.0), dtype=torch.float32),
        top_k_R=torch.full((n_rows,), given.get("top_k", 0), dtype=torch.int32),
        top_p_R=torch.full((n_rows,), given.get("top_p", 1.0), dtype=torch.float64),
        min_p_R=torch.full((n_rows,), given.get("min_p", 0.0), dtype=torch.float64),
        key_R=torch.arange(n_rows) * 0x9E3779B97F4A7C1 - 12345,
    )


def random_rows(n_rows: int, n_vocabulary: int, generator: torch.Generator) -> tuple[Tensor, DrawTensors]:
    """Rows of all kinds, some with ties, some masked, and asks of all kinds."""
    logits = torch.randn(n_rows, n_vocabulary, generator=generator) * 3
    logits[1::4] = logits[1::4].round()
    logits[2::4] = logits[2::4].masked_fill(torch.rand(logits[2::4].shape, generator=generator) < 0.7, -math.inf)
    logits[:, n_vocabulary // 2] = 0.5

    def picked(values: tuple[float, ...], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (n_rows,), generator=generator)]

    return logits, DrawTensors(
        temperature_R=picked(TEMPERATURES, torch.float32),
        top_k_R=picked(TOP_KS, torch.int32),
        top_p_R=picked(TOP_PS, torch.float64),
        min_p_R=picked(MIN_PS, torch.float64),
        key_R=torch.randint(-(2**63), 2**63 - 1, (n_rows,), generator=generator),
    )


# Weights differ in their last bits (2^-23 of themselves) between two exponential functions; two tokens or bounds
# as close as that come up once in some million draws, which would be the same ones each time.
@pytest.mark.parametrize("n_vocabulary", [1, 255, 600])
def test_draws_equal_their_definition(generator: torch.Generator, n_vocabulary: int) -> None:
    logits, asks = random_rows(12, n_vocabulary, generator)
    before = logits.clone()
    assert draw(logits, asks).tolist() == draw_by_definition(logits, asks).tolist()
    assert logits.equal(before)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 0.2 s a draw, and three times that beside other processes
def test_two_thousand_draws_equal_their_definition(generator: torch.Generator) -> None:
    logits, asks = random_rows(2000, 601, generator)
    assert draw(logits, asks).tolist() == draw_by_definition(logits, asks).tolist()


def test_the_best_is_the_smallest_of_equal_ids(generator: torch.Generator) -> None:
    logits = torch.randint(0, 3, (6, 1100), generator=generator).float()
    logits[0] = -0.0
    logits[0, 700] = 0.0
    assert draw(logits, asks_of(6, temperature=0.0)).tolist() == logits.max(dim=-1).indices.tolist()


@pytest.mark.parametrize(
    "given", [{"top_k": 1}, {"top_p": 1e-12}, {"min_p": 1.0}, {"temperature": 1e-38, "top_k": 40}]
)
def test_a_filter_that_keeps_the_best_alone_keeps_all_that_are_level_with_it(given: dict[str, float]) -> None:
    logits = torch.zeros(12, 300)
    logits[:, 100:102] = 5.0
    logits[:, 299] = 5.0 - 1e-6
    drawn = draw(logits, asks_of(12, **given)).tolist()
    assert drawn == draw_by_definition(logits, asks_of(12, **given)).tolist()
    assert set(drawn) == {100, 101}


def test_a_bound_may_lie_far_from_the_best_and_hold_more_tokens_than_a_tile() -> None:
    logits = torch.zeros(3, 1500)
    logits[:, 7] = 1e30
    logits[:, 1000:] = -1e30
    for given in ({"top_k": 2}, {"top_k": 1001}, {"top_k": 400, "top_p": 0.999}):
        asks = asks_of(3, temperature=1e30, **given)
        assert draw(logits, asks).tolist() == draw_by_definition(logits, asks).tolist()


@pytest.mark.parametrize("given", [{"top_k": 600}, {"top_p": 0.6}, {"top_k": 500, "top_p": 0.6}])
def test_a_filter_may_close_among_more_tokens_than_a_tile_holds(
    generator: torch.Generator, given: dict[str, float]
) -> None:
    logits = torch.rand(12, 900, generator=generator)  # all within the least reach, in tiles of 512
    asks = asks_of(12, **given)
    assert draw(logits, asks).tolist() == draw_by_definition(logits, asks).tolist()


@pytest.mark.parametrize("given", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_row_without_a_finite_highest_has_no_token_and_harms_no_other(
    broken: float, given: dict[str, float]
) -> None:
    logits = torch.zeros(3, 600)
    asks = asks_of(3, **given)
    expected = draw(logits, asks).tolist()
    logits[1, 599] = broken
    assert draw(logits, asks).tolist() == [expected[0], -1, expected[2]]
    logits[1] = -math.inf
    assert draw(logits, asks).tolist() == [expected[0], -1, expected[2]]


def test_rows_may_lie_apart_in_half_precision_and_there_may_be_none(generator: torch.Generator) -> None:
    wide = torch.full((4, 900), torch.nan, dtype=torch.bfloat16)
    wide[:, 100:700] = torch.randn(4, 600, generator=generator)
    logits = wide[:, 100:700]
    for given in ({"temperature": 0.0}, {}, {"top_p": 0.8}):
        asks = asks_of(4, **given)
        assert draw(logits, asks).tolist() == draw_by_definition(logits, asks).tolist()
    assert draw(logits[:0], asks_of(0)).shape == (0,)
