"""Steps that are computed on the host, by the thread that takes their result.

All that several steps in flight need where nothing runs beside that thread: each step waits for its turn, and by
then what the step before has drawn is known, so that placeholders give way to tokens.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

from bakehouse_replica.core.maker import maker_of
from bakehouse_replica.core.types import Chunk, StepPlan, StepResult

_new_chunk = maker_of(Chunk)
_ANY_TOKEN = 0  # follows a draw without tokens: that has ended the choice, and nobody reads what comes of it


class HostSteps:
    """The steps begun, in order. `carry_out` gets a plan without placeholders, and when the step was begun."""

    def __init__(self, carry_out: Callable[[StepPlan, float], StepResult], max_flights: int) -> None:
        self._carry_out = carry_out
        self._max_flights = max_flights
        self._begun: deque[StepPlan] = deque()
        self._last: StepResult | None = None

    def begin(self, plan: StepPlan) -> "HostStep":
        """Queues a step."""
        assert len(self._begun) < self._max_flights, (
            f"step {plan.step} begins while {len(self._begun)} are in flight"
        )
        self._begun.append(plan)
        return HostStep(self, plan, perf_counter())

    def finish(self, plan: StepPlan, begun_at: float) -> StepResult:
        """Carries out the oldest step, which must be that of `plan`."""
        assert next(iter(self._begun), None) is plan, f"the result of step {plan.step} is taken out of turn"
        self._begun.popleft()
        self._last = self._carry_out(self._without_placeholders(plan), begun_at)
        return self._last

    def _without_placeholders(self, plan: StepPlan) -> StepPlan:
        if not any(chunk.follows_draw for chunk in plan.chunks):
            return plan
        last = self._last
        assert last is not None, f"step {plan.step} follows draws, and is the first"
        assert last.step == plan.step - 1, f"step {plan.step} follows draws of step {last.step}"
        drawn = {sampled.sequence_id: sampled.draws[0].token_ids for sampled in last.sampled}
        chunks = tuple(
            _filled(chunk, drawn[chunk.sequence_id]) if chunk.follows_draw else chunk for chunk in plan.chunks
        )
        return replace(plan, chunks=chunks)


@dataclass(frozen=True, slots=True, eq=False)
class HostStep:
    """A step in the queue."""

    steps: HostSteps
    plan: StepPlan
    begun_at: float

    def result(self) -> StepResult:
        """Carries it out."""
        return self.steps.finish(self.plan, self.begun_at)


def _filled(chunk: Chunk, token_ids: tuple[int, ...]) -> Chunk:
    (token_id,) = token_ids or (_ANY_TOKEN,)
    return _new_chunk(
        sequence_id=chunk.sequence_id,
        token_ids=(token_id,),
        start=chunk.start,
        block_ids=chunk.block_ids,
        sample=chunk.sample,
        score=chunk.score,
    )
