"""Products with packed weights against their definitions: close in floating point, equal in every bit in int8."""

import pytest
import torch
from bakehouse_kernels.cpu.ops import CpuOps
from bakehouse_kernels.cpu.packing import COLUMNS, PackedWeight, WeightFormat, packed_bytes
from bakehouse_kernels.cpu.pool import n_cores
from bakehouse_kernels.cpu.tile import SHAPE
from bakehouse_kernels.reference import QuantisedReferenceOps, ReferenceOps, RoundedReferenceOps
from torch import Tensor

from tests.kernels.conftest import Compare

# float32 sums of up to 1536 products of standard normals: a few hundred roundings of about 1e-7 relative.
TOLERANCE = 1e-3
N_ROWS = [0, 1, 2, SHAPE.max_rows, SHAPE.max_rows + 1, 33, 257]
# One, primes, a panel and its neighbours, and real layers; the last of them runs in the pool from one row on.
SIZES = [(1, 1), (13, 97), (4, COLUMNS), (3, COLUMNS + 1), (64, 5 * COLUMNS), (577, 60), (1536, 576)]


FORMATS: tuple[WeightFormat, ...] = ("float32", "bfloat16", "int8")
ORACLES = {"float32": ReferenceOps(), "bfloat16": RoundedReferenceOps(), "int8": QuantisedReferenceOps()}


@pytest.fixture(scope="module")
def ops_by_format() -> dict[WeightFormat, CpuOps]:
    return {kind: CpuOps(n_threads=min(2, n_cores()), weight_format=kind) for kind in FORMATS}


@pytest.fixture(scope="module")
def int8_ops(ops_by_format: dict[WeightFormat, CpuOps]) -> CpuOps:
    return ops_by_format["int8"]


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


