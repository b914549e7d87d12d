"""Carries a request from gateway to replica and its deltas back, each exactly once.

Which replica serves is decided inside the client. A replica lost before the first delta is made good here by
another attempt; after it, the loss is reported, and the journal holds what an exact resume needs. Where an engine
has died, nobody can tell whether this request was the cause or a bystander: it gets one more attempt and no third.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from bakehouse_replica.core.errors import DeadlineExceeded, EngineDead, Unavailable
from bakehouse_replica.core.types import Delivery, FailureKind, ReplicaStatus, Request, TokenDelta

from bakehouse_router.client import ReplicaClient
from bakehouse_router.journal import Journal

logger = logging.getLogger(__name__)

# Before each further attempt: by then the router has heard, in most cases, that the replica does not serve.
RETRY_DELAYS_S = (0.1, 0.5)


class Dispatcher:
    """Streams requests through a client, with retry, journal and one terminal delta per choice."""

    def __init__(self, client: ReplicaClient) -> None:
        self._client = client

    async def statuses(self) -> tuple[ReplicaStatus, ...]:
        """Every known replica, those that do not serve too."""
        return await self._client.statuses()

    async def stream(self, request: Request) -> AsyncGenerator[Delivery, None]:
        """The request's deliveries until each choice has ended; closing the generator cancels the request.

        Raises what `ReplicaClient.generate` raises: `Unavailable` after the last attempt, or where a replica is
        lost after the first delta; and `DeadlineExceeded` where the request's time ran out between two attempts.
        """
        journal = Journal(request)
        begun_at = asyncio.get_running_loop().time()
        for n_failures in range(len(RETRY_DELAYS_S) + 1):
            attempt = _with_time_left(request, asyncio.get_running_loop().time() - begun_at)
            if n_failures:  # the cancel of the previous attempt may still be on its way to the same replica
                attempt = replace(attempt, request_id=f"{request.request_id}-retry{n_failures}")
            try:
                async with aclosing(self._client.generate(attempt)) as deliveries:
                    async for delivery in deliveries:
                        fresh = tuple(filter(None, map(journal.accept, map(_alive, delivery.deltas))))
                        if n_failures:
                            fresh = tuple(replace(delta, request_id=request.request_id) for delta in fresh)
                        if fresh:
                            yield delivery if fresh == delivery.deltas else replace(delivery, deltas=fresh)
                if journal.is_finished:
                    return
                raise EngineDead(f"the stream of {request.request_id} ended before its choices did")
            except Unavailable as lost:
                n_more = (1 if isinstance(lost, EngineDead) else len(RETRY_DELAYS_S)) - n_failures
                if journal.has_begun or n_more <= 0:
                    raise
                logger.warning("request %s: %s; attempt %d", request.request_id, lost, n_failures + 2)
            await asyncio.sleep(RETRY_DELAYS_S[n_failures])


def _alive(delta: TokenDelta) -> TokenDelta:
    """The delta, unless it says that the engine has failed: that is the replica's loss, not the choice's end."""
    if delta.failure is not None and delta.failure.kind is FailureKind.ENGINE:
        raise EngineDead(delta.failure.message)
    return delta


def _with_time_left(request: Request, elapsed_s: float) -> Request:
    if request.timeout_s is None:
        return request
    if elapsed_s >= request.timeout_s:
        raise DeadlineExceeded(f"the request's {request.timeout_s:g} s passed before a replica answered")
    return replace(request, timeout_s=request.timeout_s - elapsed_s)
