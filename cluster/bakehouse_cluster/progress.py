"""Shows what the command line is waiting for, and how long each stage took."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# How often a line is written where nobody watches a bar: often enough for a log, too seldom to fill it.
REPORT_S = 15.0


class Stages:
    """Long work, one stage after another, on standard error: a spinner with the elapsed time, then a line."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def stage(self, label: str, done: str | None = None) -> Iterator[None]:
        """Shows `label` until the block ends, then `done`, or else `label` again.

        An error leaves no line: whoever catches it says what was wrong.
        """
        begun_s = time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        is_quiet = not self._console.is_terminal
        if is_quiet:
            self._console.print(f"… {label}", highlight=False)
        with Progress(*columns, console=self._console, transient=True, disable=is_quiet) as spinner:
            spinner.add_task(label, total=None)
            yield
        self._console.print(f"✓ {done or label} ({time.monotonic() - begun_s:.1f} s)", highlight=False)

    def abandon(self) -> None:
        """Leave the terminal usable where the process ends in the middle of a stage."""
        self._console.show_cursor(True)
        self._console.print()

    def note(self, text: str) -> None:
        """A line for the reader."""
        self._console.print(text, highlight=False, soft_wrap=True)


@contextmanager
def counted(
    console: Console, label: str, *, n_total: int, n_done: int, every_s: float = REPORT_S
) -> Iterator[Callable[[], None]]:
    """A bar over `n_total` items with the time that remains; hands out what to call after each further item.

    Where nobody watches, a line at the beginning, every `every_s` and at the end; an error leaves no last line.
    """
    if not console.is_terminal:
        with _reported(console, label, n_total=n_total, n_done=n_done, every_s=every_s) as advance:
            yield advance
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(label, total=n_total, completed=n_done)
        yield lambda: bar.advance(task)


@contextmanager
def _reported(
    console: Console, label: str, *, n_total: int, n_done: int, every_s: float
) -> Iterator[Callable[[], None]]:
    begun_s, has_ended = time.monotonic(), threading.Event()

    def advance() -> None:
        nonlocal n_done
        n_done += 1

    def report() -> None:
        while not has_ended.wait(every_s):
            _print_line(console, f"  {label}: {n_done} of {n_total} after {time.monotonic() - begun_s:.0f} s")

    _print_line(console, f"… {label}: {n_done} of {n_total}")
    reporting = threading.Thread(target=report, daemon=True)
    reporting.start()
    try:
        yield advance
    finally:
        has_ended.set()
        reporting.join()
    _print_line(console, f"✓ {label}: {n_done} of {n_total} ({time.monotonic() - begun_s:.1f} s)")


def _print_line(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def n_of(n: int, thing: str) -> str:
    """The number with its noun, as in `1 line` and `2 lines`."""
    return f"{n:,} {thing}" if n == 1 else f"{n:,} {thing}s"
