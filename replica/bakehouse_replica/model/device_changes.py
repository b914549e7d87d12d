"""What penalties, biases and bans change in rows of logits, as places that a device reads.

The same arithmetic as `adjust`, which see for the order, to the bit. A ban is a bias of -inf. What does not come
down to a few places of a row, masks of the whole vocabulary, stays the host's.

Shape legend: R rows of logits, C places that change.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from bakehouse_kernels.layout import LogitChanges
from numpy.typing import NDArray

from bakehouse_replica.core.types import Sample
from bakehouse_replica.model.adjust import banned_ids, biases, changes_logits
from bakehouse_replica.model.constraint import Constraint

_WORD = np.int32  # one array of such words, all of it sent at once


def is_for_device(sample: Sample, constraint: Constraint | None, n_vocabulary: int) -> bool:
    """Whether the device can draw by itself: one token and nothing else, from a row that keeps some tokens."""
    params = sample.params
    return (
        len(sample.seeds) == 1
        and constraint is None
        and params.logprobs is None
        and params.allowed_token_ids is None
        and len(params.stop_token_ids) + len(params.bad_words_ids) < n_vocabulary
    )


def changes_of(rows: Sequence[tuple[int, Sample]], n_rows: int, device: torch.device) -> LogitChanges | None:
    """What samples change in their rows, of `n_rows`, on its way to the device; None where nothing changes.

    Each row stands there once at most.
    """
    changing = [(row, sample) for row, sample in rows if changes_logits(sample)]
    if not changing:
        return None
    places = [_places_of(row, sample) for row, sample in changing]
    penalty_3R = np.zeros((3, n_rows), np.float32)
    penalty_3R[0] = 1.0
    for row, sample in changing:
        params = sample.params
        penalty_3R[:, row] = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    parts = [
        *(np.concatenate([getattr(one, name) for one in places]).view(_WORD) for name in _Places.__slots__),
        *penalty_3R.view(_WORD),
    ]
    words = torch.from_numpy(np.concatenate(parts))
    if device.type == "cuda":
        words = words.pin_memory()  # torch keeps that memory until the copy has ended
    sent, lengths = words.to(device, non_blocking=True), [len(part) for part in parts]
    row_C, id_C, is_seen_C, count_C, bias_C, repetition_R, presence_R, frequency_R = torch.split(sent, lengths)
    return LogitChanges(
        repetition_R=repetition_R.view(torch.float32),
        presence_R=presence_R.view(torch.float32),
        frequency_R=frequency_R.view(torch.float32),
        row_C=row_C,
        id_C=id_C,
        is_seen_C=is_seen_C != 0,
        count_C=count_C,
        bias_C=bias_C.view(torch.float32),
    )


@dataclass(frozen=True, slots=True)
class _Places:
    """Of one row; see `LogitChanges`."""

    row_C: NDArray[np.int32]
    id_C: NDArray[np.int32]
    is_seen_C: NDArray[np.int32]
    count_C: NDArray[np.int32]
    bias_C: NDArray[np.float32]


def _places_of(row: int, sample: Sample) -> _Places:
    params = sample.params
    bias = biases(params) | dict.fromkeys(banned_ids(sample), -math.inf)
    has_counts = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    has_seen = params.repetition_penalty != 1.0
    seen = np.array((*sample.prompt_ids, *sample.output_ids) if has_seen else (), _WORD)
    counted = np.array(sample.output_ids if has_counts else (), _WORD)
    biased = np.array(tuple(bias), _WORD)
    id_C = np.unique(np.concatenate((seen, counted, biased)))
    is_seen_C, bias_C = np.zeros(len(id_C), _WORD), np.zeros(len(id_C), np.float32)
    is_seen_C[np.searchsorted(id_C, seen)] = 1
    bias_C[np.searchsorted(id_C, biased)] = np.array(tuple(bias.values()), np.float32)
    count_C = np.bincount(np.searchsorted(id_C, counted), minlength=len(id_C)).astype(_WORD)
    return _Places(np.full(len(id_C), row, _WORD), id_C, is_seen_C, count_C, bias_C)
