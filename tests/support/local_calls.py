"""The calls of gateways to replicas within one process: what Ray does with them, without Ray.

Each call is a task at its replica, whose items arrive whether anybody reads them or not, and in any order beside
those of other calls. Replicas can be killed, messages of subscriptions held up.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

from bakehouse_replica.core.errors import EngineDead, Unavailable
from bakehouse_replica.core.step_message import Receipt, Received, ReturnAddress, StepMessage, Subscribe
from bakehouse_replica.core.story import ToldStory
from bakehouse_replica.core.types import Delivery, Request
from bakehouse_replica.engine import Engine
from bakehouse_replica.outbox import SILENT_S
from bakehouse_replica.service import ReplicaService
from bakehouse_router.replica_calls import Answers

T = TypeVar("T")
KILLED = "the replica was lost: killed by a test"


class LocalCall(Generic[T]):
    """A call in flight. `may_arrive` holds its items up on their way."""

    def __init__(self, items: AsyncGenerator[T, None], may_arrive: asyncio.Event | None = None) -> None:
        self._arrived: asyncio.Queue[T | Exception | None] = asyncio.Queue()
        self._may_arrive = may_arrive
        self.items: list[T] = []  # all that the replica has sent
        self.n_taken = 0
        self.end_was_taken = False
        self.was_cancelled = False
        self.is_prefilled = False
        self._broken_by: Exception | None = None
        self.task = asyncio.create_task(self._run(items))

    async def next(self) -> T | None:
        item = await self._arrived.get()
        if item is None or isinstance(item, Exception):
            self._arrived.put_nowait(item)  # the end is told as often as it is asked for
        if isinstance(item, Exception):
            raise item
        if self._may_arrive is not None:
            await self._may_arrive.wait()
        if self._broken_by is not None:
            raise self._broken_by
        self.n_taken += item is not None
        self.end_was_taken = item is None
        return item

    def mark_prefilled(self) -> None:
        self.is_prefilled = True

    def cancel(self) -> None:
        self.was_cancelled = self.was_cancelled or not self.task.done()
        self.task.cancel()

    def break_off(self, error: Exception) -> None:
        """The connection is lost, with what was on its way."""
        self._broken_by = error
        self._arrived.put_nowait(error)
        self.task.cancel()

    async def _run(self, items: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(items):
                async for item in items:
                    self.items.append(item)
                    self._arrived.put_nowait(item)
            self._arrived.put_nowait(None)
        except Exception as error:
            self._arrived.put_nowait(error)


async def cut_short(items: AsyncGenerator[T, None], n_items: int) -> AsyncGenerator[T, None]:
    """So many of the items, and then an end as if it were the right one."""
    async with aclosing(items):
        for _ in range(n_items):
            yield await anext(items)


class LocalReplica:
    """One replica and the calls to it."""

    def __init__(self, engine: Engine, *, silent_s: float = SILENT_S) -> None:
        self.engine = engine
        self.service = ReplicaService(engine, silent_s=silent_s)
        self.is_candidate = True
        self.is_alive = True
        self.messages_may_arrive = asyncio.Event()
        self.messages_may_arrive.set()
        self.ends_may_arrive = asyncio.Event()
        self.ends_may_arrive.set()
        self.requests: list[LocalCall[Delivery] | LocalCall[Delivery | Receipt]] = []
        self.subscriptions: list[LocalCall[StepMessage]] = []

    @property
    def n_ongoing(self) -> int:
        """As Serve counts: a drain ends at 0."""
        return sum(not call.task.done() for call in (*self.requests, *self.subscriptions))

    def kill(self) -> None:
        """As SIGKILL does: all calls break, none is told."""
        self.is_alive = self.is_candidate = False
        for call in (*self.requests, *self.subscriptions):
            if not call.task.done():
                call.break_off(EngineDead(KILLED))


class LocalCalls:
    """`ReplicaCalls` of one gateway; requests go to the first candidate."""

    def __init__(self, *replicas: LocalReplica) -> None:
        self.replicas = list(replicas)
        self.n_asked = 0
        self.received: Received | None = None  # what the gateway has told last
        self.is_cut_off = False  # a gateway that was killed: it says nothing any more

    def generate(self, request: Request) -> LocalCall[Delivery]:
        replica = self._candidate()
        if replica is None:
            return LocalCall(_none())
        call = LocalCall(replica.service.generate(request))
        replica.requests.append(call)
        return call

    def serve(self, request: Request, address: ReturnAddress) -> LocalCall[Delivery | Receipt]:
        replica = self._candidate()
        if replica is None:
            return LocalCall(_none())
        call = LocalCall(replica.service.serve(request, address), replica.ends_may_arrive)
        replica.requests.append(call)
        return call

    def subscribe(self, subscribe: Subscribe) -> LocalCall[StepMessage]:
        (replica,) = [each for each in self.replicas if each.engine.card.replica_id == subscribe.replica_id]
        call = LocalCall(replica.service.subscribe(subscribe), replica.messages_may_arrive)
        replica.subscriptions.append(call)
        return call

    async def ask_all(self, received: Received | None) -> Answers:
        if self.is_cut_off:
            return Answers(statuses=(), is_whole=False)
        self.received = received
        candidates = [each for each in self.replicas if each.is_candidate]
        statuses = [await each.service.status(received) for each in candidates]
        self.n_asked += 1
        return Answers(statuses=tuple(statuses), is_whole=True)

    async def explain_all(self, request_ids: Sequence[str]) -> tuple[ToldStory, ...]:
        alive = [each for each in self.replicas if each.is_alive]
        return tuple([told for each in alive for told in await each.service.explain(request_ids)])

    def _candidate(self) -> LocalReplica | None:
        return next((each for each in self.replicas if each.is_candidate), None)


async def _none() -> AsyncGenerator[T, None]:
    raise Unavailable("the replica deployment is not available")
    yield  # makes it a generator
