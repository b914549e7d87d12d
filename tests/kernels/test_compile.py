"""Kept machine code is that of the files as they are, whichever processes keep it at the same time."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels" / "bakehouse_kernels"
# `_weigh` stands in one file, the exponential that it calls in another. For each argument, processes that have
# imported it and nothing more start together, one for each type of keys that the argument names. Of each process:
# the weight, how often code came from the disk, and how it ended.
WEIGH = """
import json, os, signal, sys
import numpy as np
from bakehouse_kernels.cpu.survey import _weigh
from numba.core.caching import IndexDataCacheFile

def weigh(dtype, result):
    if dtype == "dying":  # Numba has put the type into its index then, and the code is not there yet
        IndexDataCacheFile._save_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        dtype = "float32"
    keys = np.array([-1], dtype)
    weight = _weigh(keys, keys.dtype.type(0), keys.dtype.type(1))
    os.write(result, json.dumps([float(weight), sum(_weigh.stats.cache_hits.values())]).encode())

for together in sys.argv[1:]:
    started = []
    for dtype in together.split(","):
        read, write = os.pipe()
        process = os.fork()
        if process == 0:
            weigh(dtype, write)
            os._exit(0)
        os.close(write)
        started.append((process, read))
    for process, read in started:
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        print(json.dumps([*json.loads(os.read(read, 1000) or "[null, null]"), status]))
"""
EXPECTED = pytest.approx(0.3678794, abs=1e-6)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the kernels of which nothing has been compiled."""
    return Path(
        shutil.copytree(KERNELS, tmp_path / "bakehouse_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    )


def weigh(package: Path, *together: str, **environment: str) -> list[tuple[object, ...]]:
    """Of each process the exponential of -1 and how often its code came from the disk, both None where it did not
    come so far, and its exit status."""
    done = subprocess.run(
        [sys.executable, "-c", WEIGH, *together],
        env={"PYTHONPATH": str(package.parent)} | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_code_is_kept_until_a_file_it_calls_into_changes(package: Path) -> None:
    assert weigh(package, "float32", "float32") == [(EXPECTED, 0, 0), (EXPECTED, 1, 0)]
    exponential = package / "cpu" / "exponential.py"
    changed = exponential.read_text().replace("return series * power", "return np.float32(1)")
    assert changed != exponential.read_text()
    exponential.write_text(changed)
    assert weigh(package, "float32") == [(1.0, 0, 0)]


def test_of_processes_that_start_together_one_compiles_for_each_set_of_types_and_each_finds_its_own(
    package: Path,
) -> None:
    together = "float32,float64,float32,float64"
    found = weigh(package, together, together)
    first, again = found[:4], found[4:]
    assert sorted(first, key=lambda one: str(one[1])) == [(EXPECTED, 0, 0)] * 2 + [(EXPECTED, 1, 0)] * 2
    assert again == [(value, 1, 0) for value, _, _ in first]


def test_a_process_that_dies_while_it_keeps_code_holds_up_nobody(package: Path) -> None:
    assert weigh(package, "dying", "float32", "float32") == [
        (None, None, -signal.SIGKILL),
        (EXPECTED, 0, 0),
        (EXPECTED, 1, 0),
    ]


def test_where_nothing_can_be_kept_each_start_compiles(package: Path) -> None:
    (package / "cpu" / "__pycache__").write_text("not a folder")
    assert weigh(package, "float32", "float32", XDG_CACHE_HOME=os.devnull) == [(EXPECTED, 0, 0)] * 2


def test_where_nothing_can_be_locked_code_is_kept_all_the_same(package: Path) -> None:
    weigh(package, "float32")
    locks = list((package / "cpu" / "__pycache__").glob("*.lock"))
    assert len(locks) == 2, "one of each function that was compiled"
    for lock in locks:
        lock.unlink()
        lock.mkdir()
    assert weigh(package, "float32", "float64", "float64") == [
        (EXPECTED, 1, 0),
        (EXPECTED, 0, 0),
        (EXPECTED, 1, 0),
    ]
