"""The norm against its definition."""

import pytest
import torch
from bakehouse_kernels.cpu.ops import CpuOps
from bakehouse_kernels.cpu.rms_norm import MIN_SHARED_NUMBERS
from bakehouse_kernels.reference import ReferenceOps

from tests.kernels.conftest import Compare

N_ROWS = [0, 1, 2, 13, 64, 101]


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


def test_a_row_has_the_same_norm_alone_and_among_so_many_that_threads_share_them(
    cpu_ops: CpuOps, generator: torch.Generator
) -> None:
    x, weight = torch.randn(300, 577, generator=generator), torch.randn(577, generator=generator)
    assert x.numel() > 2 * MIN_SHARED_NUMBERS
    together = cpu_ops.rms_norm(x, weight, 1e-5)
    assert torch.cat([cpu_ops.rms_norm(x[t : t + 1], weight, 1e-5) for t in range(300)]).equal(together)


def test_a_nan_reaches_the_norm_of_its_own_row_only(cpu_ops: CpuOps) -> None:
    x = torch.ones(3, 8)
    x[1, 2] = float("nan")
    assert cpu_ops.rms_norm(x, torch.ones(8), 1e-5).isnan().any(dim=1).tolist() == [False, True, False]
