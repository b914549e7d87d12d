"""Ending a Ray: exactly the processes that hold its folder open, also when nobody is left to ask for it."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from bakehouse_cluster.guard import end_all, processes_of

WAIT_S = 20.0
HOLD = "import sys, time; file = open(sys.argv[1], 'w'); print('open', flush=True); time.sleep(600)"


@pytest.fixture
def spawned() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait(WAIT_S)
        if process.stdout is not None:
            process.stdout.close()


def hold(spawned: list[subprocess.Popen[str]], path: Path) -> subprocess.Popen[str]:
    """A Python process that holds `path` open."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    spawned.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


def test_only_processes_with_a_file_open_in_the_folder_are_found(
    tmp_path: Path, spawned: list[subprocess.Popen[str]]
) -> None:
    (tmp_path / "ours").mkdir()
    ours, _other = hold(spawned, tmp_path / "ours" / "log"), hold(spawned, tmp_path / "log")
    assert [process.pid for process in processes_of(tmp_path / "ours")] == [ours.pid]


def test_the_calling_process_is_never_among_them(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w"):
        assert processes_of(tmp_path) == []


def test_another_program_that_reads_a_log_is_not_ended(
    tmp_path: Path, spawned: list[subprocess.Popen[str]]
) -> None:
    log = tmp_path / "log"
    log.touch()
    reader = subprocess.Popen(["tail", "-f", str(log)], stdout=subprocess.PIPE, text=True)
    spawned.append(reader)
    assert processes_of(tmp_path) == []


def test_ending_takes_known_processes_found_ones_and_the_folder(
    tmp_path: Path, spawned: list[subprocess.Popen[str]]
) -> None:
    folder = tmp_path / "ours"
    folder.mkdir()
    found, known = hold(spawned, folder / "log"), hold(spawned, tmp_path / "log")
    end_all(folder, [psutil.Process(known.pid)])
    assert not psutil.pid_exists(found.pid)
    assert not psutil.pid_exists(known.pid)
    assert not folder.exists()


def test_the_guard_ends_all_once_its_pipe_closes(tmp_path: Path, spawned: list[subprocess.Popen[str]]) -> None:
    folder = tmp_path / "ours"
    folder.mkdir()
    orphan = hold(spawned, folder / "log")
    guard = subprocess.Popen(
        [sys.executable, "-m", "bakehouse_cluster.guard", str(folder)], stdin=subprocess.PIPE, text=True
    )
    spawned.append(guard)
    assert guard.stdin is not None
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(
            orphan.wait, WAIT_S
        )  # as init does: the guard waits for one that nobody has waited for
        guard.stdin.close()
        assert guard.wait(WAIT_S) == 0
        assert ended.result() != 0
    assert not folder.exists()
