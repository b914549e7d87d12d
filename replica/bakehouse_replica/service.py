"""What gateways ask of a replica, whatever carries their calls: requests, subscriptions, status."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

from bakehouse_replica.core.errors import Unavailable
from bakehouse_replica.core.live_limits import read_limits
from bakehouse_replica.core.step_message import Receipt, Received, ReturnAddress, StepMessage, Subscribe
from bakehouse_replica.core.story import ToldStory
from bakehouse_replica.core.types import Delivery, ReplicaStatus, Request
from bakehouse_replica.engine import Engine
from bakehouse_replica.outbox import SILENT_S, Outboxes
from bakehouse_replica.settings import LIVE_LIMITS


class ReplicaService:
    """An engine and the gateways that have subscribed to it. Used on one event loop."""

    def __init__(self, engine: Engine, *, silent_s: float = SILENT_S) -> None:
        """`silent_s`: after so long without a sign of life, a gateway's subscription and requests end."""
        self._engine = engine
        self._first_policy = engine.policy
        self._outboxes = Outboxes(silent_s)

    async def generate(self, request: Request) -> AsyncGenerator[Delivery, None]:
        """The request's deliveries; closing the generator cancels the request."""
        async with aclosing(self._engine.generate(request)) as deliveries:
            async for delivery in deliveries:
                yield delivery

    async def serve(self, request: Request, address: ReturnAddress) -> AsyncGenerator[Delivery | Receipt, None]:
        """Serve a request whose deltas go to the gateway's subscription, and end with a receipt.

        Where this gateway has not subscribed (a replica that has just appeared), they come here, as deliveries.
        Closing the generator cancels the request. Raises what `generate` does, and `Unavailable` where the
        subscription is lost before everything has been handed to it.
        """
        outbox = self._outboxes.of(address.gateway_id)
        if outbox is None:
            async with aclosing(self._engine.generate(request)) as deliveries:
                async for delivery in deliveries:
                    yield delivery
            return
        with outbox.feed(address, request.params.n) as feed:
            async with self._engine.serving(request, feed):
                await feed.ended()
        yield Receipt(subscription_id=outbox.subscribe.subscription_id)

    async def subscribe(self, subscribe: Subscribe) -> AsyncGenerator[StepMessage, None]:
        """The deltas of a gateway's requests that come from now on, one message a step.

        Closing the generator fails those requests of which not everything has been handed over. It ends by itself
        when the gateway has subscribed anew or been silent for too long. Raises `Unavailable` where another
        replica is meant.
        """
        if subscribe.replica_id != self._engine.card.replica_id:
            raise Unavailable(f"replica {subscribe.replica_id} was meant, this is {self._engine.card.replica_id}")
        with self._outboxes.open(subscribe) as outbox:
            async for message in outbox.messages():
                yield message

    def reconfigure(self, user_config: Mapping[str, object]) -> None:
        """Other limits, of `LIVE_LIMITS`, for whatever comes from now on; those not named are as at the start.

        Raises `ConfigError` for what is no limit, and changes nothing then.
        """
        self._engine.adopt(replace(self._first_policy, **read_limits(user_config, LIVE_LIMITS)))

    async def status(self, received: Received | None = None) -> ReplicaStatus:
        """What this replica is, how it is loaded, and what is wrong with it; `received` is from who asks."""
        if received is not None:
            self._outboxes.hear(received)
        (status,) = await self._engine.statuses()
        return status

    async def explain(self, request_ids: Sequence[str]) -> tuple[ToldStory, ...]:
        """The stories of those of these requests that are here, or were cancelled here not long ago."""
        return await self._engine.explain(request_ids)