@pytest.mark.parametrize("n_rows", N_ROWS)
@pytest.mark.parametrize(("n_in", "n_out"), SIZES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("weight_format", ["float32", "bfloat16"])
def test_products_in_floating_point_are_the_products_of_the_rounded_numbers(
    ops_by_format: dict[WeightFormat, CpuOps],
    compare: Compare,
    generator: torch.Generator,
    weight_format: WeightFormat,
    n_rows: int,
    n_in: int,
    n_out: int,
    has_bias: bool,
) -> None:
    x, weight, residual = (normal(generator, *shape) for shape in ((n_rows, n_in), (n_in, n_out), (n_rows, n_out)))
    bias = normal(generator, n_out) if has_bias else None
    ops, oracle = ops_by_format[weight_format], ORACLES[weight_format]
    wanted = oracle.linear(x, oracle.pack(weight), bias)
    packed, x_before, weight_before, total = ops.pack(weight), x.clone(), weight.clone(), residual.clone()
    compare(ops.linear(x, packed, bias), wanted, absolute=TOLERANCE)
    ops.add_linear(total, x, packed, bias)
    compare(total, residual + wanted, absolute=TOLERANCE)
    assert x.equal(x_before)
    assert weight.equal(weight_before)


@pytest.mark.parametrize("n_rows", N_ROWS)
@pytest.mark.parametrize(("n_in", "n_out"), SIZES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_in_int8_are_those_of_the_rounded_numbers_in_every_bit(
    int8_ops: CpuOps, generator: torch.Generator, n_rows: int, n_in: int, n_out: int, has_bias: bool
) -> None:
    oracle = QuantisedReferenceOps()
    x, weight, residual = (normal(generator, *shape) for shape in ((n_rows, n_in), (n_in, n_out), (n_rows, n_out)))
    bias = normal(generator, n_out) if has_bias else None
    wanted = oracle.linear(x, oracle.pack(weight), bias)
    packed, total = int8_ops.pack(weight), residual.clone()
    assert int8_ops.linear(x, packed, bias).equal(wanted)
    int8_ops.add_linear(total, x, packed, bias)
    assert total.equal(residual + wanted)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("n_rows", N_ROWS)
@pytest.mark.parametrize(("n_in", "n_features"), [(1, 1), (13, 17), (64, 5 * COLUMNS), (576, 1536)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gated_product_equals_its_definition(
    ops_by_format: dict[WeightFormat, CpuOps],
    compare: Compare,
    generator: torch.Generator,
    weight_format: WeightFormat,
    n_rows: int,
    n_in: int,
    n_features: int,
    has_bias: bool,
) -> None:
    ops, oracle = ops_by_format[weight_format], ORACLES[weight_format]
    x, weight = normal(generator, n_rows, n_in), normal(generator, n_in, 2 * n_features)
    bias = normal(generator, 2 * n_features) if has_bias else None
    wanted = oracle.gated_linear(x, oracle.pack_gated(weight), bias)
    # Two products are multiplied, each off by TOLERANCE at most and up to a few hundred.
    compare(ops.gated_linear(x, ops.pack_gated(weight), bias), wanted, absolute=10 * TOLERANCE)


def test_extreme_gates_are_finite_and_right(
    cpu_ops: CpuOps, reference_ops: ReferenceOps, compare: Compare
) -> None:
    gates = torch.tensor([[-1e30], [-200.0], [-88.0], [-0.0], [0.0], [1e-30], [88.0], [1e30]])
    weight = torch.ones(1, 2)
    bias = torch.tensor([0.0, 1.0])
    scaled = torch.cat((weight[:, :1], torch.zeros(1, 1)), dim=1)
    wanted = reference_ops.gated_linear(gates, reference_ops.pack_gated(scaled), bias)
    compare(cpu_ops.gated_linear(gates, cpu_ops.pack_gated(scaled), bias), wanted)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_row_has_the_same_bits_alone_among_others_and_on_any_number_of_threads(
    ops_by_format: dict[WeightFormat, CpuOps], generator: torch.Generator, weight_format: WeightFormat
) -> None:
    ops = ops_by_format[weight_format]
    alone = CpuOps(n_threads=1, weight_format=weight_format)
    x, bias = normal(generator, 200, 577), normal(generator, 194)
    weight = normal(generator, 577, 194)
    packed, gated = ops.pack(weight), ops.pack_gated(weight)
    together, gated_together = ops.linear(x, packed, bias), ops.gated_linear(x, gated, bias)
    for n_rows in (1, 2, 5, 12, 13, 31, 64):
        for first in (0, 77, 200 - n_rows):
            rows = slice(first, first + n_rows)
            for other in (ops, alone):
                assert other.linear(x[rows], packed, bias).equal(together[rows])
                assert other.gated_linear(x[rows], gated, bias).equal(gated_together[rows])
                total = torch.ones(n_rows, 194)
                other.add_linear(total, x[rows], packed, bias)
                assert total.equal(together[rows] + 1)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_rows_may_be_a_view_and_the_weight_transposed(
    ops_by_format: dict[WeightFormat, CpuOps], generator: torch.Generator, weight_format: WeightFormat
) -> None:
    ops = ops_by_format[weight_format]
    x_TI, weight_OI = normal(generator, 5, 100), normal(generator, 40, 30)
    plain = ops.pack(weight_OI.t().contiguous())
    wanted = ops.linear(x_TI[:, 7:37].contiguous(), plain)
    assert ops.linear(x_TI[:, 7:37], ops.pack(weight_OI.t())).equal(wanted)
    assert ops.linear(x_TI.t().contiguous().t()[:, 7:37], plain).equal(wanted)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_row_that_is_not_finite_stays_so_and_alone(
    ops_by_format: dict[WeightFormat, CpuOps],
    generator: torch.Generator,
    weight_format: WeightFormat,
    value: float,
) -> None:
    ops = ops_by_format[weight_format]
    x, weight = normal(generator, 3, 70), normal(generator, 70, 40)
    packed, gated = ops.pack(weight), ops.pack_gated(weight)
    finite = ops.linear(x, packed)
    x[1, 69] = value
    found = ops.linear(x, packed)
    assert not found[1].isfinite().any()
    assert found[[0, 2]].equal(finite[[0, 2]])
    if weight_format == "int8" or value != value:
        assert ops.gated_linear(x, gated)[1].isnan().all()


def test_numbers_are_rounded_to_the_nearest_bfloat16_and_halves_to_even(
    ops_by_format: dict[WeightFormat, CpuOps],
) -> None:
    ops, one = ops_by_format["bfloat16"], 2.0**-7  # in the last place of 1
    numbers = torch.tensor([1 + one / 2, 1 + 1.5 * one, -1 - one / 2, 1 + 0.51 * one, 3.4e38, 2.0**-126, 0.0])
    wanted = [1.0, 1 + 2 * one, -1.0, 1 + one, float("inf"), 2.0**-126, 0.0]
    assert ops.linear(numbers[:, None], ops.pack(torch.ones(1, 1)))[:, 0].tolist() == wanted
    assert ops.linear(torch.ones(1, 1), ops.pack(numbers[None]))[0].tolist() == wanted


def test_rows_of_zeros_tiny_and_huge_numbers_are_rounded_without_overflow(int8_ops: CpuOps) -> None:
    oracle, weight = QuantisedReferenceOps(), torch.linspace(-1, 1, 5 * 7).view(5, 7)
    rows = torch.tensor([0.0, 1e-45, 1e-38, 2.0**-119, 2.0**-118, 1e-20, 1e30, 1e37]).unsqueeze(1)
    x = rows * torch.tensor([1.0, -0.5, 0.25, 0.0, -1.0])
    found = int8_ops.linear(x, int8_ops.pack(weight))
    assert found.equal(oracle.linear(x, oracle.pack(weight)))
    assert found[:4].abs().max() < 1e-35
    assert found.isfinite().all()


def test_halves_are_rounded_to_even(int8_ops: CpuOps) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -0.5, -2.5, 126.5]])
    assert int8_ops.linear(x, int8_ops.pack(torch.eye(6))).tolist() == [[127.0, 0.0, 2.0, -0.0, -2.0, 126.0]]


def test_the_largest_sums_of_int8_do_not_overflow(int8_ops: CpuOps) -> None:
    x, weight = torch.full((1, 100_000), -127.0), torch.full((100_000, 2), 127.0)
    assert int8_ops.linear(x, int8_ops.pack(weight)).equal(torch.full((1, 2), -(127.0**2) * 100_000))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_shows_in_its_column_only(int8_ops: CpuOps, value: float) -> None:
    weight = torch.ones(4, 3)
    weight[2, 1] = value
    assert int8_ops.linear(torch.ones(1, 4), int8_ops.pack(weight)).isfinite().tolist() == [[True, False, True]]


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(("n_in", "n_out"), [(1, 2), (13, 98), (576, 3072)])
def test_packed_bytes_are_what_a_packed_weight_takes(
    ops_by_format: dict[WeightFormat, CpuOps], weight_format: WeightFormat, n_in: int, n_out: int
) -> None:
    ops = ops_by_format[weight_format]
    for gated, pack in ((False, ops.pack), (True, ops.pack_gated)):
        packed = pack(torch.zeros(n_in, n_out))
        assert isinstance(packed, PackedWeight)
        n_bytes = packed.panels.nbytes + packed.scale.nbytes + packed.surplus.nbytes
        assert packed_bytes(n_in, n_out, weight_format, gated=gated) == n_bytes
