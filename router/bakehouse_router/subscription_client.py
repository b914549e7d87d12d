"""A `ReplicaClient` whose deltas come in one message per step and replica, for all its requests together.

Each request is a call of its own all the same: Serve routes it, counts it and cancels it, and it tells of refusals
and of the replica's loss. It ends when the request has ended there.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from bakehouse_replica.core.errors import EngineDead
from bakehouse_replica.core.step_message import Receipt
from bakehouse_replica.core.story import ToldStory
from bakehouse_replica.core.types import Cost, Delivery, ReplicaStatus, Request

from bakehouse_router.replica_calls import Answers, Call, ReplicaCalls
from bakehouse_router.replica_watch import ReplicaWatch
from bakehouse_router.streaming_client import END_TIMEOUT_S
from bakehouse_router.subscription import Pay, Receiver, Subscriptions


def _pay_nobody(tenant: str, cost: Cost) -> None:
    """For who counts nothing."""


class SubscriptionClient:
    """Requests by a call each, deltas by a subscription to each replica."""

    def __init__(
        self,
        calls: ReplicaCalls,
        *,
        status_period_s: float,
        clock: Callable[[], float] = time.monotonic,
        pay: Pay = _pay_nobody,
    ) -> None:
        """`pay` gets the tenant and the cost of each request that is closed before its end, when that is known."""
        self._calls = calls
        self._subscriptions = Subscriptions(calls.subscribe, pay)
        self._watch = ReplicaWatch(self._ask, period_s=status_period_s, clock=clock)

    def start(self) -> None:
        """Begin to watch the replicas and to subscribe to them; needs a running event loop."""
        self._watch.start()

    async def close(self) -> None:
        """Stop watching and end the subscriptions, and with them what they still bring."""
        await self._watch.close()
        await self._subscriptions.close()

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
        with self._subscriptions.receiving(request) as receiver:
            call = self._calls.serve(request, receiver.address)
            reader = asyncio.create_task(self._read(call, receiver))
            try:
                delivery = await self._watch.first(receiver.take(), request)
                call.mark_prefilled()
                while True:
                    if receiver.is_finished:
                        # So that its charge is released before the client can ask again: see `StreamingClient`.
                        await asyncio.wait({reader}, timeout=END_TIMEOUT_S)
                    yield delivery
                    if receiver.is_finished:
                        return
                    delivery = await receiver.take()
            finally:
                if not reader.done():
                    reader.cancel()
                    call.cancel()

    async def _ask(self) -> Answers:
        answers = await self._calls.ask_all(self._subscriptions.received())
        replica_ids = [status.card.replica_id for status in answers.statuses]
        self._subscriptions.follow(replica_ids, is_whole=answers.is_whole)
        return answers

    async def _read(self, call: Call[Delivery | Receipt], receiver: Receiver) -> None:
        """See a request's call to its end. What it raises is raised where the request is read."""
        try:
            has_receipt = False
            while (item := await call.next()) is not None:
                if isinstance(item, Receipt):
                    has_receipt = True
                    self._subscriptions.expect(receiver, item.subscription_id)
                else:
                    receiver.put_all(item)
            if not has_receipt:
                receiver.fail(EngineDead("the call ended before its request did"))
        except Exception as error:
            receiver.fail(error)
