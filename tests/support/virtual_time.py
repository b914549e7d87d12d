"""Event loops whose clock jumps, so that no test depends on how long a machine takes for something.

A `VirtualLoop` jumps to the next timer where nothing else is left to do: for tests of timers alone. What is tested
must read the loop's clock, and wait for no thread and no other process: the clock would not wait for these. With
such things beside, `let_pass` makes a running loop jump once.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

P = ParamSpec("P")


class _JumpingSelector(selectors.DefaultSelector):
    """Waits for no time to pass: it lets `now_s` pass instead."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "nothing is left that could ever happen"
            self.now_s += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Runs an async test, which may have no async fixtures, on a loop of its own whose clock begins at 0."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


def let_pass(seconds: float) -> None:
    """Whatever the running loop was to do within these seconds is due at once, limits of time included."""
    loop = asyncio.get_running_loop()
    time_before = loop.time
    setattr(loop, "time", lambda: time_before() + seconds)  # noqa: B010 - a method
