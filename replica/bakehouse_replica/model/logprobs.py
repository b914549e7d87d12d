"""The model's own log-probabilities of tokens: log-softmax of its logits, before whatever a request changes there.

Order is total and the same everywhere: the likelier first, equal ones by the smaller id.

Shape legend: S rows of logits, V vocabulary, K best tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bakehouse_replica.core.types import TokenLogprob


def token_logprobs(logits_SV: Tensor, token_ids: Sequence[int], n_top: int) -> tuple[TokenLogprob, ...]:
    """For row s, how likely `token_ids[s]` was, and the `n_top` best tokens (or all there are).

    Computed in float32; does not modify the logits. Temporaries take about twice the memory of the rows.
    """
    logits_SV = logits_SV.float()
    token_id_S1 = torch.tensor(token_ids, device=logits_SV.device)[:, None]
    total_S1 = logits_SV.logsumexp(dim=-1, keepdim=True)
    value_S1 = logits_SV.gather(1, token_id_S1)
    ranks = _ranks(logits_SV, value_S1, token_id_S1)
    tops = _best(logits_SV, total_S1, min(n_top, logits_SV.shape[1]))
    return tuple(
        TokenLogprob(logprob=logprob, rank=rank, top=top)
        for logprob, rank, top in zip((value_S1 - total_S1)[:, 0].tolist(), ranks, tops, strict=True)
    )


def _ranks(logits_SV: Tensor, value_S1: Tensor, token_id_S1: Tensor) -> list[int]:
    # Counted in float32, exact up to 2^24: a sum over booleans takes four times as long.
    is_higher_SV = torch.gt(logits_SV, value_S1, out=torch.empty_like(logits_SV))
    n_higher_S = is_higher_SV.sum(dim=-1).long()
    n_reached_S = torch.ge(logits_SV, value_S1, out=is_higher_SV).sum(dim=-1).long()
    for row in (n_reached_S - n_higher_S > 1).nonzero()[:, 0].tolist():
        n_higher_S[row] += (logits_SV[row, : int(token_id_S1[row])] == value_S1[row]).sum()
    return (n_higher_S + 1).tolist()


def _best(logits_SV: Tensor, total_S1: Tensor, n_top: int) -> list[tuple[tuple[int, float], ...]]:
    if n_top == 0:
        return [()] * len(logits_SV)
    # One more, to see a tie at the edge: equal logits come out of a sort in any order.
    value_SK, id_SK = logits_SV.topk(min(n_top + 1, logits_SV.shape[1]))
    is_tied_S = (value_SK[:, 1:] == value_SK[:, :-1]).any(dim=-1)
    value_SK, id_SK = value_SK[:, :n_top], id_SK[:, :n_top]
    for row in is_tied_S.nonzero()[:, 0].tolist():
        candidate_K = (logits_SV[row] >= value_SK[row, -1]).nonzero()[:, 0]
        id_SK[row] = candidate_K[logits_SV[row, candidate_K].argsort(descending=True, stable=True)][:n_top]
    value_SK = logits_SV.gather(1, id_SK) - total_S1
    return [
        tuple(zip(ids, values, strict=True)) for ids, values in zip(id_SK.tolist(), value_SK.tolist(), strict=True)
    ]
