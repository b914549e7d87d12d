"""The survey of logits against its definition: best ids and their ties, sums of weights, what must not hide."""

import math

import pytest
import torch
from bakehouse_kernels.cpu.ops import CpuOps
from bakehouse_kernels.layout import SURVEY_BLOCK, Survey
from bakehouse_kernels.reference import ReferenceOps
from torch import Tensor

INF = math.inf
SIZES = [1, 2, 63, 64, 65, 255, 256, 257, 1000, 5003]


def rows_of(kind: str, n_vocabulary: int, generator: torch.Generator) -> Tensor:
    """Ten rows, no maximum of which is infinite."""
    logits = torch.randn(10, n_vocabulary, generator=generator) * 4
    match kind:
        case "ties":
            logits = logits.round()
        case "equal":
            logits = torch.full_like(logits, -7.25)
        case "rising":
            logits = logits.sort(dim=-1).values
        case "zeros of both signs":
            logits = torch.where(logits > 0, 0.0, -0.0)
        case "masked":
            logits[torch.rand(logits.shape, generator=generator) < 0.98] = -INF
            logits[:, -1] = -3.0
        case "one left":
            logits = torch.full_like(logits, -INF)
            logits[:, n_vocabulary // 2] = 1e-30
        case "huge":
            logits *= 1e30
    return logits


def assert_same(actual: Survey, expected: Survey) -> None:
    assert actual.value_RK.equal(expected.value_RK)
    assert actual.id_RK.equal(expected.id_RK)
    torch.testing.assert_close(actual.total_R, expected.total_R, rtol=1e-6, atol=0)
    # A logit 80 below the best is rounded to 80 / 2^24; blocks far below are never drawn.
    torch.testing.assert_close(actual.block_RB, expected.block_RB, rtol=2e-5, atol=1e-30)


KINDS = ["smooth", "ties", "equal", "rising", "zeros of both signs", "masked", "one left", "huge"]


@pytest.mark.parametrize("n_vocabulary", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_survey_equals_its_definition(
    cpu_ops: CpuOps, reference_ops: ReferenceOps, generator: torch.Generator, kind: str, n_vocabulary: int
) -> None:
    logits = rows_of(kind, n_vocabulary, generator)
    before = logits.clone()
    temperature = torch.tensor([0.0, 1.0, 0.8, 3.0, 100.0, 1e-3, 1e-30, torch.finfo(torch.float32).tiny, 1.0, 0.0])
    for n_best in (1, 2, 64, n_vocabulary, n_vocabulary + 5):
        found = cpu_ops.survey(logits, temperature, n_best)
        assert_same(found, reference_ops.survey(logits, temperature, n_best))
    assert logits.equal(before)


def test_the_reference_is_torchs_own_maximum_order_and_softmax(
    reference_ops: ReferenceOps, generator: torch.Generator
) -> None:
    logits = torch.randn(5, 700, generator=generator) * 3
    found = reference_ops.survey(logits, torch.full((5,), 0.7), 9)
    assert found.id_RK[:, 0].equal(logits.argmax(dim=-1))
    assert found.value_RK.equal(logits.topk(9).values)
    share = torch.softmax(logits.double() / torch.tensor(0.7).double(), dim=-1)
    torch.testing.assert_close(1 / found.total_R, share.max(dim=-1).values, rtol=1e-12, atol=0)
    second = share[:, SURVEY_BLOCK : 2 * SURVEY_BLOCK].sum(dim=-1)
    torch.testing.assert_close(found.block_RB[:, 1] / found.total_R, second, rtol=1e-12, atol=0)


@pytest.mark.parametrize("broken", [math.nan, -math.nan])
def test_a_nan_of_either_sign_shows_in_its_own_row_only(cpu_ops: CpuOps, broken: float) -> None:
    logits = torch.zeros(3, 1000)
    logits[1, 999] = torch.tensor(broken).copysign(torch.tensor(math.copysign(1.0, broken)))
    found = cpu_ops.survey(logits, torch.ones(3), 3)
    assert found.value_RK.isnan().all(dim=1).tolist() == [False, True, False]
    assert found.total_R.tolist() == [1000.0, 0.0, 1000.0]


@pytest.mark.parametrize(("value", "n_at"), [(INF, 1), (-INF, 50)])
def test_a_row_whose_best_is_infinite_says_so(
    cpu_ops: CpuOps, reference_ops: ReferenceOps, value: float, n_at: int
) -> None:
    logits = torch.zeros(2, 50)
    logits[0, :n_at] = value
    for ops in (cpu_ops, reference_ops):
        found = ops.survey(logits, torch.ones(2), 2)
        assert found.value_RK[0, 0] == value
        assert found.total_R.tolist() == [0.0, 50.0]


def test_rows_are_alike_alone_among_others_and_over_threads(cpu_ops: CpuOps, generator: torch.Generator) -> None:
    logits = torch.randn(33, 49_152, generator=generator) * 3
    temperature = torch.rand(33, generator=generator) + 0.1
    together = cpu_ops.survey(logits, temperature, 64)
    for row in range(33):
        alone = cpu_ops.survey(logits[row : row + 1], temperature[row : row + 1], 64)
        assert alone.value_RK[0].equal(together.value_RK[row])
        assert alone.id_RK[0].equal(together.id_RK[row])
        assert alone.total_R[0].equal(together.total_R[row])
        assert alone.block_RB[0].equal(together.block_RB[row])


def test_half_precision_views_and_no_rows_are_taken(cpu_ops: CpuOps, generator: torch.Generator) -> None:
    logits = torch.randn(300, 4, generator=generator).bfloat16().t()
    temperature = torch.ones(4)
    assert_same(
        cpu_ops.survey(logits, temperature, 5), cpu_ops.survey(logits.float().contiguous(), temperature, 5)
    )
    assert cpu_ops.survey(torch.empty(0, 7), torch.empty(0), 3).id_RK.shape == (0, 3)
