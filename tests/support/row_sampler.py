"""The sampler's slow form: one row after the other, every pass over the whole vocabulary, in torch.

Shape legend: V vocabulary, K the best tokens fetched, B blocks, C tokens of a block.
"""

import math
from collections.abc import Sequence

import torch
from bakehouse_kernels.noise import exponential
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Draw, Sample, TokenLogprob
from bakehouse_replica.model.adjust import adjusted, changes_logits
from bakehouse_replica.model.filters import filters_nothing
from bakehouse_replica.model.noise import noise_key
from torch import Tensor
from torch.nn import functional

_BLOCK = 256
_LOWEST = torch.finfo(torch.float32).min
_LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny


def draw_row_by_row(
    logits_RV: Tensor, samples: Sequence[Sample], positions: Sequence[int]
) -> list[tuple[Draw, ...]]:
    """As `sampler.draw`, without constraints and where no masks take every token."""
    assert bool(torch.isfinite(logits_RV.amax(dim=-1)).all())
    return [
        draw_row(logits_V.float(), sample, position)
        for logits_V, sample, position in zip(logits_RV, samples, positions, strict=True)
    ]


def draw_row(logits_V: Tensor, sample: Sample, position: int) -> tuple[Draw, ...]:
    params = sample.params
    adjusted_V = adjusted(logits_V, sample, None) if changes_logits(sample) else logits_V
    if params.temperature == 0.0:
        token_ids = [int(adjusted_V.max(dim=-1).indices)] * len(sample.seeds)
    else:
        scaled_V = (adjusted_V - adjusted_V.amax()).div_(max(params.temperature, _LEAST_TEMPERATURE))
        keys = [noise_key(seed, position) for seed in sample.seeds]
        token_ids = (
            race_of_all(scaled_V.exp(), keys) if filters_nothing(params) else race(*kept(scaled_V, params), keys)
        )
    return tuple(
        Draw(
            token_ids=(id_,),
            logprobs=() if params.logprobs is None else (logprob_of(logits_V, id_, params.logprobs),),
        )
        for id_ in token_ids
    )


def kept(scaled_V: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The weights of the ids that all filters keep, and those ids: all of them are sorted."""
    value_V, id_V = scaled_V.sort(descending=True, stable=True)
    weight_V = value_V.exp().double()
    total = float(scaled_V.exp().sum(dtype=torch.float64))
    cut = _LOWEST
    if params.top_k is not None:
        cut = max(cut, float(value_V[min(params.top_k, len(value_V)) - 1]))
        weight_V = torch.where(value_V >= cut, weight_V, 0.0)
        total = float(weight_V.sum())
    if params.top_p < 1.0:
        before_V = weight_V.cumsum(dim=0) - weight_V
        n_needed = int((before_V < params.top_p * total).sum())
        cut = max(cut, float(value_V[n_needed - 1]))
    if params.min_p > 0.0:
        cut = max(cut, float(torch.tensor(math.log(params.min_p))))
    is_kept_V = value_V >= cut
    return weight_V[is_kept_V], id_V[is_kept_V]


def race(weight_K: Tensor, id_K: Tensor, keys: Sequence[int]) -> list[int]:
    """The id that wins under each key."""
    winner_N = (exponential(torch.tensor(keys)[:, None], id_K) / weight_K.double()).argmin(dim=-1)
    return id_K[winner_N].tolist()


def race_of_all(weight_V: Tensor, keys: Sequence[int]) -> list[int]:
    """As `race` with the ids 0, 1, …, V - 1, in two rounds."""
    weight_BC = functional.pad(weight_V, (0, -len(weight_V) % _BLOCK)).view(-1, _BLOCK).double()
    winners = []
    for key in keys:
        counter_B = -1 - torch.arange(len(weight_BC))
        (counter,) = race(weight_BC.sum(dim=-1), counter_B, [key])
        block = -1 - counter
        winners += race(weight_BC[block], block * _BLOCK + torch.arange(_BLOCK), [key])
    return winners


def logprob_of(logits_V: Tensor, token_id: int, n_top: int) -> TokenLogprob:
    """By a sort of the whole row."""
    logprob_V, id_V = torch.log_softmax(logits_V.double(), dim=-1).sort(descending=True, stable=True)
    ids = id_V.tolist()
    rank = ids.index(token_id)
    return TokenLogprob(
        logprob=float(logprob_V[rank]),
        rank=rank + 1,
        top=tuple(zip(ids[:n_top], logprob_V[:n_top].tolist(), strict=True)),
    )
