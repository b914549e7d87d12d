"""Root-mean-square norm, row by row."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bakehouse_kernels.cpu.calls import Cells, Kernel, Words, noting
from bakehouse_kernels.cpu.compile import compiled
from bakehouse_kernels.cpu.pool import shared, take
from bakehouse_kernels.cpu.recording import Caller
from bakehouse_kernels.cpu.row_loops import FLOAT_BYTES, scale_row_by, square_sum

# Some 10 µs of work, at which a second thread gains more than it costs.
MIN_SHARED_NUMBERS = 32_768

_TURN = 16  # rows that a thread takes at a time


class _Norm(NamedTuple):
    """Addresses and numbers."""

    x: int
    n_rows: int
    width: int
    weight: int
    eps: np.float32
    out: int


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
def _norm_some_rows(call: _Norm, taken: NDArray[np.int64]) -> None:
    """Rows as long as there are any."""
    first = take(taken, _TURN)
    while first < call.n_rows:
        for t in range(first, min(first + _TURN, call.n_rows)):
            row, out = call.x + t * call.width * FLOAT_BYTES, call.out + t * call.width * FLOAT_BYTES
            mean = square_sum(row, call.width) / np.float32(call.width)
            scale_row_by(row, call.width, np.float32(1) / np.sqrt(mean + call.eps), call.weight, out)
        first = take(taken, _TURN)


_share_rows = shared(_norm_some_rows)


@compiled(exact=True)
def _norm(cells: Cells, x: int, n_rows: int, width: int, weight: int, eps: float, out: int) -> None:
    _share_rows(cells, _Norm(x, n_rows, width, weight, np.float32(eps), out), np.zeros(1, np.int64))


_note = noting(_norm)


@compiled(exact=True)
def _note_norm(
    cells: Cells, x: int, n_rows: int, width: int, weight: int, eps: float, out: int
) -> tuple[int, Words]:
    return _note((cells, x, n_rows, width, weight, eps, out))


_NORM = Kernel(_norm, _note_norm)
