"""Draws tokens from logits, each row on its own.

The order is the field's: penalties → bias → masks (`adjust`) → temperature → top_k → top_p → min_p (`filters`),
then the draw (`noise`). Log-probabilities are those of the row as the model left it. Rows are treated one after
the other: what a row yields cannot depend on its neighbours, and a row of 200 KB stays in the cache. Costs:
`replica/benchmarks/sampling.py`.

Shape legend: R rows of logits, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bakehouse_replica.core.types import Draw, Sample, TokenLogprob
from bakehouse_replica.model.adjust import NoTokenLeft, adjusted, changes_logits
from bakehouse_replica.model.constraint import Constraint, ConstraintFailure
from bakehouse_replica.model.filters import FIRST_CANDIDATES, filters_nothing, kept
from bakehouse_replica.model.logprobs import token_logprobs
from bakehouse_replica.model.noise import noise_key, race, race_of_all

# The smallest normal float32 keeps the best token's 0 / temperature at 0 in a row that is all but greedy.
_LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny


def draw(
    logits_RV: Tensor,
    samples: Sequence[Sample],
    positions: Sequence[int],
    constraints: Sequence[Constraint | None] | None = None,
    *,
    first_candidates: int = FIRST_CANDIDATES,
) -> list[tuple[Draw, ...]]:
    """One tuple of `len(sample.seeds)` draws per row; `positions[r]` is where row r's new token will stand.

    A row that cannot go on has draws without tokens: complete where its constraint may end here, else failed. Does
    not modify `logits_RV` (any float dtype; computed in float32). `first_candidates` changes the speed only.
    """
    assert logits_RV.shape[0] == len(samples) == len(positions), (logits_RV.shape, len(samples), len(positions))
    assert bool(torch.isfinite(logits_RV.amax(dim=-1)).all()), "a row of logits has no finite maximum"
    constraints = constraints or [None] * len(samples)
    are_plain = [
        constraint is None and _takes_the_best(sample)
        for sample, constraint in zip(samples, constraints, strict=True)
    ]
    # Of 49,152: `amax` 7 us, `max` with indices 22 us, `argmax` 71 us (torch 2.13, one thread).
    best_ids = logits_RV.max(dim=-1).indices.tolist() if any(are_plain) else []
    return [
        (Draw(token_ids=(best_ids[row],)),) * len(sample.seeds)
        if are_plain[row]
        else _draw_row(logits_RV[row].float(), sample, positions[row], constraints[row], first_candidates)
        for row, sample in enumerate(samples)
    ]


def _takes_the_best(sample: Sample) -> bool:
    return sample.params.temperature == 0.0 and sample.params.logprobs is None and not changes_logits(sample)


def _draw_row(
    logits_V: Tensor, sample: Sample, position: int, constraint: Constraint | None, first_candidates: int
) -> tuple[Draw, ...]:
    """The draws of one row; neither its constraint nor its masks can harm the others."""
    try:
        adjusted_V = logits_V
        if constraint is not None or changes_logits(sample):
            adjusted_V = adjusted(logits_V, sample, constraint)
        token_ids = _token_ids(adjusted_V, sample, position, first_candidates)
        ends = {id_: constraint is not None and constraint.is_complete_after(id_) for id_ in set(token_ids)}
    except NoTokenLeft as nothing:
        failure = None if nothing.is_complete else str(nothing)
        return (Draw(token_ids=(), is_complete=nothing.is_complete, failure=failure),) * len(sample.seeds)
    except ConstraintFailure as broken:
        return (Draw(token_ids=(), failure=str(broken)),) * len(sample.seeds)
    logprobs = _logprobs(logits_V, token_ids, sample.params.logprobs)
    return tuple(
        Draw(token_ids=(id_,), logprobs=logprobs.get(id_, ()), is_complete=ends[id_]) for id_ in token_ids
    )


def _token_ids(logits_V: Tensor, sample: Sample, position: int, first_candidates: int) -> list[int]:
    """One id for each seed."""
    params = sample.params
    if params.temperature == 0.0:
        return [int(logits_V.max(dim=-1).indices)] * len(sample.seeds)
    scaled_V = (logits_V - logits_V.amax()).div_(max(params.temperature, _LEAST_TEMPERATURE))
    keys = [noise_key(seed, position) for seed in sample.seeds]
    if filters_nothing(params):
        return race_of_all(scaled_V.exp_(), keys)
    id_K, weight_K = kept(scaled_V, params, first_candidates)
    return race(weight_K, id_K, keys)


def _logprobs(
    logits_V: Tensor, token_ids: Sequence[int], n_top: int | None
) -> dict[int, tuple[TokenLogprob, ...]]:
    """By token id, what a `Draw` of it says; nothing where nobody asks."""
    if n_top is None:
        return {}
    distinct = list(dict.fromkeys(token_ids))
    found = token_logprobs(logits_V.expand(len(distinct), -1), distinct, n_top)
    return {id_: (logprob,) for id_, logprob in zip(distinct, found, strict=True)}
