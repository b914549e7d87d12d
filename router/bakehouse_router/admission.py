"""The gateway's queue: how much may wait for its first token, in requests and in prompt tokens.

Nothing queues here by itself: the replicas do. This counts what this gateway has sent and not yet heard of, and
refuses what would be too much, so that a client learns at once that it should come back later. The replica's own
limit stays behind it, for the sum over all gateways.
"""

import math
import time
from collections import deque
from collections.abc import Callable

from bakehouse_replica.core.errors import Overloaded

RATE_WINDOW_S = 30.0  # how fast the queue moves is judged by the departures of so long
MAX_RETRY_AFTER_S = 60.0
MAX_DEPARTURES = 4096


class Place:
    """One call's place in the queue; `leave` it at the first token or at the end, whichever comes first."""

    def __init__(self, queue: "WaitingQueue", n_requests: int, n_tokens: int) -> None:
        self._queue: WaitingQueue | None = queue
        self.n_requests = n_requests
        self.n_tokens = n_tokens

    def leave(self) -> None:
        """Give the place up; idempotent."""
        queue, self._queue = self._queue, None
        if queue is not None:
            queue._remove(self)


class WaitingQueue:
    """Counts what waits for its first token. `clock` gives seconds that never go back."""

    def __init__(self, *, max_requests: int, max_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._clock = clock
        self._departures: deque[tuple[float, int]] = deque(maxlen=MAX_DEPARTURES)
        self.n_requests = 0
        self.n_tokens = 0

    def enter(self, n_requests: int, n_tokens: int) -> Place:
        """A place for so many requests with so many prompt tokens together.

        An empty queue takes anything that a single call may ask for. Raises `Overloaded`, which says when the
        queue will have moved on.
        """
        if self.n_requests:
            self._refuse_beyond("requests", self.n_requests, n_requests, self._max_requests)
            self._refuse_beyond("prompt tokens", self.n_tokens, n_tokens, self._max_tokens)
        self.n_requests += n_requests
        self.n_tokens += n_tokens
        return Place(self, n_requests, n_tokens)

    def limit(self, *, max_requests: int, max_tokens: int) -> None:
        """Other limits for who comes from now on; who waits already stays."""
        self._max_requests = max_requests
        self._max_tokens = max_tokens

    def retry_after_s(self) -> float:
        """How long the queue will need to empty at the pace of its latest departures; 1 to 60 s."""
        now = self._clock()
        recent = [(left_at, n) for left_at, n in self._departures if now - left_at <= RATE_WINDOW_S]
        if not recent:
            return 1.0 if not self._departures else MAX_RETRY_AFTER_S
        span_s = max(now - recent[0][0], 1.0)
        rate = sum(n for _, n in recent) / span_s
        return min(max(math.ceil(self.n_requests / rate), 1.0), MAX_RETRY_AFTER_S)

    def _refuse_beyond(self, what: str, n_waiting: int, n_more: int, limit: int) -> None:
        if n_waiting + n_more > limit:
            raise Overloaded(
                f"{n_waiting} {what} are waiting here; with {n_more} more they would exceed the limit of {limit}",
                self.retry_after_s(),
            )

    def _remove(self, place: Place) -> None:
        self.n_requests -= place.n_requests
        self.n_tokens -= place.n_tokens
        self._departures.append((self._clock(), place.n_requests))
