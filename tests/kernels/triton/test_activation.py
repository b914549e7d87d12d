"""Gated activations against torch's own."""

import pytest
import torch
from bakehouse_kernels.triton.activation import Activation, gated
from torch.nn import functional

from tests.kernels.triton.conftest import Close


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize(("n_rows", "width"), [(0, 4), (1, 1), (3, 64), (2, 131)])
def test_a_gate_is_torchs_activation_times_up(
    close: Close, generator: torch.Generator, n_rows: int, width: int, activation: Activation, dtype: torch.dtype
) -> None:
    gate_up = (torch.randn(n_rows, 2 * width, generator=generator) * 4).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=1)
    through = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    close(gated(gate_up, activation), (through * up).to(dtype))


@pytest.mark.parametrize(("gate", "expected"), [(-1e4, 0.0), (1e4, 2e4), (0.0, 0.0)])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning"
)  # numpy's exponential, in the interpreter
def test_extreme_gates_are_closed_or_open(gate: float, expected: float, activation: Activation) -> None:
    assert gated(torch.tensor([[gate, 2.0]]), activation).item() == expected


def test_rows_may_lie_apart(close: Close, generator: torch.Generator) -> None:
    wide = torch.full((3, 30), torch.nan)
    wide[:, 4:14] = torch.randn(3, 10, generator=generator)
    gate, up = wide[:, 4:14].chunk(2, dim=1)
    close(gated(wide[:, 4:14]), functional.silu(gate) * up)
