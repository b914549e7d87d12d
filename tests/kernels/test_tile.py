"""The tiles that other machines get, as far as this one can run them."""

from typing import TypeVar

import numba
import numpy as np
import pytest
from bakehouse_kernels.cpu.finish import finish_tile
from bakehouse_kernels.cpu.narrow import bfloat16_arithmetic, int8_arithmetic
from bakehouse_kernels.cpu.tile import FLOAT32, TileShape, shape_for, sums_tile
from numpy.typing import NDArray

# AVX-512 without VNNI, AVX2, and SSE or NEON: vectors wider than this machine's are split by the compiler.
OTHERS = [
    TileShape(lanes=16, max_rows=3, has_byte_dot=False, has_bfloat16_dot=False),
    TileShape(lanes=8, max_rows=3, has_byte_dot=False, has_bfloat16_dot=False),
    TileShape(lanes=4, max_rows=3, has_byte_dot=False, has_bfloat16_dot=False),
]
N_STEPS = 9


Element = TypeVar("Element", bound=np.generic)


def aligned(content: NDArray[Element]) -> NDArray[Element]:
    room = np.empty(content.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    array: NDArray[Element] = room[start : start + content.nbytes].view(content.dtype).reshape(content.shape)
    array[:] = content
    return array


@pytest.mark.parametrize(
    ("features", "lanes", "max_rows", "has_byte_dot", "has_bfloat16_dot"),
    [
        (["avx512f", "avx512bw", "avx512vnni", "avx512bf16", "avx2", "fma"], 16, 12, True, True),
        (["avx512f", "avx512bw", "avx512vnni", "avx2", "fma"], 16, 12, True, False),
        (["avx512f", "avx512bw", "avx2", "fma"], 16, 12, False, False),
        (["avx2", "fma", "avxvnni"], 8, 6, True, False),
        (["avx2", "fma"], 8, 6, False, False),
        (["sse2"], 4, 6, False, False),
        (["neon"], 4, 12, False, False),
    ],
)
def test_the_tile_fills_the_registers_of_the_machine(
    features: list[str], lanes: int, max_rows: int, has_byte_dot: bool, has_bfloat16_dot: bool
) -> None:
    shape = shape_for(dict.fromkeys(features, True))
    assert shape == TileShape(
        lanes=lanes, max_rows=max_rows, has_byte_dot=has_byte_dot, has_bfloat16_dot=has_bfloat16_dot
    )


@pytest.mark.parametrize("shape", OTHERS)
def test_float32_tiles_of_other_machines_give_the_sums(shape: TileShape) -> None:
    tile = sums_tile(shape, FLOAT32)

    @numba.njit
    def run(n_rows, x, stride, panel, n_steps, out):  # type: ignore[no-untyped-def]
        tile(n_rows, x, stride, panel, n_steps, out, panel)

    generator = np.random.default_rng(7)
    panel = aligned(generator.integers(-50, 50, (N_STEPS, shape.columns)).astype(np.float32))
    for n_rows in range(1, shape.max_rows + 1):
        x = generator.integers(-50, 50, (n_rows, N_STEPS)).astype(np.float32)
        out = np.empty((n_rows, shape.columns), np.float32)
        run(n_rows, x.ctypes.data, x.strides[0], panel.ctypes.data, N_STEPS, out.ctypes.data)
        np.testing.assert_array_equal(out, x @ panel)  # integers below 2^24: exact in any order


@pytest.mark.parametrize("shape", OTHERS)
def test_bfloat16_tiles_of_other_machines_give_the_sums(shape: TileShape) -> None:
    tile = sums_tile(shape, bfloat16_arithmetic(shape))

    @numba.njit
    def run(n_rows, x, stride, panel, n_steps, out):  # type: ignore[no-untyped-def]
        tile(n_rows, x, stride, panel, n_steps, out, panel)

    generator = np.random.default_rng(7)
    weight = generator.integers(-50, 50, (N_STEPS, shape.columns, 2)).astype(np.float32)
    panel = aligned(upper_halves(weight))
    columns = weight.transpose(0, 2, 1).reshape(2 * N_STEPS, shape.columns)
    for n_rows in range(1, shape.max_rows + 1):
        x = generator.integers(-50, 50, (n_rows, 2 * N_STEPS)).astype(np.float32)
        rows = upper_halves(x)
        out = np.empty((n_rows, shape.columns), np.float32)
        run(n_rows, rows.ctypes.data, rows.strides[0], panel.ctypes.data, N_STEPS, out.ctypes.data)
        np.testing.assert_array_equal(out, x @ columns)  # small integers are exact in bfloat16, and so are sums


def upper_halves(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("shape", OTHERS)
def test_int8_tiles_of_other_machines_give_the_sums(shape: TileShape) -> None:
    tile = sums_tile(shape, int8_arithmetic(shape))

    @numba.njit
    def run(n_rows, x, stride, panel, n_steps, out):  # type: ignore[no-untyped-def]
        tile(n_rows, x, stride, panel, n_steps, out, panel)

    generator = np.random.default_rng(7)
    weight = generator.integers(-127, 128, (N_STEPS, shape.columns, 4)).astype(np.int8)
    # With 255 the largest products of either sign, which saturate where 16 bits hold a sum of two.
    weight[:2] = -127
    weight[2:4] = 127
    panel = aligned(weight)
    columns = weight.transpose(0, 2, 1).reshape(4 * N_STEPS, shape.columns).astype(np.int64)
    for n_rows in range(1, shape.max_rows + 1):
        x = generator.integers(0, 256, (n_rows, 4 * N_STEPS)).astype(np.uint8)
        x[0] = 255
        out = np.empty((n_rows, shape.columns), np.int32)
        run(n_rows, x.ctypes.data, x.strides[0], panel.ctypes.data, N_STEPS, out.ctypes.data)
        np.testing.assert_array_equal(out, x.astype(np.int64) @ columns)


@pytest.mark.parametrize("shape", OTHERS)
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("is_added", [False, True])
def test_what_follows_the_sums_on_other_machines(
    shape: TileShape, is_int8: bool, is_gated: bool, is_added: bool
) -> None:
    finish = finish_tile(shape, is_int8=is_int8, is_gated=is_gated)

    @numba.njit
    def run(n_rows, sums, out, stride, bias, up_bias, added, row_scale, surplus, column_scale):  # type: ignore[no-untyped-def]
        finish(n_rows, sums, out, stride, bias, up_bias, added, row_scale, surplus, column_scale)

    generator, n_rows, half = np.random.default_rng(7), 3, shape.lanes
    integers = generator.integers(-99, 99, (n_rows, shape.columns))
    surplus = generator.integers(-99, 99, shape.columns).astype(np.int32)
    row_scale = (2.0 ** generator.integers(-3, 0, n_rows)).astype(np.float32)
    column_scale = (2.0 ** generator.integers(-3, 0, shape.columns)).astype(np.float32)
    bias = generator.integers(-9, 9, shape.columns).astype(np.float32)
    sums = integers.astype(np.int32 if is_int8 else np.float32)
    n_columns = half if is_gated else shape.columns
    before = generator.integers(-9, 9, (n_rows, n_columns + 1)).astype(np.float32)
    out = before.copy()
    arrays = (array.ctypes.data for array in (row_scale, surplus, column_scale))
    biases = bias.ctypes.data, bias[half:].ctypes.data
    run(n_rows, sums.ctypes.data, out.ctypes.data, out.strides[0], *biases, int(is_added), *arrays)
    scaled = (integers - surplus) * row_scale[:, None].astype(np.float64) * column_scale if is_int8 else integers
    wanted = scaled + bias
    if is_gated:
        wanted = wanted[:, :half] / (1 + np.exp(-wanted[:, :half])) * wanted[:, half:]
        # A rounding of the exponent of e^-100, 6e-8 of it, counts a hundred times in the result.
        np.testing.assert_allclose(out[:, :-1], wanted, rtol=1e-5, atol=1e-33)
    else:
        np.testing.assert_array_equal(out[:, :-1], wanted + (before[:, :-1] if is_added else 0))
    np.testing.assert_array_equal(out[:, -1], before[:, -1])
