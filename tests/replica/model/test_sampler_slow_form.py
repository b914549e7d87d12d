"""The sampler against its slow form: the same tokens, whatever the logits and whatever is asked."""

import math
from functools import cache
from random import Random

import pytest
import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.cpu.ops import CpuOps
from bakehouse_kernels.cpu.pool import n_cores
from bakehouse_kernels.reference import ReferenceOps
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Draw, Sample
from bakehouse_replica.model.sampler import draw
from row_sampler import draw_row_by_row
from torch import Tensor


@cache
def ops_called(name: str) -> Ops:
    return CpuOps(n_threads=min(2, n_cores())) if name == "served" else ReferenceOps()


def random_params(random: Random) -> SamplingParams:
    asked = random.random() < 0.3
    return SamplingParams(
        temperature=random.choice([0.0, 1e-30, 0.3, 0.8, 1.0, 1.0, 5.0]),
        top_k=random.choice([None, None, None, 1, 3, 50, 64, 500, 10**6]),
        top_p=random.choice([1.0, 1.0, 0.95, 0.9, 0.3, 1e-6]),
        min_p=random.choice([0.0, 0.0, 0.05, 1e-4]),
        logprobs=random.choice([0, 1, 5, 80]) if asked else None,
        logit_bias=((0, 3.0),) if random.random() < 0.2 else (),
        frequency_penalty=0.5 if random.random() < 0.2 else 0.0,
        allowed_token_ids=(0, 1, 2) if random.random() < 0.1 else None,
    )


def random_logits(random: Random, kind: str, n_vocabulary: int) -> Tensor:
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    logits_V = torch.randn(n_vocabulary, generator=generator) * random.choice([0.1, 1.0, 4.0])
    match kind:
        case "ties":
            logits_V = logits_V.round()
        case "equal":
            logits_V = torch.full_like(logits_V, 3.5)
        case "masked":
            logits_V[torch.rand(n_vocabulary, generator=generator) < 0.9] = -math.inf
            logits_V[:3] = torch.tensor([0.5, 0.25, 0.125])[:n_vocabulary]
        case "one left":
            logits_V = torch.full_like(logits_V, -math.inf)
            logits_V[0] = -2.0
        case "bfloat16":
            logits_V = logits_V.bfloat16()
    return logits_V


def assert_same(found: tuple[Draw, ...], expected: tuple[Draw, ...]) -> None:
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        for logprob, right in zip(one.logprobs, other.logprobs, strict=True):
            assert (logprob.rank, [id_ for id_, _ in logprob.top]) == (right.rank, [id_ for id_, _ in right.top])
            values = [logprob.logprob, *(value for _, value in logprob.top)]
            assert values == pytest.approx([right.logprob, *(value for _, value in right.top)], abs=2e-6)


@pytest.mark.parametrize("ops", ["served", "reference"])
@pytest.mark.parametrize("n_vocabulary", [3, 65, 256, 1003, 20_000])
@pytest.mark.parametrize("kind", ["smooth", "ties", "equal", "masked", "one left", "bfloat16"])
def test_tokens_are_those_of_the_slow_form(kind: str, n_vocabulary: int, ops: str) -> None:
    """Sums differ by 1e-7 of themselves: that one of these draws falls so close has a probability of 1e-4."""
    random = Random(f"{kind} {n_vocabulary}")
    samples = [
        Sample(
            params=random_params(random),
            seeds=tuple(range(row, row + random.choice([1, 1, 3]))),
            output_index=2,
            output_ids=(1, 1),
        )
        for row in range(40)
    ]
    positions = [random.randrange(1000) for _ in samples]
    logits_RV = torch.stack([random_logits(random, kind, n_vocabulary) for _ in samples])
    found = draw(ops_called(ops), logits_RV, samples, positions)
    for row, expected in enumerate(draw_row_by_row(logits_RV, samples, positions)):
        assert_same(found[row], expected)
