"""Gated activations of a feed-forward network: gate and up side by side, one of the two through a non-linearity.

    out = silu(gate) * up,   silu(x) = x * sigmoid(x)
    out = gelu(gate) * up,   gelu(x) = x / 2 * (1 + tanh(y)) = x * sigmoid(2y),  y = sqrt(2/π) * (x + 0.044715 x³)

Shazeer 2020, GLU Variants Improve Transformer (arXiv 2002.05202); Hendrycks, Gimpel 2016, Gaussian Error Linear
Units (arXiv 1606.08415). Shape legend in `layout`.
"""

import math
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from bakehouse_kernels.triton.launch import device_class_of, launch_of, start_kernel

Activation = Literal["silu", "gelu"]

_TWICE_ROOT: tl.constexpr = tl.constexpr(2 * math.sqrt(2 / math.pi))


def gated(gate_up_TF2: Tensor, activation: Activation = "silu") -> Tensor:
    """The activation of the first half of the columns times the second, computed in float32; `[T, F]`."""
    n_rows, width = gate_up_TF2.shape[0], gate_up_TF2.shape[1] // 2
    assert gate_up_TF2.shape[1] == 2 * width, f"{gate_up_TF2.shape[1]} columns have no halves"
    assert gate_up_TF2.stride(1) == 1, "rows that lie together"
    out_TF = torch.empty((n_rows, width), dtype=gate_up_TF2.dtype, device=gate_up_TF2.device)
    if n_rows == 0:
        return out_TF
    launch = launch_of("activation", device_class_of(gate_up_TF2.device))
    grid = (n_rows, triton.cdiv(width, launch.tiles["BLOCK"]))
    is_gelu = activation == "gelu"
    start_kernel(
        _gated, grid, gate_up_TF2, out_TF, gate_up_TF2.stride(0), width, IS_GELU=is_gelu, **launch.options
    )
    return out_TF


@triton.jit
def _gated(gate_up, out, stride, width, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    """A program for each row and BLOCK of its columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + column, mask=inside, other=0.0).to(tl.float32)
    turn = _TWICE_ROOT * (gate + 0.044715 * gate * gate * gate) if IS_GELU else gate
    result = gate * tl.sigmoid(turn) * up
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)
