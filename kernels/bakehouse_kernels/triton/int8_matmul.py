"""Products of rows and weights that are both rounded to 8 bits, with exact integer sums.

    x8[t, i] = round(x[t, i] * 127 / max|x[t]|)         out[t, o] = (Σ_i x8[t, i] w8[i, o]) * (s[t] s[o]) + bias[o]

Weights have a scale per column, rows one of their own (Dettmers et al. 2022, LLM.int8(), arXiv 2208.07339, vector-
wise quantisation). Results have the bits of `reference.QuantisedReferenceOps`. Shape legend in `layout`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bakehouse_kernels.triton.launch import device_class_of, launch_of, start_kernel

_MAX_INPUTS = (1 << 31) // (127 * 127)  # beyond, sums leave 32 bits
_ROUNDER: tl.constexpr = tl.constexpr(1.5 * 2.0**23)  # added and taken away, it leaves the nearest integer
_LEAST: tl.constexpr = tl.constexpr(2.0**-119)  # 127 over less is infinite, or nearly


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Weight:
    """A weight of I inputs and O outputs: `integers_OI` (int8), its columns as rows, and `scale_O` (float32)."""

    integers_OI: Tensor
    scale_O: Tensor


def quantised(weight_IO: Tensor) -> Int8Weight:
    """The weight rounded per column to -127..127, halves to even; a copy."""
    assert weight_IO.shape[0] <= _MAX_INPUTS, f"{weight_IO.shape[0]} inputs; sums are exact up to {_MAX_INPUTS}"
    weight_IO = weight_IO.float()
    scale_O = weight_IO.abs().amax(dim=0) / 127
    integers_IO = torch.where(scale_O == 0, 0.0, weight_IO / scale_O).round()
    return Int8Weight(integers_OI=integers_IO.to(torch.int8).t().contiguous(), scale_O=scale_O)


def int8_matmul(
    x_TI: Tensor, weight: Int8Weight, bias_O: Tensor | None = None, added_to_TO: Tensor | None = None
) -> Tensor:
    """`x @ weight + bias` in the dtype of `x`, `[T, O]`; or that added to a tensor, which is returned."""
    (n_rows, n_inputs), n_outputs = x_TI.shape, weight.scale_O.shape[0]
    assert n_inputs == weight.integers_OI.shape[1], f"{n_inputs} inputs, not {weight.integers_OI.shape[1]}"
    if added_to_TO is None:
        out_TO = torch.empty((n_rows, n_outputs), dtype=x_TI.dtype, device=x_TI.device)
    else:
        out_TO = added_to_TO
    assert out_TO.shape == (n_rows, n_outputs), f"{tuple(out_TO.shape)} is added to"
    assert out_TO.stride(1) == 1, "rows that lie together"
    if n_rows == 0:
        return out_TO
    integers_TI, scale_T = quantised_rows(x_TI)
    launch = launch_of("int8_matmul", device_class_of(x_TI.device), rows=n_rows)
    grid = (triton.cdiv(n_rows, launch.tiles["BLOCK_M"]), triton.cdiv(n_outputs, launch.tiles["BLOCK_N"]))
    start_kernel(
        _int8_matmul,
        grid,
        integers_TI,
        scale_T,
        weight.integers_OI,
        weight.scale_O,
        weight.scale_O if bias_O is None else bias_O,
        out_TO,
        n_rows,
        n_outputs,
        n_inputs,
        out_TO.stride(0),
        HAS_BIAS=bias_O is not None,
        ADDS=added_to_TO is not None,
        enable_fp_fusion=False,
        **launch.options,
    )
    return out_TO


def quantised_rows(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Each row rounded with its own scale: int8 `[T, I]`, and the scales, float32 `[T]`.

    One that holds a NaN or an infinity has the scale NaN, and one below 2^-119 counts as zero.
    """
    n_rows, width = x_TI.shape
    assert x_TI.stride(1) == 1, "rows that lie together"
    integers_TI = torch.empty((n_rows, width), dtype=torch.int8, device=x_TI.device)
    scale_T = torch.empty(n_rows, dtype=torch.float32, device=x_TI.device)
    launch = launch_of("quantise_rows", device_class_of(x_TI.device), width=width)
    start_kernel(
        _quantise_rows,
        (n_rows,),
        x_TI,
        integers_TI,
        scale_T,
        x_TI.stride(0),
        width,
        WIDTH_PAD=triton.next_power_of_2(width),
        enable_fp_fusion=False,
        **launch.options,
    )
    return integers_TI, scale_T


@triton.jit
def _quantise_rows(x, integers, scales, stride, width, WIDTH_PAD: tl.constexpr):
    """A program for each row. Products and sums are rounded one by one: fused ones round halves elsewhere."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PAD)
    inside = column < width
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    is_number = value == value
    largest = tl.max(tl.where(is_number, tl.abs(value), 0.0))
    is_broken = (tl.min(is_number.to(tl.int32)) == 0) | (largest == float("inf"))
    factor = tl.where(largest > _LEAST, tl.div_rn(127.0, tl.maximum(largest, _LEAST)), 0.0)
    rounded = value * factor + _ROUNDER - _ROUNDER
    rounded = tl.where(rounded == rounded, rounded, 0.0)
    tl.store(integers + row * width + column, rounded.to(tl.int8), mask=inside)
    tl.store(scales + row, tl.where(is_broken, float("nan"), tl.div_rn(largest, 127.0)))


@triton.jit(do_not_specialize=["n_rows"])
def _int8_matmul(
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    out,
    n_rows,
    n_outputs,
    n_inputs,
    out_stride,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A program for each tile of the result. Programs side by side share columns, so a weight is read once."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < n_rows, column < n_outputs
    step = tl.arange(0, BLOCK_K)
    rows = x + row.to(tl.int64)[:, None] * n_inputs + step[None, :]
    columns = weight + column.to(tl.int64)[None, :] * n_inputs + step[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for begin in range(0, n_inputs, BLOCK_K):
        is_input = step < n_inputs - begin
        rows_tile = tl.load(rows + begin, mask=is_row[:, None] & is_input[None, :], other=0)
        columns_tile = tl.load(columns + begin, mask=is_column[None, :] & is_input[:, None], other=0)
        sums = tl.dot(rows_tile, columns_tile, acc=sums, out_dtype=tl.int32)
    row_scale = tl.load(x_scale + row, mask=is_row, other=0.0)
    column_scale = tl.load(weight_scale + column, mask=is_column, other=0.0)
    result = sums.to(tl.float32) * (row_scale[:, None] * column_scale[None, :])
    if HAS_BIAS:
        result += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    target = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    inside = is_row[:, None] & is_column[None, :]
    if ADDS:
        result += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, result.to(out.dtype.element_ty), mask=inside)
