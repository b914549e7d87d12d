"""A fake executor some of whose draws end their choice, as a grammar's do: complete, or failed."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from bakehouse_replica.core.executor import Executor, Pending
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Capacity, Draw, StepPlan, StepResult
from bakehouse_replica.executors.fake import FakeExecutor
from driving import VOCABULARY_SIZE

# Where one of these ids would be drawn, the choice ends: before it, or with it.
COMPLETE_BEFORE, COMPLETE_WITH, FAIL_BEFORE, FAIL_WITH = 41, 42, 43, 44
FAILURE = "the grammar has no way on"


class EventfulExecutor:
    """Draws what the fake executor does, up to the first id that ends the choice."""

    def __init__(self, capacity: Capacity, tokens_per_step: int = 1) -> None:
        self._fake = FakeExecutor(capacity, vocabulary_size=VOCABULARY_SIZE, tokens_per_step=tokens_per_step)

    @property
    def capacity(self) -> Capacity:
        return self._fake.capacity

    def prepare(self, params: SamplingParams) -> None:
        self._fake.prepare(params)

    def begin(self, plan: StepPlan) -> Pending:
        return _Cut(self._fake.begin(plan))

    def close(self) -> None:
        self._fake.close()


@dataclass(frozen=True)
class _Cut:
    """A step of the fake executor, its draws cut."""

    whole: Pending

    def result(self) -> StepResult:
        result = self.whole.result()
        sampled = tuple(replace(each, draws=tuple(map(_cut, each.draws))) for each in result.sampled)
        return replace(result, sampled=sampled)


def make_eventful(tokens_per_step: int = 1) -> Callable[[Capacity], Executor]:
    """Makes executors that draw so many tokens at once."""
    return lambda capacity: EventfulExecutor(capacity, tokens_per_step)


def _cut(draw: Draw) -> Draw:
    for index, token_id in enumerate(draw.token_ids):
        if token_id in (COMPLETE_BEFORE, FAIL_BEFORE):
            kept = _beginning(draw, index)
            if index:  # the next draw begins with it and says so
                return kept
            return replace(
                kept, is_complete=token_id == COMPLETE_BEFORE, failure=FAILURE if token_id == FAIL_BEFORE else None
            )
        if token_id == COMPLETE_WITH:
            return replace(_beginning(draw, index + 1), is_complete=True)
        if token_id == FAIL_WITH:
            return replace(_beginning(draw, index + 1), failure=FAILURE)
    return draw


def _beginning(draw: Draw, n_tokens: int) -> Draw:
    return replace(draw, token_ids=draw.token_ids[:n_tokens], logprobs=draw.logprobs[:n_tokens])
