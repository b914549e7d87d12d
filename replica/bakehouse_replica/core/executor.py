"""The executor protocol: whatever can carry out step plans.

The driver owns time; an executor owns the KV cache and nothing else. Steps run in the order in which they were
begun, and what a later one writes comes after what an earlier one wrote. One conformance suite
(`tests/replica/executors/test_conformance*.py`) is the definition; every executor passes it.
"""

from typing import Protocol

from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Capacity, StepPlan, StepResult


class Pending(Protocol):
    """A step that was begun."""

    def result(self) -> StepResult:
        """Waits for the step. Called once, in the order of the steps; raises whatever broke."""
        ...


class Executor(Protocol):
    """Carries out step plans, from one thread; only `prepare` and `close` may come from others."""

    @property
    def capacity(self) -> Capacity:
        """What it can hold and do in one step; constant."""
        ...

    def prepare(self, params: SamplingParams) -> None:
        """Make ready what these parameters need besides weights (a compiled grammar); may take seconds.

        Called from any thread before a request is added, while steps run. Raises `InvalidRequest` where they ask
        for what this executor cannot do.
        """
        ...

    def begin(self, plan: StepPlan) -> Pending:
        """Starts a step, after all those begun before it; returns as soon as it can.

        A step is: do the plan's copies, then write and attend all chunks, then score and draw. Chunks of one plan
        never read each other's new positions. No more than `capacity.max_flights` steps may have been begun whose
        result nobody has taken.

        A chunk that `follows_draw` takes its token from the step before; where that drew none for the sequence,
        any token may stand there, for nobody reads what comes of it.

        Raises whatever broke, here or where the result is taken: the engine then fails all its requests, because
        the KV cache can no longer be trusted.
        """
        ...

    def close(self) -> None:
        """Release memory and threads; idempotent. Where a step hangs, this comes during it, and may end it."""
        ...


def execute(executor: Executor, plan: StepPlan) -> StepResult:
    """Carries out one step from begin to end, for callers that have nothing to do meanwhile."""
    return executor.begin(plan).result()
