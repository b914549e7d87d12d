"""Hands items over from the tasks that have them to the one that waits, which also hears when none comes."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """What has arrived and was not taken. Create it and use it on one event loop; one task may wait at a time.

    The invariant of the timer: at most one is set, and it is due no later than the wait that is on ends. It is
    left standing when an item comes and looks again when it is due, so that a stream that never rests sets one a
    pause and not one an item.
    """

    def __init__(self, pause_s: float) -> None:
        """`pause_s`: how long `take` waits."""
        self._loop = asyncio.get_running_loop()
        self._pause_s = pause_s
        self._items: deque[Item] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._waits_until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def put(self, item: Item) -> None:
        """Add an item; never waits."""
        self._items.append(item)
        self._wake()

    async def take(self, until: float | None = None) -> list[Item]:
        """All items, once there is one; none after a pause without any, or at `until` by the loop's clock."""
        if not self._items:
            await self._wait(until)
        taken = list(self._items)
        self._items.clear()
        return taken

    def close(self) -> None:
        """Leave no timer behind; items may still be put and taken."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _wait(self, until: float | None) -> None:
        self._waits_until = self._loop.time() + self._pause_s
        if until is not None:
            self._waits_until = min(self._waits_until, until)
        if self._timer is None or self._timer.when() > self._waits_until:
            self.close()
            self._timer = self._loop.call_at(self._waits_until, self._look)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _look(self) -> None:
        """The timer is due: the wait that it was set for may have ended, and another begun."""
        self._timer = None
        if self._waiter is None:
            return
        if self._loop.time() >= self._waits_until:
            self._wake()
        else:
            self._timer = self._loop.call_at(self._waits_until, self._look)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
