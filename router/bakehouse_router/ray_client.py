"""The router's two contacts with Ray: the request router inside each handle, and the client around a handle."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from random import Random

from bakehouse_replica.core.errors import BakehouseError, EngineDead, Unavailable
from bakehouse_replica.core.types import Delivery, ReplicaStatus, Request
from bakehouse_replica.core.wire import card_from_wire, load_from_wire
from ray.exceptions import RayError, RayTaskError
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from bakehouse_router.policy.pick import choose
from bakehouse_router.policy.views import ReplicaView
from bakehouse_router.replicas import ReplicaTable

logger = logging.getLogger(__name__)

# A dead replica is noticed at once, because the call fails; one that lives answers in milliseconds, but took more
# than 2 s on two cores at load 10 (with 1 s here the gateway then answered 503 for a healthy replica).
STATUS_TIMEOUT_S = 5.0
# A replica that stopped answering is shown as a problem for so long, then forgotten: Serve replaces a dead one
# in 2 to 12 s under another id (measured).
MISSING_SHOWN_S = 15.0
# After a request's last delivery its call ends by itself within milliseconds.
END_TIMEOUT_S = 0.1
# How long a request waits while nobody serves: longer than the replacement of a crashed replica takes (3.3 s
# at a health check period of 1 s, measured).
NOBODY_SERVES_S = 10.0


class KvAwareRouter(RequestRouter):
    """Serve's request router, deciding by `bakehouse_router.policy`; all calls come from one event loop."""

    def initialize_state(self, **_kwargs: object) -> None:
        """Called once by Serve in place of a constructor."""
        self._table = ReplicaTable()
        self._random = Random()

    def views(self) -> list[ReplicaView]:
        """What the policy would be given now."""
        return self._table.views(time.monotonic())

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica per rank, the best first; the request is charged to the best at once."""
        if pending_request is None or not pending_request.args or not isinstance(pending_request.args[0], Request):
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        try:
            return self._rank(pending_request.args[0], candidate_replicas, pending_request)
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

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """The call has ended, well or badly, or the replica has rejected it."""
        self._table.release(internal_request_id, replica_id.unique_id, time.monotonic())


class RayReplicaClient:
    """A `ReplicaClient` over a handle of the replica deployment: one streaming call per request."""

    def __init__(
        self,
        handle: DeploymentHandle[object],
        *,
        status_period_s: float,
        status_timeout_s: float = STATUS_TIMEOUT_S,
        nobody_serves_s: float = NOBODY_SERVES_S,
    ) -> None:
        self._handle = handle
        self._calls = handle.options(method_name="generate", stream=True)
        self._status_period_s = status_period_s
        self._status_timeout_s = status_timeout_s
        self._nobody_serves_s = nobody_serves_s
        self._answers: dict[str, tuple[ReplicaStatus, float]] = {}
        self._served_at_s = time.monotonic()
        self._refresher: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch the replicas; needs a running event loop."""
        self._refresher = asyncio.create_task(self._refresh_for_ever())

    async def close(self) -> None:
        """Stop watching. Requests in flight belong to whoever iterates them."""
        if self._refresher is not None:
            self._refresher.cancel()
            await asyncio.gather(self._refresher, return_exceptions=True)

    async def generate(self, request: Request) -> AsyncGenerator[Delivery, None]:
        """The request's deliveries; closing the generator cancels the request at its replica."""
        # An empty context gives each call an internal id of its own. Within a Serve request all calls would
        # share one, and a second concurrent call under the same id is never routed.
        response = Context().run(self._call, request)
        n_open = request.params.n
        try:
            delivery = await self._first(response, request)
            while delivery is not None:
                n_open -= sum(delta.finish is not None for delta in delivery.deltas)
                if not n_open:
                    await _let_end(response)
                yield delivery
                delivery = await _next(response) if n_open else None
        finally:
            if n_open:  # otherwise the replica is done; dropping the response alone would not stop it
                _cancel(response)

    async def statuses(self) -> tuple[ReplicaStatus, ...]:
        """The replicas as of the last refresh, at most a status period and a timeout old."""
        return tuple(status for status, _ in self._answers.values())

    def check(self) -> None:
        """Raises what ended the watch over the replicas, if anything has."""
        if self._refresher is not None and self._refresher.done():
            self._refresher.result()

    def _call(self, request: Request) -> DeploymentResponseGenerator[Delivery]:
        response = self._calls.remote(request)
        assert isinstance(response, DeploymentResponseGenerator), "the handle was made with stream=True"
        return response

    async def _refresh_for_ever(self) -> None:
        while True:
            now = time.monotonic()
            for status in await self._ask_all():
                self._answers[status.card.replica_id] = (status, now)
            self._answers = {
                replica_id: (_as_of(status, answered_s, now), answered_s)
                for replica_id, (status, answered_s) in self._answers.items()
                if now - answered_s < MISSING_SHOWN_S
            }
            if any(status.problem is None for status, _ in self._answers.values()):
                self._served_at_s = now
            await asyncio.sleep(self._status_period_s)

    async def _ask_all(self) -> list[ReplicaStatus]:
        """The answers of those that answer in time; a dead or silent replica simply gives none."""
        try:
            async with asyncio.timeout(self._status_timeout_s):
                # The public `results_async` loses all answers when a single replica is silent.
                calls = await self._handle.broadcast("status")._fetch_replica_results_async()
        except (TimeoutError, RayError, DeploymentUnavailableError):
            return []
        asked = [
            asyncio.wait_for(call.get_async(), self._status_timeout_s)  # type: ignore[no-untyped-call]
            for call in calls
        ]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, ReplicaStatus)]

    async def _first(self, response: DeploymentResponseGenerator[Delivery], request: Request) -> Delivery | None:
        """The first delivery. Serve would wait without limit for a replica to appear; this does not."""
        first = asyncio.ensure_future(_next(response))
        try:
            while not (await asyncio.wait({first}, timeout=self._status_period_s))[0]:
                silent_s = time.monotonic() - self._served_at_s
                if silent_s > self._nobody_serves_s:
                    raise Unavailable(f"no replica has served for {silent_s:.0f} s; request {request.request_id}")
            return first.result()
        finally:
            first.cancel()


