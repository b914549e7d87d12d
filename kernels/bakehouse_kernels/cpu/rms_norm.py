"""Root-mean-square norm, row by row."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bakehouse_kernels.cpu.addresses import float32_rows
from bakehouse_kernels.cpu.calls import Cells, Kernel, Words, noting
from bakehouse_kernels.cpu.compile import compiled
from bakehouse_kernels.cpu.pool import shared, take
from bakehouse_kernels.cpu.recording import Caller

Floats = NDArray[np.float32]

# Some 10 µs of work, at which a second thread gains more than it costs.
MIN_SHARED_NUMBERS = 32_768

_LANES = 16
_TURN = 16  # rows that a thread takes at a time


class _Norm(NamedTuple):
    taken: NDArray[np.int64]
    x_TE: Floats
    weight_E: Floats
    eps: np.float32
    out_TE: Floats


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float, crew: Caller) -> Tensor:
    """`x / sqrt(mean(x²) + eps) * weight`; `[T, E]`."""
    n_rows, width = x_TE.shape
    assert weight_E.shape == (width,), f"weight {tuple(weight_E.shape)} for rows of {width}"
    x_TE = x_TE.contiguous()
    out_TE = crew.empty(n_rows, width)
    arguments = (x_TE.data_ptr(), n_rows, width, weight_E.contiguous().data_ptr(), eps, out_TE.data_ptr())
    run = crew.run if n_rows * width >= MIN_SHARED_NUMBERS else crew.run_alone
    run(_NORM, *arguments)
    return out_TE


@compiled(exact=True)
def _square_sum(x_E: Floats, lane: Floats) -> np.float32:
    """In `_LANES` sums side by side, so that it compiles to vectors and yet has one order of additions."""
    n_even = len(x_E) // _LANES * _LANES
    lane[:] = 0
    for first in range(0, n_even, _LANES):
        part = x_E[first : first + _LANES]
        for i in range(_LANES):
            lane[i] += part[i] * part[i]
    for i in range(len(x_E) - n_even):
        lane[i] += x_E[n_even + i] * x_E[n_even + i]
    total = np.float32(0)
    for i in range(_LANES):
        total += lane[i]
    return total


@compiled(exact=True)
def _norm_row(x_E: Floats, weight_E: Floats, inverse: np.float32, out_E: Floats) -> None:
    for e in range(len(x_E)):
        out_E[e] = x_E[e] * inverse * weight_E[e]


@compiled(exact=True)
def _norm_some_rows(call: _Norm) -> None:
    """Rows as long as there are any."""
    x_TE, out_TE, lane = call.x_TE, call.out_TE, np.empty(_LANES, np.float32)
    n_rows, width = x_TE.shape
    first = take(call.taken, _TURN)
    while first < n_rows:
        for t in range(first, min(first + _TURN, n_rows)):
            mean = _square_sum(x_TE[t], lane) / np.float32(width)
            _norm_row(x_TE[t], call.weight_E, np.float32(1) / np.sqrt(mean + call.eps), out_TE[t])
        first = take(call.taken, _TURN)


_share_rows = shared(_norm_some_rows)


@compiled(exact=True)
def _norm(cells: Cells, x: int, n_rows: int, width: int, weight: int, eps: float, out: int) -> None:
    x_TE, out_TE = float32_rows(x, n_rows, width), float32_rows(out, n_rows, width)
    weight_E = float32_rows(weight, 1, width)[0]
    _share_rows(cells, _Norm(np.zeros(1, np.int64), x_TE, weight_E, np.float32(eps), out_TE))


_note = noting(_norm)


@compiled(exact=True)
def _note_norm(
    cells: Cells, x: int, n_rows: int, width: int, weight: int, eps: float, out: int
) -> tuple[int, Words]:
    return _note((cells, x, n_rows, width, weight, eps, out))


_NORM = Kernel(_norm, _note_norm)
