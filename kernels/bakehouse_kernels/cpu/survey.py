"""What drawing from a row of logits needs: a pass over it for the best ids, and a second one for its weights.

The first finds the peak of each span; the best n ids lie in the best n spans by their peaks, so that only those
are looked at again, best first, until no id of the next span can be among them. The second, where there is a
temperature, sums weights in blocks of `SURVEY_BLOCK`, relative to each block's own peak.

Logits are compared as integers in the same order, so that the search for peaks compiles to vector code and a NaN
cannot hide: it lies beyond infinity, on either side.

On one thread a row of 49,152 takes 6 µs for its best id, 26 for the best 64, 48 with the sums as well (AMD EPYC
with AVX-512; whole steps: `python replica/benchmarks/sampling.py`).
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bakehouse_kernels.cpu.calls import Cells
from bakehouse_kernels.cpu.compile import compiled
from bakehouse_kernels.cpu.exponential import exp_of_negative
from bakehouse_kernels.cpu.pool import Crew, shared, take
from bakehouse_kernels.layout import SURVEY_BLOCK, Survey

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Keys = NDArray[np.int64]
Orders = NDArray[np.int32]

SPAN = 64  # ids that share a peak: the best 64 of 49,152 lie in spans that hold a twelfth of them
MIN_SHARED_LOGITS = 200_000  # four rows of 49,152; below, waking another thread costs what it saves

_INFINITY = np.int32(0x7F800000)  # the bits of a float32's
_LEAST_ORDER = np.int32(-(2**31))
_LAST_INDEX = np.int64(2**31 - 1)
_LEAST_KEY = np.int64(-(2**63))


class _Call(NamedTuple):
    """The arguments of one call, as the compiled functions take them."""

    logits_RV: Floats
    temperature_R: Floats
    value_RK: Floats
    id_RK: Keys
    total_R: Doubles
    block_RB: Doubles


def survey(logits_RV: Tensor, temperature_R: Tensor, n_best: int, crew: Crew) -> Survey:
    """The best ids of each row, and its weights summed. See `api.Ops.survey`."""
    n_rows, n_vocabulary = logits_RV.shape
    assert temperature_R.shape == (n_rows,), f"{tuple(temperature_R.shape)} temperatures for {n_rows} rows"
    n_best = min(n_best, n_vocabulary)
    found = Survey(
        value_RK=torch.empty((n_rows, n_best)),
        id_RK=torch.empty((n_rows, n_best), dtype=torch.int64),
        total_R=torch.empty(n_rows, dtype=torch.float64),
        block_RB=torch.empty((n_rows, -(-n_vocabulary // SURVEY_BLOCK)), dtype=torch.float64),
    )
    call = _Call(
        logits_RV.float().contiguous().numpy(),
        temperature_R.float().numpy(),
        found.value_RK.numpy(),
        found.id_RK.numpy(),
        found.total_R.numpy(),
        found.block_RB.numpy(),
    )
    counter = np.zeros(1, np.int64)
    run = crew.run if n_rows > 1 and logits_RV.numel() >= MIN_SHARED_LOGITS else crew.run_alone
    run(_survey, call, counter)
    return found


@compiled()
def _order(bits: np.int32) -> np.int32:
    """Bits of a float32 to an integer that grows with it, and back; both zeros become 0."""
    return bits if bits >= 0 else np.int32(_LEAST_ORDER - bits)


@compiled()
def _value(order: np.int32) -> np.float32:
    value: np.float32 = np.int32(_order(order)).view(np.float32)
    return value


@compiled()
def _key(order: int, index: int) -> np.int64:
    """One number by which the higher logit comes first, of equal ones the smaller index."""
    return np.int64((np.int64(order) << np.int64(32)) | (_LAST_INDEX - np.int64(index)))


@compiled()
def _index(key: np.int64) -> np.int64:
    return np.int64(_LAST_INDEX - (key & _LAST_INDEX))


@compiled()
def _replace_least(heap: Keys, key: np.int64) -> None:
    """Put `key` in the place of the least of a heap, which stands first."""
    n, i = len(heap), 0
    while 2 * i + 1 < n:
        child = 2 * i + 1
        child += int(heap[min(child + 1, n - 1)] < heap[child])  # no branch, which would be a guess each time
        if heap[child] >= key:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = key


@compiled()
def _find_peaks(bits_V: Orders, peaks: Orders) -> bool:
    """Fill the highest order of each span; whether the row is free of NaN."""
    lowest, highest = _INFINITY, _LEAST_ORDER
    for i in range(len(peaks)):
        span, low, peak = bits_V[i * SPAN : (i + 1) * SPAN], _INFINITY, _LEAST_ORDER
        for k in range(len(span)):
            order = _order(span[k])
            if order > peak:
                peak = order
            if order < low:
                low = order
        peaks[i], lowest, highest = peak, min(lowest, low), max(highest, peak)
    return bool(lowest >= -_INFINITY and highest <= _INFINITY)


@compiled()
def _weigh(logits_C: Floats, peak: np.float32, inverse_temperature: np.float32) -> np.float32:
    """The sum of `exp((x - peak) / temperature)` over a block."""
    weight = np.float32(0)
    for c in range(len(logits_C)):
        weight += exp_of_negative((logits_C[c] - peak) * inverse_temperature)
    return weight


@compiled()
def _sum_weights(logits_V: Floats, peaks: Orders, temperature: np.float32, block_B: Doubles) -> float:
    """Fill the weights of blocks relative to the row's highest logit; their sum."""
    spans_a_block = SURVEY_BLOCK // SPAN
    inverse_temperature = np.float32(1) / temperature
    highest = _value(peaks.max())
    total = 0.0
    for b in range(len(block_B)):
        peak = _value(peaks[b * spans_a_block : (b + 1) * spans_a_block].max())
        block_B[b] = 0.0
        if peak > -np.inf:
            weight = _weigh(logits_V[b * SURVEY_BLOCK : (b + 1) * SURVEY_BLOCK], peak, inverse_temperature)
            block_B[b] = weight * math.exp((np.float64(peak) - np.float64(highest)) / np.float64(temperature))
        total += block_B[b]
    return total


