"""That kernels are being compiled is told while it happens, and only then."""

import os
import sys
import threading
import time
from pathlib import Path

import pytest
from bakehouse_cluster.compiling import COMPILING, compiling_told, kernel_cache, numbas_cache
from numba.core.caching import UserWideCacheLocator

WAIT_S = 20.0


def test_machine_code_that_appears_is_told_once(tmp_path: Path) -> None:
    notes: list[str] = []
    told = threading.Event()

    def note(text: str) -> None:
        notes.append(text)
        told.set()

    with compiling_told(note, folder=tmp_path, poll_s=0.01):
        for name in ("a.nbc", "b.nbc"):
            (tmp_path / name).write_bytes(b"")
            os.utime(tmp_path / name, (time.time() + 1,) * 2)
        assert told.wait(WAIT_S)
    assert notes == [COMPILING]


def test_what_was_compiled_before_is_not_told(tmp_path: Path) -> None:
    old = tmp_path / "a.nbc"
    old.write_bytes(b"")
    os.utime(old, (1, 1))
    notes: list[str] = []
    with compiling_told(notes.append, folder=tmp_path, poll_s=0.001):
        time.sleep(0.02)
    with compiling_told(notes.append, folder=tmp_path / "absent", poll_s=0.001):
        time.sleep(0.02)
    assert notes == []


def test_the_kernels_keep_their_machine_code_where_it_is_looked_for() -> None:
    folder = kernel_cache()
    assert folder is not None
    assert (folder.parent / "compile.py").is_file()


@pytest.mark.skipif(sys.platform != "linux", reason="the images are for Linux; elsewhere Numba has another folder")
def test_where_they_cannot_be_written_it_is_looked_for_where_numba_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = kernel_cache()
    assert folder is not None
    source = folder.parent / "compile.py"
    numbas = UserWideCacheLocator.from_function(numbas_cache, str(source))  # type: ignore[no-untyped-call]
    assert numbas is not None
    assert numbas_cache(source.parent) == Path(numbas.get_cache_path())
