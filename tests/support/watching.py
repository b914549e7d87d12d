"""Watches a scheduler from outside: who waits for how long, through how many plans, and the stories it tells."""

from collections import Counter, defaultdict

from bakehouse_replica.core.blocks import BlockPool
from bakehouse_replica.core.sequence import Sequence
from bakehouse_replica.core.story import Story
from bakehouse_replica.core.types import (
    Capacity,
    Request,
    SchedulingPolicy,
    StepPlan,
    StepResult,
    TokenDelta,
)
from driving import Driver, MakeExecutor, make_fake

Choice = tuple[str, int]


class WatchedDriver(Driver):
    """A driver that measures for itself what stories tell: for how long, and in how many plans, who waited."""

    def __init__(
        self,
        capacity: Capacity,
        policy: SchedulingPolicy,
        *,
        pool_type: type[BlockPool] = BlockPool,
        make_executor: MakeExecutor = make_fake,
    ) -> None:
        super().__init__(capacity, policy, pool_type=pool_type, make_executor=make_executor)
        self.waited_s: defaultdict[Choice, float] = defaultdict(float)
        self.n_plans: Counter[Choice] = Counter()
        self.n_preempted: Counter[str] = Counter()
        self.stories: dict[str, Story] = {}
        self._clock = 0.0
        self._preempt = self.scheduler._roster.preempt
        self.scheduler._roster.preempt = self.roster_preempt  # type: ignore[method-assign]
        self._add, self._plan, self._apply = self.scheduler.add, self.scheduler.plan, self.scheduler.apply
        for method in (self.scheduler_add, self.scheduler_plan, self.scheduler_apply):
            setattr(self.scheduler, method.__name__.removeprefix("scheduler_"), method)

    def scheduler_add(self, request: Request, now: float, prepared_s: float = 0.0) -> None:
        self._pass(now)
        self._add(request, now, prepared_s)

    def scheduler_plan(self, now: float) -> StepPlan | None:
        self._pass(now)
        plan = self._plan(now)
        for sequence in self.scheduler._roster.waiting:
            self.n_plans[_choice(sequence)] += 1
        return plan

    def roster_preempt(self, sequence: Sequence) -> None:
        self.n_preempted[_choice(sequence)[0]] += 1
        self._preempt(sequence)

    def scheduler_apply(self, result: StepResult, now: float) -> list[TokenDelta]:
        self._pass(now)
        return self._apply(result, now)

    def live(self, request_id: str) -> Story:
        """The story so far of a request that is alive."""
        story = self.scheduler.explain(request_id, self.now)
        assert story is not None
        return story

    def _pass(self, now: float) -> None:
        for sequence in self.scheduler._roster.waiting:
            self.waited_s[_choice(sequence)] += now - self._clock
        self._clock = now

    def _receive(self, deltas: list[TokenDelta]) -> None:
        super()._receive(deltas)
        for delta in deltas:
            if delta.story is not None:
                assert delta.finish is not None
                assert delta.request_id not in self.stories, "a story is told once"
                self.stories[delta.request_id] = delta.story


def _choice(sequence: Sequence) -> Choice:
    return sequence.call.request.request_id, sequence.choice
