"""Plays requests through one scheduler on a virtual clock, which the cost model moves."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bakehouse_replica.core.types import Draw, Request, Sampled, StepPlan, StepResult, TokenDelta


class Cost(Protocol):
    """How long a step takes."""

    def seconds(self, plan: StepPlan) -> float:
        """On the virtual clock."""
        ...


class Machine(Protocol):
    """What a scheduler offers its driver: our own, or one that it is compared with."""

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        ...

    def add(self, request: Request, now: float) -> None:
        """Queues a request."""
        ...

    def plan(self, now: float) -> StepPlan | None:
        """The next step."""
        ...

    def apply(self, result: StepResult, now: float) -> list[TokenDelta]:
        """Books what the step drew."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A request, and when it comes, in seconds of the virtual clock."""

    arrival_s: float
    request: Request


@dataclass(slots=True, kw_only=True)
class Record:
    """When the tokens of a request came; those of all its choices."""

    arrival_s: float
    token_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """From the arrival to the first token."""
        return self.token_s[0] - self.arrival_s

    @property
    def normalised_latency_s(self) -> float:
        """End-to-end latency by token of the output, the measure of Orca and of PagedAttention."""
        return (self.token_s[-1] - self.arrival_s) / len(self.token_s)


# Called with every plan, the seconds that it takes, and the share of all requests that have ended before it.
Watch = Callable[[StepPlan, float, float], None]


def _ignore(plan: StepPlan, seconds: float, ended_share: float) -> None:
    """Nobody watches."""


def play(machine: Machine, visits: Sequence[Visit], cost: Cost, watch: Watch = _ignore) -> list[Record]:
    """Serves all visits, in order of arrival, until the last has ended; what came when, in the same order.

    No request is shed or broken off: queues are as long as it takes.
    """
    records = {visit.request.request_id: Record(arrival_s=visit.arrival_s) for visit in visits}
    coming, now, n_ended = deque(visits), 0.0, 0
    while coming or machine.has_work:
        if not machine.has_work:
            now = max(now, coming[0].arrival_s)
        while coming and coming[0].arrival_s <= now:
            machine.add(coming.popleft().request, now)
        plan = machine.plan(now)
        assert plan is not None, "requests are open"
        seconds = cost.seconds(plan)
        watch(plan, seconds, n_ended / len(visits))
        now += seconds
        for delta in machine.apply(_drawn(plan), now):
            records[delta.request_id].token_s += [now] * len(delta.token_ids)
            n_ended += delta.finish is not None and delta.choice == 0
    return list(records.values())


def _drawn(plan: StepPlan) -> StepResult:
    """Each choice of a request draws the same token again and again, but no two choices the same one."""
    sampled = []
    for chunk in plan.chunks:
        if chunk.sample is not None:
            choices = range(chunk.sample.choice, chunk.sample.choice + len(chunk.sample.seeds))
            draws = tuple(Draw(token_ids=(choice,)) for choice in choices)
            sampled.append(Sampled(sequence_id=chunk.sequence_id, draws=draws))
    return StepResult(step=plan.step, sampled=tuple(sampled), elapsed_s=0.0)
