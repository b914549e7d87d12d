"""Norm, rotary embedding and activation against their definitions."""

import pytest
import torch
from bakehouse_kernels.cpu.ops import CpuOps
from bakehouse_kernels.reference import ReferenceOps

from tests.kernels.conftest import Compare

N_ROWS = [0, 1, 2, 13, 64]


@pytest.mark.parametrize("n_rows", N_ROWS)
@pytest.mark.parametrize("width", [1, 7, 64, 576])
def test_rms_norm_equals_its_definition(
    cpu_ops: CpuOps,
    reference_ops: ReferenceOps,
    compare: Compare,
    generator: torch.Generator,
    n_rows: int,
    width: int,
) -> None:
    x = torch.randn(n_rows, width, generator=generator) * 3
    weight = torch.randn(width, generator=generator)
    before = x.clone()
    compare(cpu_ops.rms_norm(x, weight, 1e-5), reference_ops.rms_norm(x, weight, 1e-5))
    assert x.equal(before)


def test_rms_norm_of_zeros_is_zero(cpu_ops: CpuOps) -> None:
    assert cpu_ops.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5).equal(torch.zeros(2, 8))


def test_rms_norm_takes_a_view(
    cpu_ops: CpuOps, reference_ops: ReferenceOps, compare: Compare, generator: torch.Generator
) -> None:
    view = torch.randn(5, 30, generator=generator)[:, 3:20]
    weight = torch.randn(17, generator=generator)
    compare(cpu_ops.rms_norm(view, weight, 1e-6), reference_ops.rms_norm(view, weight, 1e-6))


@pytest.mark.parametrize("n_rows", N_ROWS)
@pytest.mark.parametrize(("n_heads", "head_dim"), [(1, 2), (3, 64), (9, 64), (4, 80), (2, 128)])
def test_rope_of_a_fused_projection_equals_its_definition(
    cpu_ops: CpuOps,
    reference_ops: ReferenceOps,
    compare: Compare,
    generator: torch.Generator,
    n_rows: int,
    n_heads: int,
    head_dim: int,
) -> None:
    fused = torch.randn(n_rows, n_heads * head_dim + 5, generator=generator)
    x = fused[:, 2 : 2 + n_heads * head_dim].view(n_rows, n_heads, head_dim)
    angle = torch.randn(n_rows, head_dim // 2, generator=generator).repeat(1, 2) * 10
    before = fused.clone()
    compare(cpu_ops.rope(x, angle.cos(), angle.sin()), reference_ops.rope(x, angle.cos(), angle.sin()))
    assert fused.equal(before)


def test_rope_at_position_zero_changes_nothing(cpu_ops: CpuOps, generator: torch.Generator) -> None:
    x = torch.randn(3, 2, 64, generator=generator)
    assert cpu_ops.rope(x, torch.ones(3, 64), torch.zeros(3, 64)).equal(x)


@pytest.mark.parametrize("n_rows", N_ROWS)
@pytest.mark.parametrize("width", [1, 7, 1536])
def test_silu_mul_equals_its_definition(
    cpu_ops: CpuOps,
    reference_ops: ReferenceOps,
    compare: Compare,
    generator: torch.Generator,
    n_rows: int,
    width: int,
) -> None:
    gate_up = torch.randn(n_rows, 2 * width, generator=generator) * 5
    before = gate_up.clone()
    compare(cpu_ops.silu_mul(gate_up), reference_ops.silu_mul(gate_up))
    assert gate_up.equal(before)


def test_silu_mul_of_extreme_gates_is_finite_and_right(
    cpu_ops: CpuOps, reference_ops: ReferenceOps, compare: Compare
) -> None:
    gates = torch.tensor([[-1e30, -200.0, -88.0, -0.0, 0.0, 1e-30, 88.0, 1e30]])
    gate_up = torch.cat((gates, torch.ones_like(gates)), dim=1)
    compare(cpu_ops.silu_mul(gate_up), reference_ops.silu_mul(gate_up))


def test_a_nan_reaches_its_own_row_only(cpu_ops: CpuOps) -> None:
    x = torch.ones(3, 8)
    x[1, 2] = float("nan")
    assert cpu_ops.rms_norm(x, torch.ones(8), 1e-5).isnan().any(dim=1).tolist() == [False, True, False]
    assert cpu_ops.silu_mul(x).isnan().any(dim=1).tolist() == [False, True, False]
