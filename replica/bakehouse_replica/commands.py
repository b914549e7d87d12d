"""What event loops ask of the engine's thread; obeyed in order of arrival, between steps."""

from concurrent.futures import Future
from dataclasses import dataclass

from bakehouse_replica.core.errors import BakehouseError
from bakehouse_replica.core.story import Story
from bakehouse_replica.core.types import Request, SchedulingPolicy
from bakehouse_replica.mailbox import Recipient


@dataclass(frozen=True, slots=True)
class Add:
    """Serve this request and deliver its deltas to this recipient. `prepared_s`: spent on its grammar before."""

    request: Request
    recipient: Recipient
    prepared_s: float = 0.0


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
class Explain:
    """Tell the stories so far of those of these requests that are known, by their ids."""

    request_ids: tuple[str, ...]
    answer: Future[dict[str, Story]]


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


Command = Add | Abort | Adopt | Drain | Explain | Fail | Stop
