"""Numba's compiler behind one typed decorator.

Machine code is kept on disk. Numba takes it from there only for the same processor and the same file, and does not
notice a change in another file that the function calls into, nor one here. So the kept functions carry a digest of
all files of this folder in their names: whatever changes, they are compiled anew.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numba.extending

P = ParamSpec("P")
R = TypeVar("R")

# The fast-math licences under which NaN and infinity keep their meaning: sums may be reordered into vector
# lanes and multiply-adds fused, but a NaN in a key still reaches the output instead of becoming a wrong number.
_SAFE_FAST_MATH = {"reassoc", "contract", "arcp", "nsz"}

_DIGEST = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()[:12]


def compiled(*, exact: bool = False, inlined: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compile at the first call with each set of argument types, and keep the machine code on disk.

    The compiled function runs without the GIL. `exact` rounds every operation as it is written; otherwise sums may
    be reordered and multiply-adds fused. `inlined` puts it into each caller: for what is called so often that
    handing over its arguments counts.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        function.__qualname__ = f"{function.__qualname__}_{_DIGEST}"
        fast_math = False if exact else _SAFE_FAST_MATH
        jit = numba.njit(cache=True, nogil=True, fastmath=fast_math, error_model="numpy", forceinline=inlined)
        return cast("Callable[P, R]", jit(function))

    return decorate


def intrinsic(function: Callable[..., object]) -> Any:
    """A function for compiled code, written as LLVM instructions; see `numba.extending.intrinsic`."""
    return numba.extending.intrinsic(function)
