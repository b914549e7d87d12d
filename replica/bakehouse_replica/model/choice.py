"""Chooses tokens for rows of logits that have been surveyed: the best, by a race of all, or of what filters keep.

Rows are treated together, but none of their sums: what a row yields does not depend on its neighbours.

Shape legend: R rows, A rows that ask, N draws, V vocabulary, K best tokens of a row, C tokens of a block.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.layout import SURVEY_BLOCK
from torch import Tensor

from bakehouse_replica.core.types import Sample
from bakehouse_replica.model.filters import CANDIDATE_GROWTH, cuts, filters_nothing
from bakehouse_replica.model.noise import noise_key, race, race_of_blocks
from bakehouse_replica.model.surveyed import Surveyed, survey


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One token for each seed of `sample`, to stand at `position`, from a row of surveyed logits."""

    row: int
    sample: Sample
    position: int


Chosen = dict[int, list[int]]  # by row, one id for each seed


def choose(ops: Ops, rows: Surveyed, asks: Sequence[Ask]) -> Chosen:
    """The ids for each row that asks; one row asks once. The temperatures of `rows` are those of the samples."""
    greedy, whole, filtered = [], [], []
    for ask in asks:
        params = ask.sample.params
        if params.temperature == 0.0:
            greedy.append(ask)
        elif filters_nothing(params):
            whole.append(ask)
        else:
            filtered.append(ask)
    chosen: Chosen = {}
    if greedy:
        best_ids = rows.found.id_RK[:, 0].tolist()
        chosen |= {ask.row: [best_ids[ask.row]] * len(ask.sample.seeds) for ask in greedy}
    if whole:
        chosen |= _chosen_from_all(rows, whole)
    if filtered:
        chosen |= _chosen_from_kept(ops, rows, filtered)
    return chosen


def _chosen_from_all(rows: Surveyed, asks: Sequence[Ask]) -> Chosen:
    """By two races: of blocks, and of the tokens of the block that won."""
    row_N = _index([ask.row for ask in asks for _ in ask.sample.seeds], rows)
    key_N = _keys(asks, rows)
    block_N = race_of_blocks(rows.found.block_RB[row_N], key_N)
    id_NC = block_N[:, None] * SURVEY_BLOCK + torch.arange(SURVEY_BLOCK, device=block_N.device)
    n_vocabulary = rows.logits_RV.shape[1]
    logits_NC = rows.logits_RV[row_N[:, None], id_NC.clamp(max=n_vocabulary - 1)]
    weight_NC = rows.weights(logits_NC, row_N).where(id_NC < n_vocabulary, 0.0)
    return _by_row(asks, race(weight_NC, id_NC, key_N))


def _chosen_from_kept(ops: Ops, rows: Surveyed, asks: Sequence[Ask]) -> Chosen:
    """By a race of the best tokens, of more of them where the filters do not close within those at hand."""
    row_A = _index([ask.row for ask in asks], rows)
    value_AK, id_AK = rows.found.value_RK[row_A], rows.found.id_RK[row_A]
    n_candidates, n_vocabulary = value_AK.shape[1], rows.logits_RV.shape[1]
    scaled_AK = rows.scaled(value_AK, row_A)
    weight_AK = scaled_AK.exp().double()
    cut_A, is_known_A = cuts(
        scaled_AK,
        weight_AK,
        rows.found.total_R[row_A],
        [ask.sample.params for ask in asks],
        is_all=n_candidates == n_vocabulary,
    )
    known, chosen = is_known_A.tolist(), Chosen()
    closed = [index for index, is_known in enumerate(known) if is_known]
    if closed:
        ready = [asks[index] for index in closed]
        index_N = _index([index for index in closed for _ in asks[index].sample.seeds], rows)
        weight_NK = weight_AK.where(scaled_AK >= cut_A[:, None], 0.0)[index_N]
        chosen = _by_row(ready, race(weight_NK, id_AK[index_N], _keys(ready, rows)))
    if len(closed) < len(asks):
        open_asks = [ask for ask, is_known in zip(asks, known, strict=True) if not is_known]
        more = survey(
            ops,
            rows.logits_RV[row_A[~is_known_A]],
            [ask.sample.params.temperature for ask in open_asks],
            n_candidates * CANDIDATE_GROWTH,
        )
        again = [replace(ask, row=index) for index, ask in enumerate(open_asks)]
        found = _chosen_from_kept(ops, more, again)
        chosen |= {ask.row: found[index] for index, ask in enumerate(open_asks)}
    return chosen


def _keys(asks: Iterable[Ask], rows: Surveyed) -> Tensor:
    return _index([noise_key(seed, ask.position) for ask in asks for seed in ask.sample.seeds], rows)


def _by_row(asks: Iterable[Ask], id_N: Tensor) -> Chosen:
    ids = iter(id_N.tolist())
    return {ask.row: list(islice(ids, len(ask.sample.seeds))) for ask in asks}


def _index(values: list[int], rows: Surveyed) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=rows.logits_RV.device)
