"""Root-mean-square norm of rows.

    out = x / sqrt(mean(x²) + eps) * weight

Zhang, Sennrich 2019, Root Mean Square Layer Normalization (arXiv 1910.07467). Shape legend in `layout`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bakehouse_kernels.triton.launch import device_class_of, launch_of, start_kernel


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """The norm of each row in the dtype of `x`, computed in float32; `[T, E]`. See `api.Ops.rms_norm`."""
    n_rows, width = x_TE.shape
    assert weight_E.shape == (width,), f"weight {tuple(weight_E.shape)} for rows of {width}"
    assert x_TE.stride(1) == 1, "rows that lie together"
    out_TE = torch.empty((n_rows, width), dtype=x_TE.dtype, device=x_TE.device)
    if n_rows == 0:
        return out_TE
    launch = launch_of("rms_norm", device_class_of(x_TE.device), width=width)
    start_kernel(
        _rms_norm,
        (n_rows,),
        x_TE,
        weight_E,
        out_TE,
        x_TE.stride(0),
        eps,
        WIDTH=width,
        WIDTH_PAD=triton.next_power_of_2(width),
        **launch.options,
    )
    return out_TE


@triton.jit
def _rms_norm(
    x,
    weight,
    out,
    x_stride,
    eps,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    """A program for each row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PAD)
    inside = column < WIDTH
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    mean_square = tl.sum(value * value) / WIDTH
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normed = value / tl.sqrt(mean_square + eps) * gain
    tl.store(out + row * WIDTH + column, normed.to(out.dtype.element_ty), mask=inside)
