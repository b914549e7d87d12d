"""What became of one request, once it is over: frozen, for its log line and its trace."""

from dataclasses import dataclass
from typing import Literal

from bakehouse_replica.core.story import Story
from bakehouse_replica.core.types import Cost

from bakehouse_router.api.errors import Problem
from bakehouse_router.attempts import Attempt
from bakehouse_router.calls import Call
from bakehouse_router.generation import CallUsage

Face = Literal["http", "grpc", "handle"]
Kind = Literal["chat", "completion", "response"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAttempts:
    """What became of one prompt of a request; `n_tokens`: generated for it."""

    made: tuple[Attempt, ...]
    n_tokens: int

    @property
    def queue_s(self) -> float | None:
        """For how long the first replica that answered had kept it waiting."""
        return next((attempt.queue_s for attempt in self.made if attempt.queue_s is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReport:
    """A request that is over. Moments are `time.monotonic`'s.

    `outcome`: `complete`, `cancelled` where the client left, else the error's code. `call` None: it could not be
    understood. `usage` None: nothing was started for it. `cost` None: no replica has told. `queued_at`: when it
    got its place in the gateway's queue. `texts` of the choices, where they are kept.
    """

    request_id: str
    face: Face
    kind: Kind
    received_at: float
    ended_at: float
    outcome: str
    tenant: str = ""
    call_id: str | None = None
    call: Call | None = None
    problem: Problem | None = None
    usage: CallUsage | None = None
    cost: Cost | None = None
    queued_at: float | None = None
    finishes: tuple[str, ...] = ()
    first_token_at: float | None = None
    prompts: tuple[PromptAttempts, ...] = ()
    texts: tuple[str, ...] = ()

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Those of all prompts."""
        return tuple(attempt for prompt in self.prompts for attempt in prompt.made)

    @property
    def replica_ids(self) -> tuple[str, ...]:
        """Who answered, each once."""
        return tuple(dict.fromkeys(name for attempt in self.attempts for name in attempt.replica_ids))

    @property
    def n_resumed(self) -> int:
        """How often a stream that had begun went on elsewhere."""
        return sum(attempt.n_before > 0 for attempt in self.attempts)

    @property
    def n_retried(self) -> int:
        """How often a prompt was sent again before anything of its answer had come."""
        return sum(attempt.n_before == 0 for prompt in self.prompts for attempt in prompt.made[1:])

    @property
    def queue_s(self) -> float | None:
        """How long replicas kept the request waiting; of several prompts, the one that waited longest."""
        return max((prompt.queue_s for prompt in self.prompts if prompt.queue_s is not None), default=None)

    @property
    def waited_s(self) -> dict[str, float]:
        """Seconds that replicas kept its choices waiting, by reason; `behind:` one before them for theirs."""
        waited_s: dict[str, float] = {}
        for total in (total for story in self.stories for total in story.waited):
            reason = f"{'behind:' if total.is_behind else ''}{total.reason}"
            waited_s[reason] = waited_s.get(reason, 0.0) + total.seconds
        return waited_s

    @property
    def n_preempted(self) -> int:
        """How often its choices have made way for others, as far as replicas have told."""
        return sum(story.n_preemptions for story in self.stories)

    @property
    def stories(self) -> tuple[Story, ...]:
        """Those that replicas have told."""
        return tuple(told.story for attempt in self.attempts for told in attempt.stories)

    @property
    def first_token_s(self) -> float | None:
        """From its arrival to its first output token."""
        return None if self.first_token_at is None else self.first_token_at - self.received_at

    @property
    def failed_here(self) -> bool:
        """Whether it failed by no fault of the client's."""
        return self.problem is not None and self.problem.status >= 500
