"""Ends every process of a local Ray, also when the process that started it was killed.

Ray's processes share the fate of the driver that started them, all but two agents, which notice after 60 s
(measured on Ray 2.60). So the driver starts this module as a program of its own and keeps a pipe to it open; the
pipe's end tells that the driver is gone, however it went.
"""

import shutil
import sys
from pathlib import Path

import psutil

# Between kill and disappearance; a process in uninterruptible sleep may need it.
KILL_TIMEOUT_S = 3.0
# The raylet may start a worker between our look and its own death; the third look finds nothing.
N_ROUNDS = 3


def processes_of(folder: Path) -> list[psutil.Process]:
    """The processes of the Ray that lives in `folder`, the calling one excepted.

    Titles and environments are overwritten by Ray, so a process is known by what it runs (this Python, or a
    program of the Ray package) and by a file that it holds open in the folder: its log.
    """
    python = Path(sys.executable).resolve()
    found = []
    for process in psutil.process_iter():
        try:
            program = Path(process.exe())
            if process.pid == psutil.Process().pid or not (program == python or "ray" in program.parts):
                continue
            if any(Path(file.path).is_relative_to(folder) for file in process.open_files()):
                found.append(process)
        except psutil.Error:  # another user's, or gone meanwhile
            continue
    return found


def end_all(folder: Path, known: list[psutil.Process]) -> None:
    """Kill the `known` processes and all others of the Ray in `folder`, then remove the folder."""
    doomed = known
    for _ in range(N_ROUNDS):
        doomed = [*doomed, *processes_of(folder)]
        for process in doomed:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        _, doomed = psutil.wait_procs(doomed, timeout=KILL_TIMEOUT_S)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Wait for the end of standard input, then end the Ray in the folder named by the first argument."""
    sys.stdin.buffer.read()
    end_all(Path(sys.argv[1]), [])


if __name__ == "__main__":
    main()
