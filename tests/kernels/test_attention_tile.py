"""The tiles of attention that other machines get, as far as this one can run them."""

import numba
import numpy as np
import pytest
from bakehouse_kernels.cpu.attention_tile import heights, scores_tile, values_tile
from bakehouse_kernels.cpu.tile import HAS_HALF, TileShape

from tests.kernels.test_tile import OTHERS, aligned

N_STEPS = 9
ELEMENTS = {False: np.float32(0), True: np.int16(0)}
FORMATS = [False, pytest.param(True, marks=pytest.mark.skipif(not HAS_HALF, reason="this machine has no float16"))]


@pytest.mark.parametrize("shape", OTHERS)
@pytest.mark.parametrize("is_half", FORMATS)
def test_scores_are_the_product_with_the_panel(shape: TileShape, is_half: bool) -> None:
    tile, element = scores_tile(shape), ELEMENTS[is_half]

    @numba.njit
    def run(n_rows, q, stride, panel, n_steps, out):  # type: ignore[no-untyped-def]
        tile(n_rows, q, stride, panel, n_steps, out, panel, element)

    generator = np.random.default_rng(7)
    numbers = generator.integers(-50, 50, (N_STEPS, shape.columns))
    panel = aligned(numbers.astype(np.float16 if is_half else np.float32))
    for n_rows in heights(shape):
        q = generator.integers(-50, 50, (n_rows, N_STEPS)).astype(np.float32)
        out = np.empty((n_rows, shape.columns), np.float32)
        run(n_rows, q.ctypes.data, q.strides[0], panel.ctypes.data, N_STEPS, out.ctypes.data)
        np.testing.assert_array_equal(out, q @ numbers)  # integers below 2^24: exact in any order


@pytest.mark.parametrize("shape", OTHERS)
@pytest.mark.parametrize("is_half", FORMATS)
@pytest.mark.parametrize("is_wide", [False, True])
def test_values_are_added_to_what_stands_there_by_its_factor(
    shape: TileShape, is_half: bool, is_wide: bool
) -> None:
    tile, element = values_tile(shape, is_wide=is_wide), ELEMENTS[is_half]

    @numba.njit
    def run(n_rows, weights, stride, panel, panel_bytes, n_steps, out, out_bytes, factor):  # type: ignore[no-untyped-def]
        tile(n_rows, weights, stride, panel, panel_bytes, n_steps, out, out_bytes, factor, panel, element)

    generator = np.random.default_rng(7)
    n_panels = 2 if is_wide else 1
    numbers = generator.integers(-50, 50, (n_panels, N_STEPS, shape.columns))
    panels = aligned(numbers.astype(np.float16 if is_half else np.float32))
    for n_rows in (n for n in heights(shape) if n * n_panels <= shape.max_rows):
        weights = generator.integers(-50, 50, (n_rows, N_STEPS)).astype(np.float32)
        factor = generator.integers(0, 5, n_rows).astype(np.float32)
        out = generator.integers(-50, 50, (n_panels, n_rows, shape.columns)).astype(np.float32)
        expected = out * factor[:, None] + weights @ numbers
        arrays = (out.ctypes.data, out.strides[0], factor.ctypes.data)
        run(
            n_rows,
            weights.ctypes.data,
            weights.strides[0],
            panels.ctypes.data,
            panels.strides[0],
            N_STEPS,
            *arrays,
        )
        np.testing.assert_array_equal(out, expected)
