"""Carries a request from gateway to replica and its deltas back, each exactly once.

Which replica serves is decided inside the client. A lost replica is made good here, unseen by whoever reads the
stream: before the first delta by another attempt, after it by exact resume. Then each choice that has not ended
goes on as a request of its own, with the ids that the journal holds as output that stands. Noise is keyed by seed
and position, so what follows is what would have followed.

Where an engine has died, nobody can tell whether this request was the cause or a bystander: it gets one more
attempt and no third, unless there is progress between the two. Where nobody serves, a stream that has begun waits
for as long as a replica may take to be replaced; before that, whoever asks is better served by a refusal.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from bakehouse_replica.core.errors import DeadlineExceeded, EngineDead, Unavailable
from bakehouse_replica.core.story import ToldStory
from bakehouse_replica.core.types import Delivery, FailureKind, FinishReason, ReplicaStatus, Request, TokenDelta

from bakehouse_router.attempts import Attempts
from bakehouse_router.client import ReplicaClient
from bakehouse_router.journal import Journal
from bakehouse_router.merging import merged
from bakehouse_router.routing import Routing

logger = logging.getLogger(__name__)

# Before each further attempt: by then the router has heard, in most cases, that the replica does not serve.
RETRY_DELAYS_S = (0.1, 0.5)
# From the loss of a stream that has begun: models of some gigabytes load in less.
RESUME_WAIT_S = 180.0
# However much progress there is between them: far more than a deployment loses replicas while one stream runs.
MAX_DEATHS = 32


@dataclass(frozen=True, slots=True)
class _Part:
    """What one attempt asks for: `request`, whose choice k is choice `first_choice + k` of the client's."""

    first_choice: int
    request: Request


@dataclass(slots=True)
class _Losses:
    """The losses of one stream; those in vain are those since it last got further."""

    resume_wait_s: float
    n_all: int = 0
    n_dead: int = 0
    n_in_vain: int = 0
    n_dead_in_vain: int = 0
    n_emitted: int = 0
    since: float = 0.0
    cause: Unavailable | None = None  # the first of those in vain

    def delay_after(self, lost: Unavailable, n_emitted: int, now: float) -> float | None:
        """Counts a loss after so many tokens; for how long to wait before the next attempt, None for no more."""
        if self.n_all == 0 or n_emitted > self.n_emitted:
            self.n_in_vain, self.n_dead_in_vain, self.n_emitted, self.since = 0, 0, n_emitted, now
            self.cause = lost
        self.n_all += 1
        self.n_in_vain += 1
        self.n_dead += isinstance(lost, EngineDead)
        self.n_dead_in_vain += isinstance(lost, EngineDead)
        waits_on = n_emitted > 0 and now - self.since < self.resume_wait_s
        if self.n_dead > MAX_DEATHS or self.n_dead_in_vain > 1:
            return None
        if self.n_in_vain > len(RETRY_DELAYS_S) and not waits_on:
            return None
        return RETRY_DELAYS_S[min(self.n_in_vain, len(RETRY_DELAYS_S)) - 1]


