"""Numba's compiler behind one typed decorator.

Numba's cache notices a changed kernel file, but not a change here: after one, delete `cpu/__pycache__/*.nb*`.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")

# The fast-math licences under which NaN and infinity keep their meaning: sums may be reordered into vector
# lanes and multiply-adds fused, but a NaN in a key still reaches the output instead of becoming a wrong number.
_SAFE_FAST_MATH = {"reassoc", "contract", "arcp", "nsz"}


def compiled(*, parallel: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compile at the first call with each set of argument types, and keep the machine code on disk.

    The compiled function runs without the GIL. `parallel` lets it use `numba.prange`.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        jit = numba.njit(cache=True, parallel=parallel, nogil=True, fastmath=_SAFE_FAST_MATH, error_model="numpy")
        return cast("Callable[P, R]", jit(function))

    return decorate
