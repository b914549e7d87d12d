"""A gateway's subscriptions to its replicas, and the requests whose deltas they bring.

There is one subscription to each replica that runs. It is not resumed: where it breaks, every request that has it
as its source fails at once. That is known of a request from its first delta on, or from the receipt that ends its
call. Before, only the replica knows where it would have delivered, and fails the call. So a request whose
subscription is lost ends by one of the two, and a request of another subscription by neither.

A replica that is being stopped waits for its subscriptions to end. One that does not run any more, as far as Serve
has told, gets no new requests from here. Its subscription is closed as soon as none of the requests of that moment
can be there still.
"""

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count

from bakehouse_replica.core.errors import EngineDead, Unavailable
from bakehouse_replica.core.maker import maker_of
from bakehouse_replica.core.step_message import Received, ReturnAddress, StepMessage, Subscribe, unpack
from bakehouse_replica.core.types import Cost, Delivery, Request, TokenDelta
from bakehouse_replica.mailbox import Mailbox

from bakehouse_router.replica_calls import Call

logger = logging.getLogger(__name__)

Pay = Callable[[str, Cost], None]  # tenant and cost

# Of requests whose readers have left before the cost came: it comes after a step, or is lost with its replica.
MAX_LEFT_STREAMS = 4096

_make_delivery = maker_of(Delivery)


class Receiver:
    """The deltas of one request, whichever way they come."""

    def __init__(self, request: Request, address: ReturnAddress) -> None:
        self.address = address
        self.source: Subscribe | None = None  # known from the first delta on, or the receipt
        self.replica_id: str | None = None  # known from the first delta on
        self._mailbox = Mailbox(request.params.n)

    @property
    def is_complete(self) -> bool:
        """Whether each choice's terminal delta, or an error, has arrived."""
        return self._mailbox.is_complete

    @property
    def is_finished(self) -> bool:
        """Whether everything has been taken."""
        return self._mailbox.is_finished

    def put(self, source: Subscribe, delta: TokenDelta) -> None:
        """Add a delta that this subscription has brought."""
        self.source, self.replica_id = source, source.replica_id
        self._mailbox.put(delta)

    def put_all(self, delivery: Delivery) -> None:
        """Add what the request's own call has brought."""
        self.replica_id = delivery.replica_id
        for delta in delivery.deltas:
            self._mailbox.put(delta)

    def fail(self, error: Exception) -> None:
        """End the request with an error, unless it is complete."""
        if not self.is_complete:
            self._mailbox.put(error)

    def leave(self, pay: Callable[[Cost], None]) -> None:
        """Nobody takes any more; `pay` gets what the request has cost, unless that has been taken."""
        self._mailbox.leave(pay)

    async def take(self) -> Delivery:
        """Wait for news and take all of it. Raises the error put, after what was there before it."""
        deltas = await self._mailbox.take()
        assert self.replica_id is not None, "a delta has come from somewhere"
        return _make_delivery(replica_id=self.replica_id, deltas=deltas)


class _Subscription:
    """One subscription as its gateway knows it."""

    def __init__(self, subscribe: Subscribe) -> None:
        self.subscribe = subscribe
        self.n_messages = 0
        self.left_before: int | None = None  # streams from this number on are of requests that came later
        self.task: asyncio.Task[None] | None = None


