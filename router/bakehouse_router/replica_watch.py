"""What a gateway knows of its replicas from asking each of them for its status, time and again."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from bakehouse_replica.core.errors import Unavailable
from bakehouse_replica.core.types import ReplicaStatus, Request

from bakehouse_router.replica_calls import Answers

# A replica that stopped answering is shown as a problem for so long, then forgotten: Serve replaces a dead one
# in 2 to 12 s under another id (measured).
MISSING_SHOWN_S = 15.0
# How long a request waits while nobody serves: longer than the replacement of a crashed replica takes (3.3 s
# at a health check period of 1 s, measured).
NOBODY_SERVES_S = 10.0
T = TypeVar("T")


class ReplicaWatch:
    """Asks from `start` to `close`, once a period."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[Answers]],
        *,
        period_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._period_s = period_s
        self._clock = clock
        self._answers: dict[str, tuple[ReplicaStatus, float]] = {}
        self._served_at_s = clock()
        self._refresher: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; needs a running event loop."""
        self._refresher = asyncio.create_task(self._refresh_for_ever())

    async def close(self) -> None:
        """Stop asking; idempotent."""
        if self._refresher is not None:
            self._refresher.cancel()
            await asyncio.gather(self._refresher, return_exceptions=True)

    def check(self) -> None:
        """Raises what ended the watch, if anything has."""
        if self._refresher is not None and self._refresher.done():
            self._refresher.result()

    def statuses(self) -> tuple[ReplicaStatus, ...]:
        """The replicas as of the last round, at most a period and a timeout old."""
        now = time.monotonic()
        return tuple(replace(status, age_s=now - asked_s) for status, asked_s in self._answers.values())

    async def first(self, coming: Awaitable[T], request: Request) -> T:
        """What a request waits for first. Serve would wait without limit for a replica to appear; this does not.

        Raises `Unavailable` where nobody has served for too long, and whatever `coming` raises.
        """
        waiting = asyncio.ensure_future(coming)
        try:
            while not (await asyncio.wait({waiting}, timeout=self._period_s))[0]:
                silent_s = self._clock() - self._served_at_s
                if silent_s > NOBODY_SERVES_S:
                    raise Unavailable(f"no replica has served for {silent_s:.0f} s; request {request.request_id}")
            return waiting.result()
        finally:
            waiting.cancel()

    async def _refresh_for_ever(self) -> None:
        while True:
            now = self._clock()
            for status in (await self._ask()).statuses:
                self._answers[status.card.replica_id] = (status, now)
            self._answers = {
                replica_id: (_as_of(status, answered_s, now), answered_s)
                for replica_id, (status, answered_s) in self._answers.items()
                if now - answered_s < MISSING_SHOWN_S
            }
            if any(status.problem is None for status, _ in self._answers.values()):
                self._served_at_s = now
            await asyncio.sleep(self._period_s)


def _as_of(status: ReplicaStatus, answered_s: float, now: float) -> ReplicaStatus:
    """Nothing of what a silent replica counted is told on: it may be dead."""
    if answered_s == now:
        return status
    return replace(status, problem=f"silent for {now - answered_s:.1f} s", counted=())