def _cancel(response: DeploymentResponseGenerator[Delivery]) -> None:
    """Cancel a call. One that no replica was found for raises that error here again, in the place of ours."""
    with suppress(DeploymentUnavailableError, RayError):
        response.cancel()  # type: ignore[no-untyped-call]


async def _let_end(response: DeploymentResponseGenerator[Delivery]) -> None:
    """Wait for the end of a call that has delivered everything.

    Its charge is released then. Were the last delivery passed on before, the client's next prompt of the same
    prefix could find its home still charged with the whole prefix, and go elsewhere (7 of 170 times, busy cores).
    """
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            await _next(response)
    except (TimeoutError, BakehouseError):  # the answer is whole all the same
        response.cancel()  # type: ignore[no-untyped-call]


async def _next(response: DeploymentResponseGenerator[Delivery]) -> Delivery | None:
    """The next delivery, None at the end; errors of Ray and of the replica become ours."""
    try:
        return await anext(response, None)
    except RayTaskError as error:
        if isinstance(error.cause, BakehouseError):
            raise error.cause from error
        raise
    except RayError as error:
        raise EngineDead(f"the replica was lost: {type(error).__name__}") from error
    except DeploymentUnavailableError as error:
        raise Unavailable("the replica deployment is not available") from error
    except asyncio.CancelledError as error:
        # Serve raises this, too, when it was the replica that cancelled the call.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise EngineDead("the replica cancelled the request") from error


def _as_of(status: ReplicaStatus, answered_s: float, now: float) -> ReplicaStatus:
    return status if answered_s == now else replace(status, problem=f"silent for {now - answered_s:.1f} s")
