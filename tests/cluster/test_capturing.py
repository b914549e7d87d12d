"""How far a start is in capturing graphs is told while it lasts."""

import os
import threading
from pathlib import Path

from bakehouse_cluster.capturing import captures_told
from bakehouse_replica.recording_file import RECORDING_FILE, recording_told

WAIT_S = 20.0


class Notes:
    """Lines, and when there is another one."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.has_come = threading.Semaphore(0)

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self.has_come.release()


def test_each_count_that_a_replica_tells_is_told_once(tmp_path: Path) -> None:
    notes = Notes()
    with captures_told(notes, tmp_path, poll_s=0.005), recording_told(tmp_path) as tell:
        for n_done in (12, 12, 24):
            is_new = f"  captured {n_done} of 35 CUDA graphs" not in notes.lines
            tell(n_done, 35)
            assert not is_new or notes.has_come.acquire(timeout=WAIT_S)
    assert notes.lines == ["  captured 12 of 35 CUDA graphs", "  captured 24 of 35 CUDA graphs"]


def test_what_a_killed_start_has_left_behind_is_not_told(tmp_path: Path) -> None:
    (tmp_path / RECORDING_FILE).write_text("captured 3 of 35 CUDA graphs")
    os.utime(tmp_path / RECORDING_FILE, (1, 1))
    notes = Notes()
    with captures_told(notes, tmp_path, poll_s=0.001), recording_told(tmp_path) as tell:
        assert not notes.has_come.acquire(timeout=0.02)
        tell(1, 2)
        assert notes.has_come.acquire(timeout=WAIT_S)
    assert notes.lines == ["  captured 1 of 2 CUDA graphs"]