class Subscriptions:
    """All subscriptions of one gateway, used on one event loop."""

    def __init__(self, call: Callable[[Subscribe], Call[StepMessage]], pay: Pay) -> None:
        """`pay` gets the tenant and the cost of requests that their readers have left before they had it."""
        self._call = call
        self._pay = pay
        self._left: OrderedDict[int, Receiver] = OrderedDict()  # by stream, oldest first
        self._gateway_id = secrets.token_hex(8)
        self._names = count()
        self._open: dict[str, _Subscription] = {}
        self._next_stream = 0
        self._receivers: dict[int, Receiver] = {}
        self._choices: dict[int, tuple[str, int]] = {}

    def received(self) -> Received:
        """What to tell the replicas."""
        return Received(
            gateway_id=self._gateway_id,
            n_messages={each.subscribe.subscription_id: each.n_messages for each in self._open.values()},
        )

    def follow(self, replica_ids: Collection[str], *, is_whole: bool) -> None:
        """Subscribe to each of these replicas; where nobody else runs, let go of others when it may be."""
        for replica_id in replica_ids:
            if replica_id in self._open:
                self._open[replica_id].left_before = None
            else:
                self._begin(replica_id)
        for replica_id, subscription in self._open.items():
            if is_whole and replica_id not in replica_ids:
                if subscription.left_before is None:
                    subscription.left_before = self._next_stream
                if subscription.task is not None and not self._may_have_requests(subscription):
                    subscription.task.cancel()

    @contextmanager
    def receiving(self, request: Request) -> Iterator[Receiver]:
        """Where a request's deltas arrive, as long as the context lasts."""
        n_choices = request.params.n
        address = ReturnAddress(gateway_id=self._gateway_id, first_stream=self._next_stream)
        streams = range(self._next_stream, self._next_stream + n_choices)
        self._next_stream += n_choices
        receiver = Receiver(request, address)
        for choice, stream in enumerate(streams):
            self._receivers[stream] = receiver
            self._choices[stream] = (request.request_id, choice)
        try:
            yield receiver
        finally:
            receiver.leave(partial(self._pay, request.tenant))
            for stream in streams:
                del self._receivers[stream], self._choices[stream]
                if not receiver.is_complete:
                    self._left[stream] = receiver
            while len(self._left) > MAX_LEFT_STREAMS:
                self._left.popitem(last=False)

    def expect(self, receiver: Receiver, subscription_id: str) -> None:
        """The replica has handed all of a request to this subscription: it arrives there, or is lost with it."""
        for subscription in self._open.values():
            if subscription.subscribe.subscription_id == subscription_id:
                receiver.source = subscription.subscribe
                return
        receiver.fail(EngineDead("the subscription that had the end of this request was lost"))

    async def close(self) -> None:
        """End all subscriptions; idempotent."""
        tasks = [each.task for each in self._open.values() if each.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, replica_id: str) -> None:
        subscription_id = f"{self._gateway_id}-{next(self._names)}"
        subscription = _Subscription(
            Subscribe(replica_id=replica_id, gateway_id=self._gateway_id, subscription_id=subscription_id)
        )
        self._open[replica_id] = subscription
        subscription.task = asyncio.create_task(self._run(subscription))

    async def _run(self, subscription: _Subscription) -> None:
        replica_id = subscription.subscribe.replica_id
        call = self._call(subscription.subscribe)
        lost = Unavailable("the subscription to the replica has ended")
        try:
            while (message := await call.next()) is not None:
                subscription.n_messages += 1
                for stream, delta in unpack(message, self._choices.get):
                    self._receivers[stream].put(subscription.subscribe, delta)
                for stream, delta in message.others:
                    if delta.cost is not None and stream in self._left:
                        self._left.pop(stream).put(subscription.subscribe, delta)
        except Unavailable as error:
            lost = error
            logger.warning("the subscription to replica %s is lost: %s", replica_id, error)
        finally:
            call.cancel()
            del self._open[replica_id]
            for receiver in self._receivers.values():
                if receiver.source is subscription.subscribe:
                    receiver.fail(type(lost)(lost.message))  # one each, for each is raised with its own traceback

    def _may_have_requests(self, subscription: _Subscription) -> bool:
        left_before = subscription.left_before
        assert left_before is not None, "asked of a replica that has left"
        return any(
            stream < left_before and receiver.replica_id in (None, subscription.subscribe.replica_id)
            for stream, receiver in self._receivers.items()
        )
