"""Weights of matrix products in the order in which the tiles of `tile.py` read them.

Columns are cut into panels of C, the width of a tile; a panel's numbers stand in the order of the steps, so that a
product reads its memory from front to back:

    float32   [panels, I, C]
    bfloat16  [panels, I / 2, C, 2]: two inputs of a column side by side, rounded to nearest, halves to even
    int8      [panels, I / 4, C, 4]: four inputs of a column side by side, with a float32 scale per column

Inputs and columns are filled up with zeros. In a gated weight the first half of each panel are columns of the gate
and the second half those of up, so that a tile holds both and can finish the activation.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from bakehouse_kernels.cpu.tile import SHAPE

WeightFormat = Literal["float32", "bfloat16", "int8"]

COLUMNS = SHAPE.columns

# The largest integer that an int8 weight or activation takes; -128 is left out, so that both signs are alike.
LARGEST = 127

# Activations go into the products as `q + ZERO`, which is never negative, as the instruction wants it.
ZERO = 128

# The int32 sums of a product hold up to this many inputs.
MAX_QUANTISED_INPUTS = (2**31 - 1) // (LARGEST * LARGEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight `[I, O]` in panels; `gated`: of gate and up of O features each."""

    n_in: int
    n_out: int
    gated: bool
    format: WeightFormat
    panels: Tensor
    # Of int8 panels, per column; otherwise empty.
    scale: NDArray[np.float32]
    # `ZERO` times the column's sum of integers: what the products have too much.
    surplus: NDArray[np.int32]


def pack(weight_IO: Tensor, weight_format: WeightFormat) -> PackedWeight:
    """The weight in panels."""
    n_out = weight_IO.shape[1]
    return _pack(_filled(weight_IO, _round_up(n_out, COLUMNS)), n_out, gated=False, weight_format=weight_format)


def pack_gated(weight_EF2: Tensor, weight_format: WeightFormat) -> PackedWeight:
    """The fused weight of gate and up in panels."""
    assert weight_EF2.shape[1] % 2 == 0, f"gate and up have as many columns, not {weight_EF2.shape[1]} together"
    half = COLUMNS // 2
    n_in, n_features = weight_EF2.shape[0], weight_EF2.shape[1] // 2
    gate, up = (
        _filled(part, _round_up(n_features, half)).reshape(n_in, -1, half) for part in weight_EF2.chunk(2, dim=1)
    )
    return _pack(torch.stack((gate, up), dim=2).flatten(1), n_features, gated=True, weight_format=weight_format)


def packed_bytes(n_in: int, n_out: int, weight_format: WeightFormat, *, gated: bool = False) -> int:
    """Memory of a packed weight `[n_in, n_out]`; of a gated one `n_out` counts gate and up together."""
    parts, width = (2, COLUMNS // 2) if gated else (1, COLUMNS)
    n_columns = parts * _round_up(n_out // parts, width)
    if weight_format == "float32":
        return n_columns * n_in * 4
    if weight_format == "bfloat16":
        return n_columns * _round_up(n_in, 2) * 2
    return n_columns * (_round_up(n_in, 4) + 8)


def _pack(weight_IO: Tensor, n_out: int, *, gated: bool, weight_format: WeightFormat) -> PackedWeight:
    """The columns of `weight` are whole panels."""
    n_in = len(weight_IO)
    assert n_in > 0, "a weight has at least one input"
    scale, surplus = np.empty(0, np.float32), np.empty(0, np.int32)
    if weight_format == "float32":
        # A copy always: a mapped file's memory, which `contiguous` leaves as it is, is not aligned to a vector.
        in_order = weight_IO.float().reshape(n_in, -1, COLUMNS).transpose(0, 1)
        panels = in_order.clone(memory_format=torch.contiguous_format)
    elif weight_format == "bfloat16":
        panels = _in_panels(weight_IO.bfloat16(), inputs_a_step=2)
    else:
        assert n_in <= MAX_QUANTISED_INPUTS, f"{n_in} inputs overflow int32; {MAX_QUANTISED_INPUTS} do not"
        integers_IO, scale_O = quantise_columns(weight_IO)
        panels = _in_panels(integers_IO, inputs_a_step=4)
        scale = scale_O.numpy()
        surplus = (integers_IO.sum(dim=0, dtype=torch.int32) * ZERO).numpy()
    return PackedWeight(
        n_in=n_in,
        n_out=n_out,
        gated=gated,
        format=weight_format,
        panels=panels,
        scale=scale,
        surplus=surplus,
    )


def _in_panels(weight_IO: Tensor, *, inputs_a_step: int) -> Tensor:
    """`[panels, steps, C, inputs_a_step]`."""
    filled = functional.pad(weight_IO, (0, 0, 0, -len(weight_IO) % inputs_a_step))
    steps = filled.view(-1, inputs_a_step, weight_IO.shape[1] // COLUMNS, COLUMNS)
    return steps.permute(2, 0, 3, 1).contiguous()


def quantise_columns(weight_IO: Tensor) -> tuple[Tensor, Tensor]:
    """Int8 weights and the float32 scale of each column: `weight ≈ integers * scale`, halves rounded to even.

    A column of zeros has scale 0. A column with a NaN or an infinity has such a scale, which its results show.
    """
    weight_IO = weight_IO.float()
    scale_O = weight_IO.abs().amax(dim=0) / LARGEST
    ratio_IO = (weight_IO / scale_O).nan_to_num(nan=0.0)
    return ratio_IO.round().clamp(-LARGEST, LARGEST).to(torch.int8), scale_O


def _filled(weight_IO: Tensor, n_columns: int) -> Tensor:
    """With columns of zeros at the end."""
    n_missing = n_columns - weight_IO.shape[1]
    return functional.pad(weight_IO, (0, n_missing)) if n_missing else weight_IO


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
