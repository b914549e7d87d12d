"""The executor protocol: whatever can carry out a step plan.

The driver owns time; an executor owns the KV cache and nothing else. One conformance suite
(`tests/replica/executors/test_conformance.py` and `test_conformance_reports.py`) is the definition; every executor
passes it.
"""

from typing import Protocol

from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Capacity, StepPlan, StepResult


class Executor(Protocol):
    """Carries out step plans, one at a time, from one thread; only `prepare` and `close` may come from others."""

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

    def execute(self, plan: StepPlan) -> StepResult:
        """Do the plan's copies, then write and attend all chunks, then score and draw.

        Chunks of one plan never read each other's new positions. Raises whatever broke: the engine then
        fails all its requests, because the KV cache can no longer be trusted.
        """
        ...

    def close(self) -> None:
        """Release memory and threads; idempotent. Where a step hangs, this comes during it, and may end it."""
        ...
