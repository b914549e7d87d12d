"""Random workloads on tiny pools: the text never depends on scheduling, nothing leaks, each choice ends once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from bakehouse_replica.core.blocks import BlockPool
from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.hashing import choice_seed
from bakehouse_replica.core.types import BlockCopy, Capacity, FailureKind, FinishReason, Request, SchedulingPolicy
from driving import Driver, MakeExecutor, Outcome, make_fake, make_request, naive_generate
from eventful import FAILURE, make_eventful
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MAX_MODEL_LEN = 40
COMMON = tuple(range(30, 46))  # prompts begin alike, so that blocks are shared
STOP_IDS = (3, 11, 19)  # of 50 ids: one draw in 17 stops

CAPACITIES = st.builds(
    Capacity,
    n_blocks=st.integers(6, 14),
    block_size=st.sampled_from([2, 3, 4]),
    max_step_tokens=st.integers(1, 12),
    max_sequences=st.integers(1, 6),
)
POLICIES = st.builds(
    SchedulingPolicy,
    max_model_len=st.just(MAX_MODEL_LEN),
    max_prefill_tokens=st.integers(1, 8),
    long_prefill_tokens=st.integers(3, 12),
    max_long_prefills=st.integers(1, 2),
)


@dataclass(frozen=True)
class Visit:
    """One request: when it comes, and when its client leaves (before coming, while a step runs, between steps)."""

    request: Request
    arrives_at: int
    leaves_at: int | None
    leaves_in_flight: bool


@st.composite
def visits(draw: st.DrawFn, request_id: str) -> Visit:
    request = make_request(
        request_id,
        COMMON[: draw(st.integers(0, 12))] + draw(st.tuples(st.integers(0, 49), st.integers(0, 2))),
        n=draw(st.sampled_from([1, 1, 1, 2, 4])),
        max_tokens=draw(st.one_of(st.none(), st.integers(0, 12))),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(-3, 3)),
        stop=draw(st.sampled_from([(), STOP_IDS])),
        priority=draw(st.sampled_from([0, 0, 0, -1, 1])),
        salt=draw(st.sampled_from(["", "", "tenant"])),
        timeout_s=draw(st.sampled_from([None, None, None, 5.0, 20.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.0])),
        logprobs=draw(st.sampled_from([None, None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0, 3])),
        bad_words=draw(st.sampled_from([(), (), ((5,), (7, 8))])),
    )
    if request.params.n == 1 and draw(st.booleans()):
        whole = naive_generate(request, MAX_MODEL_LEN, make_eventful())[0].token_ids
        request = replace(request, prior_output=tuple(whole[: draw(st.integers(0, len(whole)))]))
    arrives_at = draw(st.integers(0, 12))
    leaves_at = draw(st.one_of(st.none(), st.none(), st.integers(-1, 15).map(lambda delay: arrives_at + delay)))
    return Visit(request, arrives_at, leaves_at, draw(st.booleans()))


WORKLOADS = st.integers(1, 9).flatmap(lambda n: st.tuples(*(visits(f"r{index}") for index in range(n))))


def run_workload(driver: Driver, workload: tuple[Visit, ...]) -> set[str]:
    """Plays the visits; returns the ids of the requests that were refused as impossible."""
    refused = set()

    def leave(step: int, in_flight: bool) -> None:
        for visit in workload:
            if visit.leaves_at == step and visit.leaves_in_flight == in_flight:
                driver.abort(visit.request.request_id)

    last_event = max(max(visit.arrives_at, visit.leaves_at or 0) for visit in workload)
    step = -1
    while step <= last_event or driver.scheduler.has_work:
        leave(step, in_flight=False)
        for visit in workload:
            if visit.arrives_at == step:
                try:
                    driver.add(visit.request)
                except InvalidRequest:
                    refused.add(visit.request.request_id)
        if driver.step(during=lambda step=step: leave(step, in_flight=True)) is None:  # type: ignore[misc]
            leave(step, in_flight=True)
        step += 1
        assert step < 5_000, "the workload does not end"
    return refused


def assert_text_is_naive(
    driver: Driver, workload: tuple[Visit, ...], refused: set[str], make_executor: MakeExecutor = make_fake
) -> None:
    """Each choice ended once, as an undisturbed run does, or with its beginning where it was cut short."""
    for visit in workload:
        request = visit.request
        if request.request_id in refused:
            continue
        for choice, expected in enumerate(naive_generate(request, MAX_MODEL_LEN, make_executor)):
            outcome = driver.outcome(request.request_id, choice)
            assert outcome.finish is not None, f"{request.request_id} choice {choice} never ended"
            is_whole = outcome.finish in (FinishReason.STOP, FinishReason.LENGTH)
            if is_whole or (outcome.failure is not None and outcome.failure.kind is FailureKind.DRAW):
                assert (outcome.token_ids, outcome.logprobs) == (expected.token_ids, expected.logprobs)
                assert outcome.finish is expected.finish
            else:
                assert_cut_short(visit, outcome, expected)
            if is_whole or len(outcome.token_ids) > len(request.prior_output):
                assert outcome.prompt_logprobs == expected.prompt_logprobs
            assert outcome.prompt_logprobs in ((), expected.prompt_logprobs)
            assert outcome.usage is not None
            assert outcome.usage.completion_tokens == len(outcome.token_ids)
            assert outcome.usage.cached_tokens <= len(request.prompt_ids)


def assert_cut_short(visit: Visit, outcome: Outcome, expected: Outcome) -> None:
    """The choice has the beginning of what was expected, and a cause for the missing end."""
    assert outcome.token_ids == expected.token_ids[: len(outcome.token_ids)]
    assert outcome.logprobs == expected.logprobs[: len(outcome.logprobs)]
    if outcome.finish is FinishReason.CANCELLED:
        assert visit.leaves_at is not None
        return
    assert (outcome.finish, outcome.failure is not None) == (FinishReason.ERROR, True)
    if outcome.failure is not None and outcome.failure.kind is FailureKind.DEADLINE:
        assert visit.request.timeout_s is not None
    elif outcome.failure is not None:
        assert outcome.failure.kind is FailureKind.NO_ROOM
        assert visit.request.params.max_tokens is None, "what was accepted with a limit must fit"


def assert_plans_are_sound(driver: Driver, capacity: Capacity) -> None:
    """No copy depends on the order of the others, no step is too large, no score is asked for twice."""
    for plan in driver.plans:
        sources, targets = {copy.source for copy in plan.copies}, [copy.target for copy in plan.copies]
        assert len(set(targets)) == len(targets), "two copies onto one block"
        assert not sources & set(targets), "copies would depend on their order"
        assert sum(len(chunk.token_ids) for chunk in plan.chunks) <= capacity.max_step_tokens
    for positions in driver.scored_positions().values():
        assert positions == list(range(1, len(positions) + 1))


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
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


@settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
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
