"""The router's two contacts with Ray: the request router inside each handle, and the calls by a handle."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from random import Random
from typing import Generic, TypeVar

from bakehouse_replica.core.errors import BakehouseError, EngineDead, Unavailable
from bakehouse_replica.core.metric_table import ROUTING_REASONS
from bakehouse_replica.core.step_message import Receipt, Received, ReturnAddress, StepMessage, Subscribe
from bakehouse_replica.core.story import ToldStory
from bakehouse_replica.core.types import Delivery, ReplicaStatus, Request
from bakehouse_replica.core.wire import card_from_wire, load_from_wire
from grpc.aio import AioRpcError
from opentelemetry.context import attach, get_current
from ray.exceptions import RayError, RayTaskError
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from bakehouse_router.policy.pick import choose
from bakehouse_router.policy.views import ReplicaView
from bakehouse_router.replica_calls import Answers
from bakehouse_router.replicas import ReplicaTable
from bakehouse_router.routing import Routing, Routings
from bakehouse_router.tracing import UNTRACED

logger = logging.getLogger(__name__)

# A dead replica is noticed at once, because the call fails; one that lives answers in milliseconds, but took more
# than 2 s on two cores at load 10 (with 1 s here the gateway then answered 503 for a healthy replica).
STATUS_TIMEOUT_S = 5.0
# Somebody waits for it; a replica answers between two of its steps, or not within two seconds.
EXPLAIN_TIMEOUT_S = 3.0
T = TypeVar("T")


class KvAwareRouter(RequestRouter):
    """Serve's request router, deciding by `bakehouse_router.policy`.

    All calls come from one event loop, but for those of `mark_prefilled`, which is for any thread.
    """

    def initialize_state(self, **_kwargs: object) -> None:
        """Called once by Serve in place of a constructor."""
        self._table = ReplicaTable()
        self._prefilled: deque[tuple[str, float]] = deque()
        self._random = Random()
        self.decisions = dict.fromkeys(ROUTING_REASONS, 0)
        self.routings = Routings()

    def views(self) -> list[ReplicaView]:
        """What the policy would be given now."""
        while self._prefilled:
            self._table.mark_prefilled(*self._prefilled.popleft())
        return self._table.views(time.monotonic())

    def mark_prefilled(self, internal_request_id: str) -> None:
        """The first tokens of this call have come. It counts at the next choice."""
        self._prefilled.append((internal_request_id, time.monotonic()))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica per rank, the best first; a request is charged to the best at once.

        A subscription goes to the replica that it names and is not charged.
        """
        argument = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if pending_request is None or not isinstance(argument, Request | Subscribe):
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        if isinstance(argument, Subscribe):
            named = [each for each in candidate_replicas if each.replica_id.unique_id == argument.replica_id]
            # Any other refuses it. Given nobody, Serve would ask again for ever, though the call be cancelled, and
            # soon have none left of the few tasks that route.
            return [named or candidate_replicas]
        try:
            return self._rank(argument, candidate_replicas, pending_request)
        except Exception:
            # An exception here would hang the request for ever: Serve drops it with a log line and no answer.
            logger.exception(
                "request %s: routing failed, any replica will do", pending_request.metadata.request_id
            )
            return [candidate_replicas]

    def _rank(
        self, request: Request, candidates: list[RunningReplica], pending: PendingRequest
    ) -> list[list[RunningReplica]]:
        by_id = {replica.replica_id.unique_id: replica for replica in candidates}
        views = [view for view in self.views() if view.replica_id in by_id]
        choice = choose(request, views, self._random)
        logger.debug("request %s: %s", request.request_id, choice)
        self.decisions[choice.reason] += 1
        self.routings.note(request.request_id, choice, time.monotonic())
        known = {view.replica_id for view in views}
        unknown = [replica for replica_id, replica in by_id.items() if replica_id not in known]
        if choice.ranked:
            key = pending.metadata.internal_request_id
            self._table.charge(key, choice.ranked[0], request.params.n, time.monotonic())
            pending.future.add_done_callback(
                lambda chosen: self._table.abandon(key) if chosen.cancelled() else None
            )
        ranks = [[by_id[candidate.replica_id]] for candidate in choice.ranked]
        return [*ranks, unknown] if unknown else ranks

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the news of Serve's controller: who runs, what they are, what they last reported."""
        super().update_replicas(replicas)
        self._table.keep_only(replica.replica_id.unique_id for replica in replicas)
        for replica in replicas:
            if replica.replica_metadata:
                load, problem = load_from_wire(replica.routing_stats)
                self._table.update(card_from_wire(replica.replica_metadata), load, problem)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A request found the replica dead before the controller did."""
        super().on_replica_actor_died(replica_id)
        self._table.forget(replica_id.unique_id)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """A replica has accepted the request: it keeps the charge until the request ends."""
        self._table.accept(pending_request.metadata.internal_request_id, replica_id.unique_id)
        argument = pending_request.args[0] if pending_request.args else None
        if isinstance(argument, Request):
            self.routings.accept(argument.request_id, replica_id.unique_id, time.monotonic())

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """The call has ended, well or badly, or the replica has rejected it."""
        self._table.release(internal_request_id, replica_id.unique_id, time.monotonic())


class RayCall(Generic[T]):
    """A `Call` by a handle; errors of Ray and of the replica become ours.

    `mark_prefilled` is told the id by which the handle's router knows the call.
    """

    def __init__(self, response: DeploymentResponseGenerator[T], mark_prefilled: Callable[[str], None]) -> None:
        self._response = response
        self._mark_prefilled = mark_prefilled

    async def next(self) -> T | None:
        """What comes next, None at the end."""
        try:
            return await anext(self._response, None)
        except RayTaskError as error:
            if isinstance(error.cause, BakehouseError):
                raise error.cause from error
            raise
        except RayError as error:
            raise EngineDead(f"the replica was lost: {type(error).__name__}") from error
        except AioRpcError as error:
            raise EngineDead(f"the call to the replica has failed: {error.code().name}") from error
        except DeploymentUnavailableError as error:
            raise Unavailable("the replica deployment is not available") from error
        except asyncio.CancelledError as error:
            # Serve raises this, too, when it was the replica that cancelled the call.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise EngineDead("the replica cancelled the request") from error

    def mark_prefilled(self) -> None:
        """See `Call`."""
        self._mark_prefilled(self._response._request_metadata.internal_request_id)

    def cancel(self) -> None:
        """End it at the replica, too."""
        # A call that no replica was found for raises that error here again, in the place of ours.
        with suppress(DeploymentUnavailableError, RayError):
            self._response.cancel()  # type: ignore[no-untyped-call]
        self._cancel_unseen()

    def _cancel_unseen(self) -> None:
        """Where a replica has taken the call and nobody has looked since, Serve's own cancel does nothing.

        So it is on the router's own loop; of 32 streams that were left after 0.2 s, 1 or 2 ran on to their end.
        """
        routed = self._response._replica_result_future
        is_unseen = self._response._replica_result is None and routed.done() and not routed.cancelled()
        if is_unseen and routed.exception() is None:
            routed.result().cancel()  # type: ignore[no-untyped-call]


class RayCalls:
    """The calls to a deployment of `ReplicaActor`s by a handle."""

    def __init__(self, handle: DeploymentHandle[object], *, status_timeout_s: float = STATUS_TIMEOUT_S) -> None:
        self._generate = handle.options(method_name="generate", stream=True)
        # Not by reference is by gRPC, beside Ray's store and its references: a message of a subscription costs
        # both processes together 0.9 ms of CPU and not 2.4, a request 5.1 ms and not 7.3 (32 streams, two cores).
        direct = handle.options(_by_reference=False)
        self._serve = direct.options(method_name="serve", stream=True)
        self._subscribe = direct.options(method_name="subscribe", stream=True)
        self._direct = direct
        self._status_timeout_s = status_timeout_s

    def decisions(self) -> Mapping[str, int]:
        """How often the router of this handle has chosen a replica, by the reason; empty until it first has."""
        return dict(getattr(self._request_router(), "decisions", {}))

    def routed(self, request_id: str) -> Routing | None:
        """How the router of this handle has routed a request, as long as it knows."""
        routings: Routings | None = getattr(self._request_router(), "routings", None)
        return None if routings is None else routings.of(request_id)

    def generate(self, request: Request) -> RayCall[Delivery]:
        """See `ReplicaCalls`."""
        return self._call(self._generate, request)

    def serve(self, request: Request, address: ReturnAddress) -> RayCall[Delivery | Receipt]:
        """See `ReplicaCalls`."""
        return self._call(self._serve, request, address)

    def subscribe(self, subscribe: Subscribe) -> RayCall[StepMessage]:
        """See `ReplicaCalls`."""
        return self._call(self._subscribe, subscribe)

    async def ask_all(self, received: Received | None) -> Answers:
        """The answers of those that answer in time; a dead or silent replica simply gives none."""
        try:
            async with asyncio.timeout(self._status_timeout_s):
                # The public `results_async` loses all answers when a single replica is silent.
                calls = await self._direct.broadcast("status", received)._fetch_replica_results_async()
        except DeploymentUnavailableError:
            return Answers(statuses=(), is_whole=True)
        except (TimeoutError, RayError, AioRpcError):
            return Answers(statuses=(), is_whole=False)
        answers = await _gathered(calls, self._status_timeout_s)
        statuses = tuple(answer for answer in answers if isinstance(answer, ReplicaStatus))
        return Answers(statuses=statuses, is_whole=len(statuses) == len(answers))

    async def explain_all(self, request_ids: Sequence[str]) -> tuple[ToldStory, ...]:
        """See `ReplicaCalls`: all are asked, as who has a request that waits is known to its replica alone."""
        try:
            async with asyncio.timeout(EXPLAIN_TIMEOUT_S):
                calls = await self._direct.broadcast("explain", list(request_ids))._fetch_replica_results_async()
        except (TimeoutError, DeploymentUnavailableError, RayError, AioRpcError):
            return ()
        answers = await _gathered(calls, EXPLAIN_TIMEOUT_S)
        return tuple(story for answer in answers if isinstance(answer, tuple) for story in answer)

    def _call(self, handle: DeploymentHandle[object], *arguments: object) -> RayCall[T]:
        # An empty context gives each call an internal id of its own. Within a Serve request all calls would share
        # one, and a second concurrent call under the same id is never routed. Of the caller's only the trace is
        # kept.
        context = Context()
        context.run(attach, get_current() or UNTRACED)
        response = context.run(handle.remote, *arguments)
        assert isinstance(response, DeploymentResponseGenerator), "the handle was made with stream=True"
        return RayCall(response, self._mark_prefilled)

    def _mark_prefilled(self, internal_request_id: str) -> None:
        mark: Callable[[str], None] | None = getattr(self._request_router(), "mark_prefilled", None)
        if mark is not None:
            mark(internal_request_id)

    def _request_router(self) -> object:
        """Serve makes it, one for all options of a handle, from a copy of `KvAwareRouter` that came by pickle, and
        has no other way to it."""
        return getattr(getattr(self._direct._router, "_asyncio_router", None), "_request_router", None)


async def _gathered(calls: Sequence[ReplicaResult], timeout_s: float) -> list[object]:
    """What each has answered within that time, or why it has not."""
    asked = [asyncio.wait_for(call.get_async(), timeout_s) for call in calls]  # type: ignore[no-untyped-call]
    answers: list[object] = await asyncio.gather(*asked, return_exceptions=True)
    return answers
