"""The survey of logits by torch's operations: what few rows need, beside draws on the device."""

import torch
from torch import Tensor
from torch.nn import functional

from bakehouse_kernels.layout import SURVEY_BLOCK, Survey

# Rows are taken in slices of so many logits: temporaries take some 20 bytes for each, 0.7 GB at most.
_SLICE = 1 << 25
_ID_BITS = 32


def survey(logits_RV: Tensor, temperature_R: Tensor, n_best: int) -> Survey:
    """The best ids of each row, and its weights summed. See `api.Ops.survey`."""
    n_rows, n_vocabulary = logits_RV.shape
    n_together = max(1, _SLICE // max(1, n_vocabulary))
    slices = [
        _surveyed(logits_RV[begin : begin + n_together].float(), temperature_R[begin : begin + n_together], n_best)
        for begin in range(0, max(1, n_rows), n_together)
    ]
    return Survey(
        value_RK=torch.cat([one.value_RK for one in slices]),
        id_RK=torch.cat([one.id_RK for one in slices]),
        total_R=torch.cat([one.total_R for one in slices]),
        block_RB=torch.cat([one.block_RB for one in slices]),
    )


def _surveyed(logits_RV: Tensor, temperature_R: Tensor, n_best: int) -> Survey:
    id_RK = _best_ids(logits_RV, min(n_best, logits_RV.shape[1]))
    value_RK = logits_RV.gather(1, id_RK)
    is_broken_R = logits_RV.isnan().any(dim=1)
    value_RK = value_RK.masked_fill(is_broken_R[:, None], torch.nan)
    is_weighed_R = (temperature_R > 0.0) & value_RK[:, 0].isfinite()
    distance_RV = (logits_RV - value_RK[:, :1]) / temperature_R[:, None]
    weight_RV = distance_RV.exp().masked_fill(~is_weighed_R[:, None], 0.0)
    padded_RV = functional.pad(weight_RV, (0, -weight_RV.shape[1] % SURVEY_BLOCK))
    weight_RBC = padded_RV.unflatten(1, (padded_RV.shape[1] // SURVEY_BLOCK, SURVEY_BLOCK))
    block_RB = weight_RBC.sum(dim=-1, dtype=torch.float64)
    return Survey(value_RK=value_RK, id_RK=id_RK, total_R=block_RB.sum(dim=-1), block_RB=block_RB)


def _best_ids(logits_RV: Tensor, n_best: int) -> Tensor:
    """The ids of the best logits, the higher first, of equal ones the smaller: `topk` itself leaves ties open."""
    bits_RV = (logits_RV + 0.0).view(torch.int32)  # -0 becomes 0
    rising_RV = torch.where(bits_RV < 0, bits_RV ^ 0x7FFFFFFF, bits_RV).long()  # ordered as the floats are
    last = (1 << _ID_BITS) - 1
    id_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    ranked_RV = (rising_RV << _ID_BITS) + (last - id_V)
    return last - (ranked_RV.topk(n_best, dim=1).values & last)
