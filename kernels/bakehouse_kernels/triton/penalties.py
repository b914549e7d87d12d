"""Penalties and biases on some logits of each row, listed sparsely.

    seen:       x = x / repetition if x > 0 else x * repetition       (Keskar et al. 2019, CTRL, arXiv 1909.05858)
    in output:  x = x - (presence + frequency * count)
    all:        x = x + bias

Results have the bits of `reference_draw.adjust`. Shape legend: R rows, V vocabulary, C places.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bakehouse_kernels.layout import LogitChanges
from bakehouse_kernels.triton.launch import device_class_of, launch_of, start_kernel


def adjust(logits_RV: Tensor, changes: LogitChanges) -> None:
    """Penalise and bias some logits; modifies them. See `api.Ops.adjust`."""
    assert logits_RV.dtype == torch.float32, f"logits of {logits_RV.dtype}"
    assert logits_RV.stride(1) == 1, "rows that lie together"
    n_places = changes.row_C.shape[0]
    if n_places == 0:
        return
    launch = launch_of("adjust", device_class_of(logits_RV.device))
    start_kernel(
        _adjust,
        (triton.cdiv(n_places, launch.tiles["BLOCK"]),),
        logits_RV,
        changes.repetition_R,
        changes.presence_R,
        changes.frequency_R,
        changes.row_C,
        changes.id_C,
        changes.is_seen_C,
        changes.count_C,
        changes.bias_C,
        logits_RV.stride(0),
        n_places,
        enable_fp_fusion=False,
        **launch.options,
    )


_STAGED = ["repetition", "presence", "frequency", "row", "id", "is_seen", "count", "bias", "n_places"]


@triton.jit(do_not_specialize=_STAGED)
def _adjust(
    logits, repetition, presence, frequency, row, id, is_seen, count, bias, stride, n_places, BLOCK: tl.constexpr
):
    """A program for BLOCK places, whatever rows they are in."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n_places
    rows = tl.load(row + place, mask=inside, other=0).to(tl.int64)
    target = logits + rows * stride + tl.load(id + place, mask=inside, other=0)
    value = tl.load(target, mask=inside, other=0.0)
    factor = tl.load(repetition + rows, mask=inside, other=1.0)
    penalised = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
    value = tl.where(tl.load(is_seen + place, mask=inside, other=0) != 0, penalised, value)
    times = tl.load(count + place, mask=inside, other=0)
    per_time = tl.load(frequency + rows, mask=inside, other=0.0)
    less = tl.load(presence + rows, mask=inside, other=0.0) + per_time * times.to(tl.float32)
    value = tl.where(times > 0, value - less, value)
    tl.store(target, value + tl.load(bias + place, mask=inside, other=0.0), mask=inside)
