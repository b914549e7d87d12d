"""Steps on the host: each waits for its turn, and nobody takes a result out of turn."""

import pytest
from bakehouse_replica.core.types import StepPlan, StepResult
from bakehouse_replica.executors.host_steps import HostSteps


def plan(step: int) -> StepPlan:
    return StepPlan(step=step, copies=(), chunks=())


def steps_with(carried_out: list[int]) -> HostSteps:
    def carry_out(plan: StepPlan, begun_at: float) -> StepResult:
        carried_out.append(plan.step)
        return StepResult(step=plan.step, sampled=(), elapsed_s=0.0)

    return HostSteps(carry_out, max_flights=2)


def test_a_step_is_carried_out_when_its_result_is_taken() -> None:
    carried_out: list[int] = []
    steps = steps_with(carried_out)
    first, second = steps.begin(plan(0)), steps.begin(plan(1))
    assert carried_out == []
    assert (first.result().step, second.result().step, carried_out) == (0, 1, [0, 1])


def test_a_result_out_of_turn_and_a_step_too_many_are_refused() -> None:
    steps = steps_with([])
    first, second = steps.begin(plan(0)), steps.begin(plan(1))
    with pytest.raises(AssertionError, match="step 1 is taken out of turn"):
        second.result()
    with pytest.raises(AssertionError, match="step 2 begins while 2 are in flight"):
        steps.begin(plan(2))
    first.result()
    with pytest.raises(AssertionError, match="step 0 is taken out of turn"):
        first.result()
