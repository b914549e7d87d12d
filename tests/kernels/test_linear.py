"""The packed product against its definition."""

import pytest
import torch
from bakehouse_kernels.cpu.linear import linear, pack
from bakehouse_kernels.reference import ReferenceOps

# float32 sums of up to 1536 products of standard normals: a few hundred roundings of about 1e-7 relative.
TOLERANCE = 1e-3


@pytest.mark.parametrize("n_rows", [0, 1, 2, 7, 8, 32, 33, 257])
@pytest.mark.parametrize(("n_in", "n_out"), [(1, 1), (576, 960), (1536, 576), (13, 97)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_product_is_the_product(n_rows: int, n_in: int, n_out: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(n_rows * 7919 + n_in)
    x_TI = torch.randn(n_rows, n_in, generator=generator)
    weight_IO = torch.randn(n_in, n_out, generator=generator)
    bias_O = torch.randn(n_out, generator=generator) if has_bias else None
    found = linear(x_TI, pack(weight_IO), bias_O)
    reference = ReferenceOps()
    wanted = reference.linear(x_TI, reference.pack(weight_IO), bias_O)
    assert found.shape == wanted.shape
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


def test_a_transposed_weight_is_packed_by_its_values_not_its_memory() -> None:
    weight_OI = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    x_TI = torch.eye(3)
    torch.testing.assert_close(linear(x_TI, pack(weight_OI.t())), weight_OI.t())


def test_packing_leaves_the_weight_as_it_was() -> None:
    weight_IO = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    before = weight_IO.clone()
    pack(weight_IO)
    assert torch.equal(weight_IO, before)


def test_a_weight_that_could_not_be_packed_is_used_as_it_is() -> None:
    x_TI, weight_IO, bias_O = torch.randn(2, 3), torch.randn(3, 4), torch.randn(4)
    torch.testing.assert_close(linear(x_TI, weight_IO, bias_O), x_TI @ weight_IO + bias_O)
