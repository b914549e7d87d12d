"""Operations under test, and a comparison that says where two tensors differ and by how much."""

from typing import Protocol

import pytest
import torch
from bakehouse_kernels.cpu.ops import CpuOps
from bakehouse_kernels.cpu.pool import n_cores
from bakehouse_kernels.cpu.tile import HAS_HALF
from bakehouse_kernels.reference import ReferenceOps
from torch import Tensor

# Sums of up to 1000 float32 products in another order differ by a few units of 2^-23 of the largest term.
ABSOLUTE, RELATIVE = 5e-6, 2e-5


class Compare(Protocol):
    """Assert that shapes are equal and values close, NaN never."""

    def __call__(self, actual: Tensor, expected: Tensor, absolute: float = ABSOLUTE) -> None: ...


@pytest.fixture(scope="session")
def cpu_ops() -> CpuOps:
    return CpuOps(n_threads=min(2, n_cores()))


@pytest.fixture(scope="session")
def half_ops() -> CpuOps:
    """With keys and values in float16."""
    if not HAS_HALF:
        pytest.skip("this machine has no float16")
    return CpuOps(n_threads=min(2, n_cores()), kv_dtype=torch.float16)


@pytest.fixture(params=["float32", "float16"])
def either_ops(request: pytest.FixtureRequest) -> CpuOps:
    """`cpu_ops`, then `half_ops`."""
    ops = request.getfixturevalue("cpu_ops" if request.param == "float32" else "half_ops")
    assert isinstance(ops, CpuOps)
    return ops


@pytest.fixture(scope="session")
def reference_ops() -> ReferenceOps:
    return ReferenceOps()


@pytest.fixture(scope="session")
def compare() -> Compare:
    def check(actual: Tensor, expected: Tensor, absolute: float = ABSOLUTE) -> None:
        assert actual.shape == expected.shape, f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
        error = (actual - expected).abs()
        wrong = ~(error <= absolute + RELATIVE * expected.abs())  # a NaN counts as wrong
        if wrong.any():
            lines = [
                f"  at {index}: {actual[tuple(index)].item():.9g} instead of {expected[tuple(index)].item():.9g}"
                for index in wrong.nonzero()[:5].tolist()
            ]
            worst = error.nan_to_num(nan=float("inf")).max().item()
            pytest.fail(
                f"{int(wrong.sum())} of {wrong.numel()} differ, worst by {worst:.3g}:\n" + "\n".join(lines)
            )

    return check


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20230612)
