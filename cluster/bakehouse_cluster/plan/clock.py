"""Virtual time: seconds that pass as fast as events can be handled."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class VirtualClock:
    """Begins at 0 and jumps from event to event. Calling it tells the time, as other clocks do."""

    def __init__(self) -> None:
        self._now = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def __call__(self) -> float:
        """Seconds since the beginning."""
        return self._now

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """Does `action` at that moment; what is due at the same moment is done in the order in which it was asked.

        A moment that has passed is an error of the caller's.
        """
        assert moment >= self._now, f"{moment} has passed; it is {self._now}"
        heappush(self._events, (moment, next(self._order), action))

    def run(self) -> None:
        """Until nothing is left to do."""
        while self._events:
            self._now, _, action = heappop(self._events)
            action()
