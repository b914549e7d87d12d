"""Numba's compiler behind one typed decorator.

Machine code is kept on disk. Numba takes it from there only for the same processor and the same file, and does not
notice a change in another file that the function calls into, nor one here. So the kept functions carry a digest of
all files of this folder in their names: whatever changes, they are compiled anew.

Nor is its store made for two writers: it writes the index of a function's argument types, then the code, so of two
processes that keep different ones at once either may find the other's code in its place. So each function has a
lock, a file beside its code, that is held from the look for code until it is kept: of processes that start at the
same time one compiles and the others wait, then load. Whoever dies gives up its locks. While one is held, others
are taken only of functions that the first calls into, which never call back, so nobody waits in a circle.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numba.extending
from filelock import FileLock
from numba.core.compiler_lock import global_compiler_lock

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# The fast-math licences under which NaN and infinity keep their meaning: sums may be reordered into vector
# lanes and multiply-adds fused, but a NaN in a key still reaches the output instead of becoming a wrong number.
_SAFE_FAST_MATH = {"reassoc", "contract", "arcp", "nsz"}

_DIGEST = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()[:12]
# A warm start holds a lock for milliseconds, a first one for seconds.
_LOCK_POLL_S = 0.01


def _code_folder() -> Path | None:
    """Where Numba keeps what is compiled here: beside the sources, else in the user's cache."""
    try:
        folder = numba.njit(cache=True)(_unused).stats.cache_path
    except RuntimeError as error:  # so says Numba where it can write to neither
        logger.warning("compiled kernels are not kept, so each start compiles them: %s", error)
        return None
    assert folder is not None, "it was asked to keep it"
    return Path(folder)


def _unused() -> None:
    """What Numba looks for a folder for; never compiled."""


_CODE_FOLDER = _code_folder()


def compiled(*, exact: bool = False, inlined: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compile at the first call with each set of argument types, and keep the machine code on disk.

    The compiled function runs without the GIL. `exact` rounds every operation as it is written; otherwise sums may
    be reordered and multiply-adds fused. `inlined` puts it into each caller: for what is called so often that
    handing over its arguments counts.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        function.__qualname__ = f"{function.__qualname__}_{_DIGEST}"
        fast_math = False if exact else _SAFE_FAST_MATH
        jit = numba.njit(
            cache=_CODE_FOLDER is not None,
            nogil=True,
            fastmath=fast_math,
            error_model="numpy",
            forceinline=inlined,
        )
        dispatcher = jit(function)
        if _CODE_FOLDER is not None:
            lock_path = _CODE_FOLDER / f"{function.__module__}.{function.__qualname__}.lock"
            vars(dispatcher)["compile"] = _one_at_a_time(dispatcher.compile, lock_path)
        return cast("Callable[P, R]", dispatcher)

    return decorate


def _one_at_a_time(find_or_compile: Callable[P, R], lock_path: Path) -> Callable[P, R]:
    """What Numba calls for argument types that this process has not seen, under the lock of its function."""

    def find_or_compile_alone(*args: P.args, **kwargs: P.kwargs) -> R:
        # Numba's own lock of this process's threads comes first: it is held, too, where one function's compiling
        # comes to another, and both threads would wait for ever if they took the two in different orders.
        with global_compiler_lock, _held(lock_path):
            return find_or_compile(*args, **kwargs)

    return find_or_compile_alone


@contextmanager
def _held(lock_path: Path) -> Iterator[None]:
    """Goes on without the lock where the file system has none: then only starts at the same time are unsafe."""
    lock = FileLock(lock_path)  # a new one each time: those of a process that forks are refused in its children
    try:
        lock.acquire(poll_interval=_LOCK_POLL_S)
    except OSError as error:
        logger.warning("compiled kernels are kept without a lock: %s", error)
        yield
        return
    try:
        yield
    finally:
        lock.release()


def intrinsic(function: Callable[..., object]) -> Any:
    """A function for compiled code, written as LLVM instructions; see `numba.extending.intrinsic`."""
    return numba.extending.intrinsic(function)
