"""Random workloads on tiny pools: the text never depends on scheduling, nothing leaks, each choice ends once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle

import pytest
from bakehouse_replica.core.blocks import BlockPool
from bakehouse_replica.core.hashing import choice_seed
from bakehouse_replica.core.types import (
    BlockCopy,
    Capacity,
    FailureKind,
    SchedulingPolicy,
    StepPlan,
    StepResult,
)
from driving import Driver, make_request
from eventful import FAILURE, make_eventful
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from workloads import (
    CAPACITIES,
    COMMON,
    MAX_MODEL_LEN,
    POLICIES,
    STOP_IDS,
    WORKLOADS,
    Visit,
    assert_plans_are_sound,
    assert_text_is_naive,
    run_workload,
)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(CAPACITIES, POLICIES, WORKLOADS)
def test_text_never_depends_on_scheduling_and_nothing_leaks(
    capacity: Capacity, policy: SchedulingPolicy, workload: tuple[Visit, ...]
) -> None:
    driver = Driver(capacity, policy)
    refused = run_workload(driver, workload)
    assert_text_is_naive(driver, workload, refused)
    load = driver.scheduler.load()
    assert (load.n_running, load.n_waiting, load.n_held_blocks) == (0, 0, 0)
    assert_plans_are_sound(driver, capacity)


@settings(max_examples=250, suppress_health_check=list(HealthCheck))
@given(CAPACITIES, POLICIES, WORKLOADS, st.integers(1, 4))
def test_text_depends_neither_on_how_many_tokens_are_drawn_at_once_nor_on_neighbours_that_fail(
    capacity: Capacity, policy: SchedulingPolicy, workload: tuple[Visit, ...], tokens_per_step: int
) -> None:
    """Invariants I-4 (blocks, audited by the driver after each event) and I-5 (one end for each choice)."""
    driver = Driver(capacity, policy, make_executor=make_eventful(tokens_per_step))
    refused = run_workload(driver, workload)
    assert_text_is_naive(driver, workload, refused, make_eventful())
    for outcome in driver.outcomes.values():
        if outcome.failure is not None and outcome.failure.kind is FailureKind.DRAW:
            assert outcome.failure.message == FAILURE
    load = driver.scheduler.load()
    assert (load.n_running, load.n_waiting, load.n_held_blocks) == (0, 0, 0)
    assert_plans_are_sound(driver, capacity)


class FickleDriver(Driver):
    """Before every step, the next of its policies is adopted."""

    def __init__(self, capacity: Capacity, policies: Sequence[SchedulingPolicy]) -> None:
        super().__init__(capacity, policies[0])
        self._policies = cycle(policies)

    def step(
        self,
        during: Callable[[], None] = lambda: None,
        tamper: Callable[[StepResult], StepResult] = lambda result: result,
    ) -> StepPlan | None:
        self.scheduler.adopt(next(self._policies))
        return super().step(during, tamper)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(CAPACITIES, st.lists(POLICIES, min_size=2, max_size=3), st.integers(1, 2), WORKLOADS)
def test_text_does_not_depend_on_policies_that_change_along_the_way(
    capacity: Capacity, policies: list[SchedulingPolicy], max_flights: int, workload: tuple[Visit, ...]
) -> None:
    driver = FickleDriver(replace(capacity, max_flights=max_flights), policies)
    refused = run_workload(driver, workload)
    assert_text_is_naive(driver, workload, refused)
    load = driver.scheduler.load()
    assert (load.n_running, load.n_waiting, load.n_held_blocks) == (0, 0, 0)
    assert_plans_are_sound(driver, capacity)


class PoolWithoutCopies(BlockPool):
    """Copy-on-write switched off: whoever comes first writes into the block that others still read."""

    def writable(self, table: list[int], index: int) -> BlockCopy | None:
        return None


class PoolThatForgetsTheCopy(BlockPool):
    """A fresh block for the writer, but nobody is told to copy the old one's content."""

    def writable(self, table: list[int], index: int) -> BlockCopy | None:
        super().writable(table, index)
        return None


