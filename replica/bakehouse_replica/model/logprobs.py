"""The model's own log-probabilities of tokens: log-softmax of its logits, before whatever a request changes there.

Order is total and the same everywhere: the likelier first, equal ones by the smaller id.

Shape legend: S rows of logits, N tokens asked for, V vocabulary, K best tokens of a row.
"""

import math
from collections.abc import Sequence

import torch
from bakehouse_kernels.api import Ops
from torch import Tensor

from bakehouse_replica.core.types import TokenLogprob
from bakehouse_replica.model.surveyed import Surveyed, survey

_N_BEST = 64  # most tokens of a text are among these, so that their ranks need no look at the whole row


def token_logprobs(ops: Ops, logits_SV: Tensor, token_ids: Sequence[int], n_top: int) -> tuple[TokenLogprob, ...]:
    """For row s, how likely `token_ids[s]` was, and the `n_top` best tokens (or all there are).

    Does not modify the logits (any float dtype; taken in float32).
    """
    n_rows = len(token_ids)
    rows = survey(ops, logits_SV, [1.0] * n_rows, max(n_top, _N_BEST))
    return logprobs_at(rows, range(n_rows), token_ids, [n_top] * n_rows)


def logprobs_at(
    rows: Surveyed, row_ids: Sequence[int], token_ids: Sequence[int], n_tops: Sequence[int]
) -> tuple[TokenLogprob, ...]:
    """As `token_logprobs`, of token n in row `row_ids[n]`. Temperature is 1, K at least each `n_tops`."""
    row_N = torch.tensor(row_ids, device=rows.logits_RV.device)
    token_N = torch.tensor(token_ids, device=rows.logits_RV.device)
    value_N = rows.logits_RV[row_N, token_N]
    best_NK, id_NK = rows.found.value_RK[row_N].tolist(), rows.found.id_RK[row_N]
    ranks = _ranks(rows, row_N, token_N, value_N)
    # In Python's float64, one by one: a vector of logarithms may round its last ones otherwise.
    totals = [
        best[0] + math.log(total) for best, total in zip(best_NK, rows.found.total_R[row_N].tolist(), strict=True)
    ]
    return tuple(
        TokenLogprob(
            logprob=value - total,
            rank=rank,
            top=tuple((id_, logit - total) for id_, logit in zip(ids[:n_top], best, strict=False)),
        )
        for value, total, rank, ids, best, n_top in zip(
            value_N.tolist(), totals, ranks, id_NK.tolist(), best_NK, n_tops, strict=True
        )
    )


def _ranks(rows: Surveyed, row_N: Tensor, token_N: Tensor, value_N: Tensor) -> list[int]:
    is_token_NK = rows.found.id_RK[row_N] == token_N[:, None]
    ranks: list[int] = (is_token_NK.int().argmax(dim=-1) + 1).tolist()
    for n in (~is_token_NK.any(dim=-1)).nonzero()[:, 0].tolist():
        logits_V, token_id, value = rows.logits_RV[row_N[n]], int(token_N[n]), value_N[n]
        n_higher = int((logits_V > value).sum()) + int((logits_V[:token_id] == value).sum())
        ranks[n] = 1 + n_higher
    return ranks
