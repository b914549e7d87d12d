"""The norm against its definition."""

import pytest
import torch
from bakehouse_kernels.reference import ReferenceOps
from bakehouse_kernels.triton.rms_norm import rms_norm

from tests.kernels.triton.conftest import Close

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_rows", "width"), [(0, 8), (1, 1), (1, 576), (5, 123), (3, 128), (2, 1031)])
def test_a_norm_is_its_definition(
    close: Close, generator: torch.Generator, n_rows: int, width: int, dtype: torch.dtype
) -> None:
    x = (torch.randn(n_rows, width, generator=generator) * 3).to(dtype)
    weight = torch.randn(width, generator=generator).to(dtype)
    before = x.clone()
    close(rms_norm(x, weight, 1e-5), ReferenceOps().rms_norm(x, weight, 1e-5))
    assert x.equal(before)


def test_rows_may_lie_apart_and_a_nan_stays_in_its_row(close: Close, generator: torch.Generator) -> None:
    wide = torch.full((4, 60), torch.nan)
    wide[:, 7:40] = torch.randn(4, 33, generator=generator)
    x = wide[:, 7:40]
    x[2, 5] = torch.nan
    weight = torch.ones(33)
    found = rms_norm(x, weight, 1e-5)
    close(found, ReferenceOps().rms_norm(x, weight, 1e-5))
    assert found.isnan().any(dim=1).tolist() == [False, False, True, False]


def test_a_row_of_zeros_is_zero() -> None:
    assert rms_norm(torch.zeros(1, 9), torch.ones(9), 1e-5).eq(0).all()
