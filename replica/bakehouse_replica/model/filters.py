"""Which tokens of rows `top_k`, `top_p` and `min_p` keep, in this order.

Every filter is a *cut*: the lowest logit it keeps, so equal logits share one fate and a result never hangs on the
order in which a sort left them.

Shape legend: R rows, K the best tokens fetched of each.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bakehouse_replica.core.sampling import SamplingParams

# Most filters close within the first; where one does not, eight times as many are fetched for its row.
FIRST_CANDIDATES = 64
CANDIDATE_GROWTH = 8

_LOWEST = torch.finfo(torch.float32).min  # keeps all but the tokens that are masked with -inf


def filters_nothing(params: SamplingParams) -> bool:
    """Whether every token that is not masked stays."""
    return params.top_k is None and params.top_p == 1.0 and params.min_p == 0.0


def cuts(
    scaled_RK: Tensor, weight_RK: Tensor, total_R: Tensor, params: Sequence[SamplingParams], *, is_all: bool
) -> tuple[Tensor, Tensor]:
    """The lowest scaled logit that all filters of a row keep, and whether it is known: not where K are too few.

    `scaled` falls from 0 in each row; `weight` (float64) is its exponential, `total` (float64) the vocabulary's
    weight. `is_all`: no row has more than K tokens.
    """
    new = scaled_RK.new_tensor
    top_k_R = new([one.top_k or 0 for one in params], dtype=torch.int64)  # 0 where there is none
    top_p_R = new([one.top_p for one in params], dtype=torch.float64)
    least_R = new([math.log(one.min_p) if one.min_p > 0.0 else _LOWEST for one in params])
    # No token beyond the columns is above `last`, which must lie strictly below a cut: a tie may hide behind it.
    last_R = scaled_RK[:, -1]
    last_R = torch.where((last_R < _LOWEST) | is_all, -math.inf, last_R)
    cut_R = _at(scaled_RK, top_k_R.clamp(1, scaled_RK.shape[1])).clamp_min(_LOWEST).where(top_k_R > 0, _LOWEST)
    is_known_R = last_R < cut_R
    # After `top_k`, `top_p` shares out what that has left.
    weight_RK = weight_RK.where(scaled_RK >= cut_R[:, None], 0.0)
    upto_RK = weight_RK.cumsum(dim=-1)
    share_R = top_p_R * total_R.where(top_k_R == 0, upto_RK[:, -1])
    n_needed_R = (upto_RK - weight_RK < share_R[:, None]).sum(dim=-1)
    cut_R = cut_R.maximum(_at(scaled_RK, n_needed_R).where(top_p_R < 1.0, _LOWEST)).maximum(least_R)
    return cut_R, (is_known_R | (top_k_R == 0)) & (last_R < cut_R)


def _at(scaled_RK: Tensor, n_R: Tensor) -> Tensor:
    """The n-th of each row."""
    return scaled_RK.gather(1, n_R[:, None] - 1)[:, 0]