class PoolWithConstantHash(BlockPool):
    """The worst of all hash functions."""

    def next_hash(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        return b"constant"


class PoolThatTrustsHashes(PoolWithConstantHash):
    """Hits are not compared with the tokens that were asked for."""

    def match(self, block_hashes: Sequence[bytes], token_ids: Sequence[int]) -> list[int]:
        block_id = self._index.get(b"constant")
        return [] if block_id is None or not block_hashes else [block_id]


def run_fixed_workloads(pool_type: type[BlockPool]) -> int:
    """Two dozen forking, sharing and preempting workloads; returns how many prompt tokens came from the cache."""
    n_cached_tokens = 0
    for block_size in (2, 3, 4):
        for n_blocks in (8, 12, 16, 40):
            capacity = Capacity(n_blocks=n_blocks, block_size=block_size, max_step_tokens=9, max_sequences=5)
            workload = tuple(
                Visit(
                    make_request(
                        f"r{index}",
                        (index % 2, *COMMON[:7], index % 3),
                        n=1 + index % 4,
                        max_tokens=6,
                        temperature=1.0,
                    ),
                    arrives_at=index * 2,
                    leaves_at=None,
                    leaves_in_flight=False,
                )
                for index in range(8)
            )
            driver = Driver(capacity, SchedulingPolicy(max_model_len=MAX_MODEL_LEN), pool_type=pool_type)
            assert_text_is_naive(driver, workload, run_workload(driver, workload))
            n_cached_tokens += sum(
                outcome.usage.cached_tokens for outcome in driver.outcomes.values() if outcome.usage
            )
    return n_cached_tokens


def test_the_fixed_workloads_pass_on_the_real_pool() -> None:
    assert run_fixed_workloads(BlockPool) > 0


@pytest.mark.parametrize("pool_type", [PoolWithoutCopies, PoolThatForgetsTheCopy, PoolThatTrustsHashes])
def test_breaking_a_rule_of_the_pool_is_noticed(pool_type: type[BlockPool]) -> None:
    with pytest.raises(AssertionError):
        run_fixed_workloads(pool_type)


def test_c38_with_a_constant_hash_the_text_is_still_right() -> None:
    assert run_fixed_workloads(PoolWithConstantHash) < run_fixed_workloads(BlockPool)


@pytest.mark.parametrize("stop", [(), STOP_IDS])
def test_a_request_resumed_at_any_index_continues_with_the_same_ids(stop: tuple[int, ...]) -> None:
    capacity = Capacity(n_blocks=20, block_size=4, max_step_tokens=8, max_sequences=4)
    policy = SchedulingPolicy(max_model_len=MAX_MODEL_LEN)
    for seed in range(3):
        request = make_request(
            "r", range(9), max_tokens=20, temperature=1.0, seed=seed, stop=stop, min_tokens=3, presence_penalty=0.5
        )
        undisturbed = Driver(capacity, policy)
        undisturbed.add(request)
        undisturbed.run()
        expected = undisturbed.outcome("r")
        for n_emitted in range(len(expected.token_ids) + 1):
            heir = Driver(capacity, policy)
            heir.add(replace(request, prior_output=tuple(expected.token_ids[:n_emitted])))
            heir.run()
            assert heir.outcome("r") == expected, f"after {n_emitted} tokens"


def test_a_choice_of_many_resumes_as_a_request_of_its_own() -> None:
    capacity = Capacity(n_blocks=20, block_size=4, max_step_tokens=8, max_sequences=4)
    policy = SchedulingPolicy(max_model_len=MAX_MODEL_LEN)
    whole = Driver(capacity, policy)
    whole.add(make_request("r", range(9), n=3, max_tokens=10, temperature=1.0))
    whole.run()
    for choice in range(3):
        expected = whole.outcome("r", choice).token_ids
        heir = Driver(capacity, policy)
        heir.add(
            make_request(
                "r",
                range(9),
                max_tokens=10,
                temperature=1.0,
                seed=choice_seed(7, choice),
                prior_output=tuple(expected[:4]),
            )
        )
        heir.run()
        assert heir.outcome("r").token_ids == expected
