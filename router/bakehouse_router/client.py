"""The seam between gateway and replicas.

`bakehouse_replica.engine.Engine` satisfies `ReplicaClient` as it is, so gateway and engine are tested together
without Ray; `bakehouse_router.subscription_client` is the one that a cluster uses, and
`bakehouse_router.streaming_client` does the same more simply and slowly.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from bakehouse_replica.core.story import ToldStory
from bakehouse_replica.core.types import Delivery, ReplicaStatus, Request


class ReplicaClient(Protocol):
    """Sends requests to whichever replica suits and streams back what it produces."""

    def generate(self, request: Request) -> AsyncGenerator[Delivery, None]:
        """The request's deliveries, until each choice has had its terminal delta.

        Closing the generator cancels the request; cancelling is idempotent. Raises, on the first step,
        `InvalidRequest`, `Overloaded` or `Unavailable`; later `Unavailable` where the replica is lost.
        """
        ...

    async def statuses(self) -> tuple[ReplicaStatus, ...]:
        """Every known replica, those that do not serve too; never blocks for long, never raises."""
        ...

    async def explain(self, request_ids: Sequence[str]) -> tuple[ToldStory, ...]:
        """The stories of these requests that replicas know; never blocks for long, never raises."""
        ...

    async def close(self) -> None:
        """Cancel what is in flight and release resources; idempotent."""
        ...
