"""Random workloads with steps that overlap: outcomes are those of steps one by one, and nothing leaks."""

from dataclasses import replace
from random import Random

import pytest
from bakehouse_replica.core.types import Capacity, FinishReason, SchedulingPolicy
from driving import Driver, MakeExecutor, Outcome, make_fake, make_request
from eventful import make_eventful
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from workloads import (
    CAPACITIES,
    COMMON,
    MAX_MODEL_LEN,
    POLICIES,
    WORKLOADS,
    Visit,
    assert_plans_are_sound,
    assert_text_is_naive,
    run_workload,
)


def counted(outcome: Outcome) -> tuple[int, int] | None:
    """The usage, but for what was found in the cache: that depends on when a request came."""
    usage = outcome.usage
    return None if usage is None else (usage.prompt_tokens, usage.completion_tokens)


def assert_as_without_overlap(overlapping: Driver, one_by_one: Driver) -> None:
    """Whoever was not cut short by the clock or by leaving has the same outcome in both."""
    cut_short = (FinishReason.CANCELLED, FinishReason.ERROR)
    assert overlapping.outcomes.keys() == one_by_one.outcomes.keys()
    for name, found in overlapping.outcomes.items():
        expected = one_by_one.outcomes[name]
        if found.finish in cut_short or expected.finish in cut_short:
            continue
        assert replace(found, usage=None) == replace(expected, usage=None)
        assert counted(found) == counted(expected)


@pytest.mark.parametrize("make_executor", [make_fake, make_eventful()], ids=["plain", "eventful"])
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(CAPACITIES, POLICIES, WORKLOADS, st.integers(2, 3), st.integers(0, 9))
def test_steps_that_overlap_change_no_outcome_and_leak_nothing(
    make_executor: MakeExecutor,
    capacity: Capacity,
    policy: SchedulingPolicy,
    workload: tuple[Visit, ...],
    max_flights: int,
    seed: int,
) -> None:
    """`seed` decides when results are taken before they must be."""
    wide = replace(capacity, max_flights=max_flights)
    early = Random(seed) if seed % 2 else None
    overlapping = Driver(wide, policy, make_executor=make_executor, early=early)
    refused = run_workload(overlapping, workload)
    assert_text_is_naive(overlapping, workload, refused, make_executor)
    load = overlapping.scheduler.load()
    assert (load.n_running, load.n_waiting, load.n_held_blocks) == (0, 0, 0)
    assert not overlapping.scheduler.has_work
    assert_plans_are_sound(overlapping, wide)
    one_by_one = Driver(capacity, policy, make_executor=make_executor)
    assert run_workload(one_by_one, workload) == refused
    assert_as_without_overlap(overlapping, one_by_one)


def pressed(seed: int) -> Driver:
    """Ten sharing, forking, stopping requests on a pool for two or three, none of which needs the host."""
    random = Random(seed)
    capacity = Capacity(
        n_blocks=random.randint(8, 14),
        block_size=random.randint(2, 4),
        max_step_tokens=9,
        max_sequences=5,
        max_flights=2,
    )
    workload = tuple(
        Visit(
            make_request(
                f"r{index}",
                (index % 2, *COMMON[: random.randint(0, 7)], index % 3),
                n=1 + (index % 4 == 3),
                max_tokens=8,
                temperature=1.0,
                seed=index,
                stop=(3, 11, 19),
                priority=-(index % 5 == 4),
                logprobs=1,
            ),
            arrives_at=index * 2,
            leaves_at=index * 2 + 7 if index % 5 == 0 else None,
            leaves_in_flight=index % 2 == 0,
        )
        for index in range(10)
    )
    driver = Driver(capacity, SchedulingPolicy(max_model_len=MAX_MODEL_LEN))
    assert_text_is_naive(driver, workload, run_workload(driver, workload))
    return driver


def test_most_steps_are_planned_ahead_and_preemption_forks_and_late_ends_all_happen() -> None:
    n_plans = n_ahead = n_preempted = n_copies = n_strays = 0
    for seed in range(30):
        driver = pressed(seed)
        reached: dict[int, int] = {}
        drawn: dict[int, int] = {}
        for plan in driver.plans:
            n_copies += len(plan.copies)
            for chunk in plan.chunks:
                n_preempted += chunk.start < reached.get(chunk.sequence_id, 0)
                reached[chunk.sequence_id] = chunk.start + len(chunk.token_ids)
                drawn[chunk.sequence_id] = drawn.get(chunk.sequence_id, 0) + (chunk.sample is not None)
        n_kept = sum(len(outcome.token_ids) for outcome in driver.outcomes.values())
        n_strays += sum(drawn.values()) - n_kept
        n_plans, n_ahead = n_plans + len(driver.plans), n_ahead + driver.n_ahead
    assert n_ahead > n_plans / 3
    assert min(n_preempted, n_copies, n_strays) > 10
