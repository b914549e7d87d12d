"""Drawing tokens in plain torch on any device, one row after the other: the oracle of kernels that draw.

Shape legend: R rows, V vocabulary, C places that change or tokens of a block, B blocks.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from bakehouse_kernels.layout import SURVEY_BLOCK, DrawTensors, LogitChanges
from bakehouse_kernels.noise import exponential

_LOWEST = torch.finfo(torch.float32).min  # keeps all but the tokens that are masked with -inf
# The smallest normal float32 keeps the best token's 0 / temperature at 0 in a row that is all but greedy.
_LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny


def adjust(logits_RV: Tensor, changes: LogitChanges) -> None:
    """Penalise and bias some logits; modifies them. See `api.Ops.adjust`."""
    row_C, id_C = changes.row_C.long(), changes.id_C.long()
    value_C = logits_RV[row_C, id_C]
    repetition_C = changes.repetition_R[row_C]
    penalised_C = torch.where(value_C > 0, value_C / repetition_C, value_C * repetition_C)
    value_C = torch.where(changes.is_seen_C, penalised_C, value_C)
    less_C = changes.presence_R[row_C] + changes.frequency_R[row_C] * changes.count_C
    value_C = torch.where(changes.count_C > 0, value_C - less_C, value_C)
    logits_RV[row_C, id_C] = value_C + changes.bias_C


def draw(logits_RV: Tensor, asks: DrawTensors) -> Tensor:
    """One token id for each row, `[R]`. See `api.Ops.draw`."""
    drawn = [_drawn(logits_RV[row].float(), asks, row) for row in range(logits_RV.shape[0])]
    return torch.tensor(drawn, dtype=torch.int64, device=logits_RV.device)


def _drawn(logits_V: Tensor, asks: DrawTensors, row: int) -> int:
    highest = float(logits_V.max())  # NaN where there is one
    if not math.isfinite(highest):
        return -1
    temperature = float(asks.temperature_R[row])
    if temperature == 0.0:
        return int((logits_V == highest).nonzero()[0])
    scaled_V = (logits_V - highest) / torch.tensor(max(temperature, _LEAST_TEMPERATURE), device=logits_V.device)
    weight_V, key = scaled_V.exp().double(), asks.key_R[row]
    top_k, top_p, min_p = int(asks.top_k_R[row]), float(asks.top_p_R[row]), float(asks.min_p_R[row])
    if top_k == 0 and top_p == 1.0 and min_p == 0.0:
        return _raced_in_blocks(weight_V, key)
    is_kept_V = scaled_V >= _cut(scaled_V, weight_V, top_k, top_p, min_p)
    ids = is_kept_V.nonzero()[:, 0]
    return int(ids[_winner(weight_V[ids], ids, key)])


def _cut(scaled_V: Tensor, weight_V: Tensor, top_k: int, top_p: float, min_p: float) -> float:
    """The lowest scaled logit that all filters keep."""
    falling_V, order_V = scaled_V.sort(descending=True)
    weight_V = weight_V[order_V]
    cut = _LOWEST
    if top_k > 0:
        cut = max(cut, float(falling_V[min(top_k, len(falling_V)) - 1]))
        weight_V = weight_V.where(falling_V >= cut, 0.0)
    if top_p < 1.0:
        before_V = weight_V.cumsum(dim=0) - weight_V
        n_needed = int((before_V < top_p * weight_V.sum()).sum())
        cut = max(cut, float(falling_V[n_needed - 1]))
    if min_p > 0.0:
        cut = max(cut, float(torch.tensor(math.log(min_p), dtype=torch.float32)))
    return cut


def _raced_in_blocks(weight_V: Tensor, key: Tensor) -> int:
    weight_BC = functional.pad(weight_V, (0, -len(weight_V) % SURVEY_BLOCK)).view(-1, SURVEY_BLOCK)
    # Negative counters: no block shares its noise with a token.
    block = _winner(weight_BC.sum(dim=-1), -1 - torch.arange(len(weight_BC), device=weight_V.device), key)
    first = block * SURVEY_BLOCK
    id_C = torch.arange(first, first + SURVEY_BLOCK, device=weight_V.device)
    return first + _winner(weight_BC[block], id_C, key)


def _winner(weight_C: Tensor, counter_C: Tensor, key: Tensor) -> int:
    """The place that wins a race."""
    return int((exponential(key, counter_C) / weight_C).argmin())
