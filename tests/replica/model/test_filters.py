"""The filters against their slow form: all tokens sorted and summed in plain Python."""

import math
from dataclasses import replace
from itertools import product
from random import Random

import pytest
import torch
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.model.filters import cuts
from torch import Tensor

VOCABULARY = 600


def slow_kept(scaled: list[float], params: SamplingParams) -> set[int]:
    """The ids that stay, one filter after the other; equal logits share one fate."""
    weights = {id_: math.exp(value) for id_, value in enumerate(scaled) if value > -math.inf}
    if params.top_k is not None:
        cut = sorted((scaled[id_] for id_ in weights), reverse=True)[: params.top_k][-1]
        weights = {id_: weight for id_, weight in weights.items() if scaled[id_] >= cut}
    if params.top_p < 1.0:
        total, before, cut = math.fsum(weights.values()), 0.0, 0.0
        for value, weight in sorted(((scaled[id_], weight) for id_, weight in weights.items()), reverse=True):
            if before >= params.top_p * total:
                break
            before, cut = before + weight, value
        weights = {id_: weight for id_, weight in weights.items() if scaled[id_] >= cut}
    if params.min_p > 0.0:
        cut = float(torch.tensor(math.log(params.min_p)))
        weights = {id_: weight for id_, weight in weights.items() if scaled[id_] >= cut}
    return set(weights)


def scaled_row(random: Random, kind: str) -> Tensor:
    """A row whose best is 0: smooth, full of ties, or mostly masked."""
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    row_V = torch.randn(VOCABULARY, generator=generator) * random.choice([0.2, 1.0, 4.0])
    if kind == "ties":
        row_V = row_V.round()
    if kind == "masked":
        row_V[torch.rand(VOCABULARY, generator=generator) < 0.99] = -math.inf
        row_V[random.randrange(VOCABULARY)] = 1.0
    return row_V - row_V.max()


def kept(rows: list[Tensor], params: list[SamplingParams], n_candidates: int) -> list[set[int] | None]:
    """The ids that stay in each row, None where so many candidates cannot tell."""
    scaled_RV = torch.stack(rows)
    scaled_RK, id_RK = scaled_RV.topk(n_candidates)
    weight_RK, total_R = scaled_RK.exp().double(), scaled_RV.exp().sum(dim=-1, dtype=torch.float64)
    cut_R, is_known_R = cuts(scaled_RK, weight_RK, total_R, params, is_all=n_candidates == VOCABULARY)
    return [
        set(id_K[scaled_K >= cut].tolist()) if is_known else None
        for scaled_K, id_K, cut, is_known in zip(scaled_RK, id_RK, cut_R, is_known_R, strict=True)
    ]


@pytest.mark.parametrize("kind", ["smooth", "ties", "masked"])
def test_what_stays_is_what_the_slow_form_keeps(kind: str) -> None:
    random = Random(4)
    limits = product((None, 1, 5, 60, 10**6), (1.0, 0.999, 0.9, 0.3, 1e-6), (0.0, 0.001, 0.2))
    params = [SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p) for top_k, top_p, min_p in limits] * 4
    rows = [scaled_row(random, kind) for _ in params]
    for n_candidates in (1, 8, 64, VOCABULARY):
        n_known = 0
        for row_V, one, ids in zip(rows, params, kept(rows, params, n_candidates), strict=True):
            if ids is not None:
                n_known += 1
                # exp in float32 is off by 1e-7, so that a share of `top_p` may be met one token sooner or later.
                top_p = one.top_p
                least = slow_kept(row_V.tolist(), replace(one, top_p=top_p * (1 - 1e-6) if top_p < 1 else 1.0))
                most = slow_kept(row_V.tolist(), replace(one, top_p=min(1.0, top_p * (1 + 1e-6))))
                assert least <= ids <= most
        assert n_known == len(rows) or n_candidates < VOCABULARY


@pytest.mark.parametrize("kind", ["smooth", "ties", "masked"])
def test_a_row_closes_within_as_few_candidates_as_can_tell(kind: str) -> None:
    """Those that stay and one below them, or the last that is not masked."""
    random = Random(5)
    params = SamplingParams(top_k=20, top_p=0.9, min_p=0.01)
    for _ in range(20):
        row_V = scaled_row(random, kind)
        n_kept = len(slow_kept(row_V.tolist(), params))
        n_enough = max(n_kept, int((row_V >= row_V.topk(20).values[-1]).sum())) + 1
        assert kept([row_V], [params], min(n_enough, VOCABULARY)) != [None]


@pytest.mark.parametrize("top_k", [2, VOCABULARY, 10**6])
def test_top_k_beyond_what_masks_leave_keeps_what_they_leave(top_k: int) -> None:
    row_V = torch.full((VOCABULARY,), -math.inf)
    row_V[[7, 9]] = torch.tensor([0.0, -1.0])
    assert kept([row_V], [SamplingParams(top_k=top_k)], 64) == [{7, 9}]
