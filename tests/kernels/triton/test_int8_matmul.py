"""Products in 8 bits: the bits of their definition."""

import pytest
import torch
from bakehouse_kernels.reference import QuantisedReferenceOps
from bakehouse_kernels.triton.int8_matmul import int8_matmul, quantised, quantised_rows

from tests.kernels.triton.conftest import Close

SHAPES = [(0, 5, 3), (1, 1, 1), (1, 64, 33), (5, 37, 16), (16, 32, 64), (17, 129, 7), (40, 70, 45)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n_rows", "n_inputs", "n_outputs"), SHAPES)
def test_a_product_has_the_bits_of_its_definition(
    close: Close, generator: torch.Generator, n_rows: int, n_inputs: int, n_outputs: int, dtype: torch.dtype
) -> None:
    ops = QuantisedReferenceOps()
    x = (torch.randn(n_rows, n_inputs, generator=generator) * 5).to(dtype)
    weight = torch.randn(n_inputs, n_outputs, generator=generator).to(dtype)
    bias = torch.randn(n_outputs, generator=generator)
    packed, expected = quantised(weight), ops.pack(weight)
    for found, wanted in (
        (int8_matmul(x, packed), ops.linear(x, expected)),
        (int8_matmul(x, packed, bias), ops.linear(x, expected, bias)),
    ):
        close(found, wanted)
        assert dtype == torch.bfloat16 or found.equal(wanted)  # the interpreter cuts bfloat16 off unrounded


def test_a_product_is_added_to_what_stands_there(generator: torch.Generator) -> None:
    ops = QuantisedReferenceOps()
    x, weight = torch.randn(3, 20, generator=generator), torch.randn(20, 9, generator=generator)
    total = torch.randn(3, 9, generator=generator)
    expected = total.clone()
    ops.add_linear(expected, x, ops.pack(weight), torch.ones(9))
    assert int8_matmul(x, quantised(weight), torch.ones(9), total) is total
    assert total.equal(expected)


def test_halves_are_rounded_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5]])
    assert quantised_rows(x)[0].tolist() == [[127, 0, 2, 2, 0, -2, -126]]


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_no_number_yields_nan_and_harms_no_other(generator: torch.Generator, broken: float) -> None:
    x = torch.randn(3, 8, generator=generator)
    weight = quantised(torch.randn(8, 5, generator=generator))
    expected = int8_matmul(x, weight)
    x[1, 3] = broken
    found = int8_matmul(x, weight)
    assert found[1].isnan().all()
    assert found[[0, 2]].equal(expected[[0, 2]])


@pytest.mark.parametrize("scale", [0.0, 2.0**-140, 2.0**-119, 2.0**-118, 2.0**120])
def test_tiny_and_huge_rows_are_as_defined(generator: torch.Generator, scale: float) -> None:
    ops = QuantisedReferenceOps()
    x, weight = torch.randn(2, 8, generator=generator) * scale, torch.randn(8, 5, generator=generator)
    x[0, 0] = scale
    assert int8_matmul(x, quantised(weight)).equal(ops.linear(x, ops.pack(weight)))


def test_the_longest_sums_are_exact() -> None:
    x, weight = torch.ones(1, 14_336), torch.ones(14_336, 2)
    assert int8_matmul(x, quantised(weight)).equal(
        QuantisedReferenceOps().linear(x, QuantisedReferenceOps().pack(weight))
    )
