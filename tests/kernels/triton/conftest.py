"""What tests of Triton kernels share; `tests/conftest.py` has them run in Triton's interpreter."""

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: it exists for Linux only")

# bfloat16 has 8 bits: one rounding is off by 2^-9 of the number, and numbers that were rounded to even differently
# by 2^-8; float32 sums of up to some 1000 terms in another order differ by a few units of 2^-23 of the largest.
TOLERANCE = {torch.float32: (5e-6, 2e-5), torch.bfloat16: (1e-2, 2**-7)}


@pytest.fixture(scope="session", autouse=True)
def products_sum_every_row_alike() -> Iterator[None]:
    """In the interpreter, too, where products are BLAS's.

    OpenBLAS for AVX2 sums a row in another order where it stands elsewhere in the matrix; a GPU does not.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle  # after `importorskip`

    def dot(_: object, a: Any, b: Any, sums: Any, *__: object) -> Any:
        product = np.einsum("mk,kn->mn", a.data, b.data, dtype=sums.data.dtype)
        return TensorHandle(product + sums.data, sums.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", dot)
        yield


class Close(Protocol):
    """Assert equal shapes and dtypes, and values within the dtype's tolerance; NaN is close to NaN alone."""

    def __call__(self, actual: Tensor, expected: Tensor, *, absolute: float | None = None) -> None: ...


@pytest.fixture(scope="session")
def close() -> Close:
    def check(actual: Tensor, expected: Tensor, *, absolute: float | None = None) -> None:
        assert actual.dtype == expected.dtype, f"{actual.dtype} instead of {expected.dtype}"
        default, relative = TOLERANCE[expected.dtype]
        torch.testing.assert_close(
            actual, expected, atol=default if absolute is None else absolute, rtol=relative, equal_nan=True
        )

    return check


@pytest.fixture(scope="session")
def compiled_environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The environment of processes in which kernels are compiled, each of them once in a session."""
    return {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "PYTHONPATH": os.pathsep.join((os.getcwd(), *sys.path)),
    }
