"""Draws tokens from logits, each row on its own.

The order is the field's: penalties → bias → masks (`adjust`) → temperature → top_k → top_p → min_p (`filters`),
then the draw (`noise`). Log-probabilities are those of the row as the model left it. A survey of all rows finds
what most draws need (`surveyed`); only rows that a request changes are copied, and passed over once more. Costs:
`replica/benchmarks/sampling.py`.

Shape legend: R rows of logits, A of them with a distribution of their own, V vocabulary.
"""

from collections.abc import Sequence, Set

import torch
from bakehouse_kernels.api import Ops
from torch import Tensor

from bakehouse_replica.core.types import Draw, Sample, TokenLogprob
from bakehouse_replica.model.adjust import NoTokenLeft, adjusted, changes_logits
from bakehouse_replica.model.choice import Ask, Chosen, choose
from bakehouse_replica.model.constraint import Constraint, ConstraintFailure
from bakehouse_replica.model.filters import FIRST_CANDIDATES
from bakehouse_replica.model.logprobs import logprobs_at
from bakehouse_replica.model.surveyed import Surveyed, survey


def draw(
    ops: Ops,
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
    n_rows = len(samples)
    assert logits_RV.shape[0] == n_rows == len(positions), (logits_RV.shape, n_rows, len(positions))
    constraints = constraints or [None] * n_rows
    asks = [
        Ask(row=row, sample=sample, position=position)
        for row, (sample, position) in enumerate(zip(samples, positions, strict=True))
    ]
    with_own = [ask for ask in asks if _has_its_own(ask.sample, constraints[ask.row])]
    own = {ask.row for ask in with_own}
    rows = _surveyed_as_left(ops, logits_RV, samples, own, first_candidates)
    chosen = choose(ops, rows, [ask for ask in asks if ask.row not in own] if own else asks)
    ended: dict[int, Draw] = {}
    if with_own:
        chosen |= _choose_from_own(ops, rows, with_own, constraints, first_candidates, ended)
    completing = _completing(chosen, constraints, ended) if with_own else set()
    logprobs = _logprobs(rows, chosen, samples)

    def drawn(row: int, id_: int) -> Draw:
        is_complete = (row, id_) in completing
        return Draw(token_ids=(id_,), logprobs=logprobs.get((row, id_), ()), is_complete=is_complete)

    return [
        (ended[row],) * len(sample.seeds) if row in ended else tuple(drawn(row, id_) for id_ in chosen[row])
        for row, sample in enumerate(samples)
    ]


def _asks(sample: Sample) -> bool:
    """Whether log-probabilities are asked for, which are those at temperature 1."""
    return sample.params.logprobs is not None


def _has_its_own(sample: Sample, constraint: Constraint | None) -> bool:
    """Whether tokens are drawn from other weights than those of the row as the model left it."""
    return (
        constraint is not None
        or changes_logits(sample)
        or (_asks(sample) and sample.params.temperature not in (0.0, 1.0))
    )


def _surveyed_as_left(
    ops: Ops, logits_RV: Tensor, samples: Sequence[Sample], own: Set[int], first_candidates: int
) -> Surveyed:
    """What is found in the rows as the model left them, of which those of `own` are drawn otherwise."""
    return survey(
        ops,
        logits_RV,
        [_temperature_as_left(sample, row in own) for row, sample in enumerate(samples)],
        _n_best(
            [sample for row, sample in enumerate(samples) if row not in own or _asks(sample)], first_candidates
        ),
    )


def _temperature_as_left(sample: Sample, has_its_own: bool) -> float:
    if _asks(sample):
        return 1.0
    return 0.0 if has_its_own else sample.params.temperature


def _n_best(samples: Sequence[Sample], first_candidates: int) -> int:
    """Only one where all rows take the best."""
    if all(sample.params.temperature == 0.0 and not _asks(sample) for sample in samples):
        return 1
    return max(first_candidates, *(sample.params.logprobs or 0 for sample in samples))


def _choose_from_own(
    ops: Ops,
    rows: Surveyed,
    asks: Sequence[Ask],
    constraints: Sequence[Constraint | None],
    first_candidates: int,
    ended: dict[int, Draw],
) -> Chosen:
    """From adjusted copies; fills `ended` with rows that cannot go on, which harm no others."""
    kept: list[Ask] = []
    own: list[Tensor] = []
    for ask in asks:
        try:
            own.append(adjusted(rows.logits_RV[ask.row], ask.sample, constraints[ask.row]))
            kept.append(ask)
        except NoTokenLeft as nothing:
            failure = None if nothing.is_complete else str(nothing)
            ended[ask.row] = Draw(token_ids=(), is_complete=nothing.is_complete, failure=failure)
        except ConstraintFailure as broken:
            ended[ask.row] = Draw(token_ids=(), failure=str(broken))
    if not kept:
        return {}
    samples = [ask.sample for ask in kept]
    own_rows = survey(
        ops,
        torch.stack(own),
        [sample.params.temperature for sample in samples],
        1 if all(sample.params.temperature == 0.0 for sample in samples) else first_candidates,
    )
    found = choose(
        ops,
        own_rows,
        [Ask(row=index, sample=ask.sample, position=ask.position) for index, ask in enumerate(kept)],
    )
    return {ask.row: found[index] for index, ask in enumerate(kept)}


def _completing(
    chosen: Chosen, constraints: Sequence[Constraint | None], ended: dict[int, Draw]
) -> set[tuple[int, int]]:
    """The (row, id) after which a constraint lets nothing but an end follow; fills `ended` where it breaks."""
    completing: set[tuple[int, int]] = set()
    for row, ids in chosen.items():
        constraint = constraints[row]
        if constraint is None:
            continue
        try:
            completing |= {(row, id_) for id_ in set(ids) if constraint.is_complete_after(id_)}
        except ConstraintFailure as broken:
            ended[row] = Draw(token_ids=(), failure=str(broken))
    return completing


def _logprobs(
    rows: Surveyed, chosen: Chosen, samples: Sequence[Sample]
) -> dict[tuple[int, int], tuple[TokenLogprob, ...]]:
    """By row and id, what a `Draw` of it says; nothing where nobody asks."""
    wanted = [(row, id_) for row, ids in chosen.items() if _asks(samples[row]) for id_ in dict.fromkeys(ids)]
    if not wanted:
        return {}
    row_ids, token_ids = zip(*wanted, strict=True)
    found = logprobs_at(rows, row_ids, token_ids, [samples[row].params.logprobs or 0 for row in row_ids])
    return {pair: (logprob,) for pair, logprob in zip(wanted, found, strict=True)}
