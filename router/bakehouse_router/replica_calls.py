"""The calls that gateways make to replicas, whatever carries them.

`bakehouse_router.ray_client` is what a cluster uses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from bakehouse_replica.core.step_message import Receipt, Received, ReturnAddress, StepMessage, Subscribe
from bakehouse_replica.core.story import ToldStory
from bakehouse_replica.core.types import Delivery, ReplicaStatus, Request

Item_co = TypeVar("Item_co", covariant=True)


class Call(Protocol[Item_co]):
    """A call in flight."""

    async def next(self) -> Item_co | None:
        """What comes next, None at the end. Raises our own errors: `EngineDead` where the replica is lost."""
        ...

    def mark_prefilled(self) -> None:
        """The request's first tokens have come, by this call or otherwise: who routes may know. Never raises."""
        ...

    def cancel(self) -> None:
        """End it at the replica, too; dropping it would not. Idempotent, never raises."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Which replicas have answered. `is_whole`: nobody else runs, as far as this process has been told."""

    statuses: tuple[ReplicaStatus, ...]
    is_whole: bool


class ReplicaCalls(Protocol):
    """Begins calls, each of them at once; errors come with the first item."""

    def generate(self, request: Request) -> Call[Delivery]:
        """`ReplicaService.generate` of the replica that suits best."""
        ...

    def serve(self, request: Request, address: ReturnAddress) -> Call[Delivery | Receipt]:
        """`ReplicaService.serve` of the replica that suits best."""
        ...

    def subscribe(self, subscribe: Subscribe) -> Call[StepMessage]:
        """`ReplicaService.subscribe` of the replica that it names; `Unavailable` where that one does not run."""
        ...

    async def ask_all(self, received: Received | None) -> Answers:
        """The statuses of all replicas that run; never blocks for long, never raises."""
        ...

    async def explain_all(self, request_ids: Sequence[str]) -> tuple[ToldStory, ...]:
        """The stories of these requests that any replica knows; never blocks for long, never raises."""
        ...
