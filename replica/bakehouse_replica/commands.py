"""What event loops ask of the engine's thread; obeyed in order of arrival, between steps."""

from concurrent.futures import Future
from dataclasses import dataclass

from bakehouse_replica.core.errors import BakehouseError
from bakehouse_replica.core.types import Request, SchedulingPolicy
from bakehouse_replica.mailbox import Recipient


@dataclass(frozen=True, slots=True)
class Add:
    """Serve this request and deliver its deltas to this recipient."""

    request: Request
    recipient: Recipient


@dataclass(frozen=True, slots=True)
class Abort:
    """`recipient` None aborts whichever request has the id; else only the one that goes to this recipient."""

    request_id: str
    recipient: Recipient | None = None


@dataclass(frozen=True, slots=True)
class Adopt:
    """Schedule by this policy from now on."""

    policy: SchedulingPolicy


@dataclass(frozen=True, slots=True)
class Drain:
    """Tell when no request is left."""

    is_idle: Future[None]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The executor has broken by itself, perhaps while no step ran."""

    error: BakehouseError


Command = Add | Abort | Adopt | Drain | Fail | Stop
