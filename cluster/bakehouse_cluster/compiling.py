"""Tells that kernels are being compiled, which looks like a hang: a first start on a machine does so.

Whoever compiles, here or in a replica's process, keeps machine code beside the kernels' sources, file after file,
or, where nobody may write there, as in the image, in a folder of the user's cache.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from bakehouse_replica.source import default_cache_root

COMPILING = (
    "  kernels are being compiled for this processor, about 40 s on idle cores; "
    "once for each kind of weights and cache"
)
_POLL_S = 1.0


def kernel_cache() -> Path | None:
    """Where machine code is kept; the kernels are not imported for it, which takes seconds."""
    spec = find_spec("bakehouse_kernels")
    folders = spec.submodule_search_locations if spec is not None else None
    if not folders:
        return None
    sources = Path(next(iter(folders))) / "cpu"
    beside = sources / "__pycache__"
    if os.access(beside if beside.exists() else sources, os.W_OK):
        return beside
    return numbas_cache(sources)


def numbas_cache(sources: Path) -> Path:
    """Where Numba keeps the machine code of modules in a folder that it cannot write to."""
    digest = hashlib.sha1(str(sources).encode(), usedforsecurity=False).hexdigest()
    return default_cache_root().parent / "numba" / f"{sources.name}_{digest}"


@contextmanager
def compiling_told(
    note: Callable[[str], None], *, folder: Path | None = None, poll_s: float = _POLL_S
) -> Iterator[None]:
    """Calls `note` once as soon as machine code appears in `folder` (None: `kernel_cache()`) within the block."""
    watched = folder or kernel_cache()
    begun_s, has_ended = time.time(), threading.Event()

    def watch() -> None:
        while watched is not None and not has_ended.wait(poll_s):
            if _newest_s(watched) >= begun_s:
                note(COMPILING)
                return

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        has_ended.set()
        watching.join()


def _newest_s(folder: Path) -> float:
    times = [0.0]
    for path in folder.glob("*.nbc"):
        try:
            times.append(path.stat().st_mtime)
        except FileNotFoundError:  # a newer one has taken its place
            continue
    return max(times)
