"""How long work is shown: here where nobody watches, as lines."""

import io
import re
import threading
import time

import pytest
from bakehouse_cluster.progress import counted, n_of
from rich.console import Console

WAIT_S = 20.0


def unwatched() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=20), file


def test_work_that_nobody_watches_is_told_at_its_beginning_meanwhile_and_at_its_end() -> None:
    console, file = unwatched()
    deadline_s = time.monotonic() + WAIT_S
    with counted(console, "8 [users] at once", n_total=3, n_done=1, every_s=0.01) as advance:
        advance()
        while "2 of 3 after" not in file.getvalue():
            assert time.monotonic() < deadline_s
        advance()
    lines = file.getvalue().splitlines()
    assert lines[0] == "… 8 [users] at once: 1 of 3"
    assert any(re.fullmatch(r"  8 \[users\] at once: 2 of 3 after \d+ s", line) for line in lines)
    assert re.fullmatch(r"✓ 8 \[users\] at once: 3 of 3 \(\d+\.\d s\)", lines[-1])


def test_short_work_is_two_lines_and_leaves_no_thread() -> None:
    console, file = unwatched()
    n_threads = threading.active_count()
    with counted(console, "answers", n_total=1, n_done=0) as advance:
        advance()
    assert threading.active_count() == n_threads
    assert len(file.getvalue().splitlines()) == 2


def test_an_error_leaves_no_last_line() -> None:
    console, file = unwatched()
    with pytest.raises(KeyboardInterrupt), counted(console, "answers", n_total=1, n_done=0):
        raise KeyboardInterrupt
    assert file.getvalue() == "… answers: 0 of 1\n"


@pytest.mark.parametrize(("n", "words"), [(0, "0 lines"), (1, "1 line"), (2, "2 lines"), (1000, "1,000 lines")])
def test_a_number_has_its_noun(n: int, words: str) -> None:
    assert n_of(n, "line") == words