@compiled()
def _best_keys(bits_V: Orders, peaks: Orders, n_best: int) -> Keys:
    """The keys of the best ids, in rising order."""
    spans = np.full(min(n_best, len(peaks)), _LEAST_KEY, np.int64)
    for span in range(len(peaks)):
        key = _key(int(peaks[span]), span)
        if key > spans[0]:
            _replace_least(spans, key)
    spans.sort()
    best = np.full(n_best, _LEAST_KEY, np.int64)
    for i in range(len(spans) - 1, -1, -1):
        begin = int(_index(spans[i])) * SPAN
        if _key(int(spans[i] >> np.int64(32)), begin) < best[0]:
            break
        bits = bits_V[begin : begin + SPAN]
        for k in range(len(bits)):
            key = _key(int(_order(bits[k])), begin + k)
            if key > best[0]:
                _replace_least(best, key)
    best.sort()
    return best


@compiled()
def _survey_row(call: _Call, r: int) -> None:
    logits_V = call.logits_RV[r]
    bits_V = logits_V.view(np.int32)
    n_best = call.value_RK.shape[1]
    call.total_R[r] = 0.0
    call.block_RB[r] = 0.0
    peaks = np.empty((len(logits_V) + SPAN - 1) // SPAN, np.int32)
    if not _find_peaks(bits_V, peaks):
        call.value_RK[r] = np.nan
        call.id_RK[r] = 0
        return
    best = _best_keys(bits_V, peaks, n_best)
    for k in range(n_best):
        id_ = _index(best[n_best - 1 - k])
        call.id_RK[r, k] = id_
        call.value_RK[r, k] = logits_V[id_]
    if call.temperature_R[r] > np.float32(0) and abs(call.value_RK[r, 0]) < np.inf:
        call.total_R[r] = _sum_weights(logits_V, peaks, call.temperature_R[r], call.block_RB[r])


@compiled()
def _survey_rows(call: _Call, counter: Keys) -> None:
    """Do rows while there are any."""
    r = take(counter, 1)
    while r < len(call.logits_RV):
        _survey_row(call, r)
        r = take(counter, 1)


_share_rows = shared(_survey_rows)


@compiled()
def _survey(cells: Cells, call: _Call, counter: Keys) -> None:
    _share_rows(cells, call, counter)
