"""A `ReplicaClient` whose requests are streaming calls, each of which carries its own deltas.

The simple form: each token of each request costs what a message costs, 1.2 ms of CPU through Serve's default path.
`bakehouse_router.subscription_client` spares that; this one says what it has to do. But what a request has cost
that is closed before its end, nobody learns here: the call that would tell it is cancelled.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from bakehouse_replica.core.errors import BakehouseError
from bakehouse_replica.core.story import ToldStory
from bakehouse_replica.core.types import Delivery, ReplicaStatus, Request

from bakehouse_router.replica_calls import Call, ReplicaCalls
from bakehouse_router.replica_watch import ReplicaWatch

# After a request's last delivery its call ends by itself within milliseconds.
END_TIMEOUT_S = 0.1


class StreamingClient:
    """Requests by a streaming call each."""

    def __init__(
        self,
        calls: ReplicaCalls,
        *,
        status_period_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls = calls
        self._watch = ReplicaWatch(lambda: calls.ask_all(None), period_s=status_period_s, clock=clock)

    def start(self) -> None:
        """Begin to watch the replicas; needs a running event loop."""
        self._watch.start()

    async def close(self) -> None:
        """Stop watching. Requests in flight belong to whoever iterates them."""
        await self._watch.close()

    def check(self) -> None:
        """Raises what ended the watch over the replicas, if anything has."""
        self._watch.check()

    async def statuses(self) -> tuple[ReplicaStatus, ...]:
        """The replicas as of the last refresh, at most a status period and a timeout old."""
        return self._watch.statuses()

    async def explain(self, request_ids: Sequence[str]) -> tuple[ToldStory, ...]:
        """The stories of these requests that replicas know; never blocks for long, never raises."""
        return await self._calls.explain_all(request_ids)

    async def generate(self, request: Request) -> AsyncGenerator[Delivery, None]:
        """The request's deliveries; closing the generator cancels the request at its replica."""
        call = self._calls.generate(request)
        n_open = request.params.n
        try:
            delivery = await self._watch.first(call.next(), request)
            call.mark_prefilled()
            while delivery is not None:
                n_open -= sum(delta.finish is not None for delta in delivery.deltas)
                if not n_open:
                    await _let_end(call)
                yield delivery
                delivery = await call.next() if n_open else None
        finally:
            if n_open:  # otherwise the replica is done
                call.cancel()


async def _let_end(call: Call[Delivery]) -> None:
    """Wait for the end of a call that has delivered everything.

    Its charge is released then. Were the last delivery passed on before, the client's next prompt of the same
    prefix could find its home still charged with the whole prefix, and go elsewhere (7 of 170 times, busy cores).
    """
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            await call.next()
    except (TimeoutError, BakehouseError):  # the answer is whole all the same
        call.cancel()