class Dispatcher:
    """Streams requests through a client, with resume, journal and one terminal delta per choice."""

    def __init__(
        self,
        client: ReplicaClient,
        *,
        resume_wait_s: float = RESUME_WAIT_S,
        routed: Callable[[str], Routing | None] = lambda request_id: None,
    ) -> None:
        """`resume_wait_s`: for so long a stream that has begun waits while nobody serves.

        `routed`: how a request was routed, by its id, where the client chooses and knows.
        """
        self._client = client
        self._resume_wait_s = resume_wait_s
        self._routed = routed

    async def statuses(self) -> tuple[ReplicaStatus, ...]:
        """Every known replica, those that do not serve too."""
        return await self._client.statuses()

    async def explain(self, request_ids: Sequence[str]) -> tuple[ToldStory, ...]:
        """The stories of these requests that replicas know; never blocks for long, never raises."""
        return await self._client.explain(request_ids)

    async def stream(self, request: Request, attempts: Attempts | None = None) -> AsyncGenerator[Delivery, None]:
        """The request's deliveries until each choice has ended; closing the generator cancels the request.

        `attempts`, if given, hears of each.
        Raises what `ReplicaClient.generate` raises: `Unavailable` after the last attempt; and `DeadlineExceeded`
        where the request's time ran out between two attempts.
        """
        journal, clock = Journal(request), asyncio.get_running_loop().time
        begun_at, losses = clock(), _Losses(self._resume_wait_s)
        attempts = Attempts() if attempts is None else attempts
        while True:
            parts = _parts(request, journal, losses.n_all, clock() - begun_at)
            attempts.begin(journal.n_tokens, [part.request.request_id for part in parts], self._routed)
            heard: str | None = None
            try:
                async with aclosing(self._attempt(parts, request.request_id, attempts)) as deliveries:
                    async for delivery in deliveries:
                        for delta in delivery.deltas:
                            if delta.cost is not None:
                                attempts.pay(delta.cost)
                        fresh, loss = _taken(delivery.deltas, journal)
                        if fresh:
                            if delivery.replica_id != heard:
                                heard = delivery.replica_id
                                attempts.hear(delivery)
                            yield delivery if fresh == delivery.deltas else replace(delivery, deltas=fresh)
                        if loss is not None:
                            raise loss
                if journal.is_finished:
                    return
                raise EngineDead(f"the stream of {request.request_id} ended before its choices did")
            except Unavailable as lost:
                attempts.end(loss=lost.message)
                delay_s = _delay_after(lost, losses, journal.n_emitted, clock())
                logger.warning("request %s: %s; attempt %d", request.request_id, lost, losses.n_all + 1)
            finally:
                attempts.end()
            await asyncio.sleep(delay_s)

    def _attempt(self, parts: list[_Part], request_id: str, attempts: Attempts) -> AsyncGenerator[Delivery, None]:
        """The parts' deliveries, as those of the client's request and choices. Raises where one is lost."""
        streams = [self._deliveries(part, request_id, attempts) for part in parts]
        return streams[0] if len(streams) == 1 else merged(streams)

    async def _deliveries(
        self, part: _Part, request_id: str, attempts: Attempts
    ) -> AsyncGenerator[Delivery, None]:
        is_own = part.first_choice == 0 and part.request.request_id == request_id
        async with aclosing(self._client.generate(part.request)) as deliveries:
            async for delivery in deliveries:
                for delta in delivery.deltas:
                    if delta.story is not None:
                        told = ToldStory(
                            replica_id=delivery.replica_id, request_id=part.request.request_id, story=delta.story
                        )
                        attempts.tell(told)
                yield delivery if is_own else _renamed(delivery, request_id, part.first_choice)


def _delay_after(lost: Unavailable, losses: _Losses, n_emitted: int, now: float) -> float:
    """For how long to wait before the next attempt. Raises where there is to be none."""
    delay_s = losses.delay_after(lost, n_emitted, now)
    if delay_s is not None:
        return delay_s
    if n_emitted and losses.cause is not None and losses.cause is not lost:
        raise losses.cause from lost  # what broke the stream, not who could not go on with it
    raise lost


def _renamed(delivery: Delivery, request_id: str, first_choice: int) -> Delivery:
    deltas = (
        replace(delta, request_id=request_id, choice=first_choice + delta.choice) for delta in delivery.deltas
    )
    return replace(delivery, deltas=tuple(deltas))


def _parts(request: Request, journal: Journal, n_losses: int, elapsed_s: float) -> list[_Part]:
    """What is still to be had of the request. Raises `DeadlineExceeded`."""
    whole = [(0, request)] if journal.n_emitted == 0 else journal.resume_requests()
    return [_Part(choice, _again(part, n_losses, elapsed_s)) for choice, part in whole]


def _again(request: Request, n_losses: int, elapsed_s: float) -> Request:
    """The request for the next attempt, with the time that is left."""
    if request.timeout_s is not None:
        if elapsed_s >= request.timeout_s:
            raise DeadlineExceeded(f"the request's {request.timeout_s:g} s passed before a replica answered")
        request = replace(request, timeout_s=request.timeout_s - elapsed_s)
    if n_losses:  # the cancel of the attempt before may still be on its way to the same replica
        request = replace(request, request_id=f"{request.request_id}-retry{n_losses}")
    return request


def _taken(deltas: tuple[TokenDelta, ...], journal: Journal) -> tuple[tuple[TokenDelta, ...], Unavailable | None]:
    """What is new of these, and the loss of the replica where one of them tells it."""
    fresh: list[TokenDelta] = []
    for delta in deltas:
        loss = _loss(delta)
        if loss is not None:
            return tuple(fresh), loss
        news = journal.accept(delta)
        if news is not None:
            fresh.append(news)
    return tuple(fresh), None


def _loss(delta: TokenDelta) -> Unavailable | None:
    """What a delta says that is not the choice's end, but the replica's."""
    if delta.failure is not None and delta.failure.kind is FailureKind.ENGINE:
        return EngineDead(delta.failure.message)
    if delta.finish is FinishReason.CANCELLED:
        return Unavailable("the replica cancelled this request; it is probably going down")
    return None
