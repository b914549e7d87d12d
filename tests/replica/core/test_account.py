"""What requests are charged: the time of blocks, split evenly among their holders, and tokens by how they came."""

from collections import Counter, defaultdict
from collections.abc import Callable
from random import Random

import pytest
from bakehouse_replica.core.account import Account
from bakehouse_replica.core.blocks import BlockPool
from bakehouse_replica.core.metric_table import KV_BLOCK_SECONDS, PREEMPTIONS
from bakehouse_replica.core.sequence import Sequence
from bakehouse_replica.core.types import Capacity, Cost, SchedulingPolicy, StepPlan, StepResult
from driving import Driver, make_driver, make_request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from workloads import CAPACITIES, POLICIES, WORKLOADS, Visit, run_workload


class WatchedPool(BlockPool):
    """Tells whoever watches of each moment before it takes it."""

    watch: Callable[[float], None] = staticmethod(lambda now: None)

    def advance(self, now: float) -> None:
        self.watch(now)
        super().advance(now)


class SlowOracle:
    """Charges every held block to each of its holders at each moment, as nobody could afford to."""

    def __init__(self, running: list[Sequence]) -> None:
        self.charged: defaultdict[str, float] = defaultdict(float)
        self._running = running
        self._now: float | None = None

    def watch(self, now: float) -> None:
        passed_s = 0.0 if self._now is None else max(0.0, now - self._now)
        self._now = now if self._now is None else max(now, self._now)
        n_holders = Counter(block_id for sequence in self._running for block_id in sequence.block_table)
        for sequence in self._running:
            request_id = sequence.call.request.request_id
            for block_id in sequence.block_table:
                self.charged[request_id] += passed_s / n_holders[block_id]


class UnevenDriver(Driver):
    """Its steps, and what lies between them, take times of no common measure."""

    def __init__(self, capacity: Capacity, policy: SchedulingPolicy, seed: int) -> None:
        super().__init__(capacity, policy, pool_type=WatchedPool, early=Random(seed))
        self._random = Random(seed)
        pool = self.scheduler._pool
        assert isinstance(pool, WatchedPool)
        self.pool = pool
        self.oracle = SlowOracle(self.scheduler._roster.running)
        pool.watch = self.oracle.watch

    def step(
        self,
        during: Callable[[], None] = lambda: None,
        tamper: Callable[[StepResult], StepResult] = lambda result: result,
    ) -> StepPlan | None:
        self.now += self._random.choice([0.0, 0.1, 1 / 3, 1e-4, 7.0])
        return super().step(during, tamper)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(CAPACITIES, POLICIES, WORKLOADS, st.integers(0, 9), st.sampled_from([1, 2]))
def test_every_block_second_is_on_one_bill_or_nobody_s_and_on_the_right_one(
    capacity: Capacity, policy: SchedulingPolicy, workload: tuple[Visit, ...], seed: int, max_flights: int
) -> None:
    """Preempted, forked, copied, aborted, of a shared prefix, overlapped; audited after each event besides."""
    driver = UnevenDriver(_with_flights(capacity, max_flights), policy, seed)
    refused = run_workload(driver, workload)
    asked = {visit.request.request_id for visit in workload} - refused
    assert driver.costs.keys() == asked, "each request that ended has one cost"
    for request_id, cost in driver.costs.items():
        assert cost.block_seconds == pytest.approx(driver.oracle.charged[request_id], abs=1e-9)
    time, elapsed_s = driver.pool.time, driver.scheduler._pool._account.elapsed_s
    assert sum(cost.block_seconds for cost in driver.costs.values()) == pytest.approx(time.held, abs=1e-9)
    assert time.free + time.cached + time.held == pytest.approx(capacity.n_blocks * elapsed_s, abs=1e-9)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(CAPACITIES, POLICIES, WORKLOADS)
def test_every_token_that_a_step_computes_is_on_a_bill_by_how_it_came(
    capacity: Capacity, policy: SchedulingPolicy, workload: tuple[Visit, ...]
) -> None:
    driver = Driver(capacity, policy)
    refused = run_workload(driver, workload)
    for visit in workload:
        request = visit.request
        if request.request_id in refused:
            continue
        cost, n_prompt = driver.costs[request.request_id], len(request.prompt_ids)
        outcomes = [driver.outcome(request.request_id, choice) for choice in range(request.params.n)]
        n_drawn = sum(len(outcome.token_ids) - len(request.prior_output) for outcome in outcomes)
        assert cost.generated_tokens == n_drawn
        assert cost.computed_tokens + cost.cached_tokens <= n_prompt
        if n_drawn:
            assert cost.computed_tokens + cost.cached_tokens == n_prompt, "all of its prompt, once"
        if not request.prior_output and driver.counted(PREEMPTIONS) == 0:
            assert cost.recomputed_tokens == 0


def _with_flights(capacity: Capacity, max_flights: int) -> Capacity:
    return Capacity(
        n_blocks=capacity.n_blocks,
        block_size=capacity.block_size,
        max_step_tokens=capacity.max_step_tokens,
        max_sequences=capacity.max_sequences,
        max_flights=max_flights,
    )


def assert_cost(cost: Cost, block_seconds: float, *, computed: int, cached: int, generated: int) -> None:
    """Nothing was computed twice."""
    assert cost.block_seconds == pytest.approx(block_seconds)
    assert (cost.computed_tokens, cost.cached_tokens, cost.generated_tokens) == (computed, cached, generated)
    assert cost.recomputed_tokens == 0


def test_a_shared_prefix_is_charged_half_to_each_while_both_hold_it() -> None:
    """Steps of 1 s. A holds blocks 0, 1, 2 in [0, 3]. B shares 0 and 1 in [1, 6], has 3 in [1, 6], 4 in [5, 6].

    A: 0 and 1 for 1 s alone and 2 s by half, 2 for 3 s: 2 * (1 + 1) + 3 = 7.
    B: 0 and 1 for 2 s by half and 3 s alone, 3 for 5 s, 4 for 1 s: 2 * (1 + 3) + 5 + 1 = 14.
    """
    driver = make_driver(n_blocks=10, block_size=4)
    driver.add(make_request("a", (*range(8), 20), max_tokens=3))
    driver.step()
    driver.add(make_request("b", (*range(8), 30), max_tokens=5))
    driver.run()
    assert_cost(driver.costs["a"], 7, computed=9, cached=0, generated=3)
    assert_cost(driver.costs["b"], 14, computed=1, cached=8, generated=5)
    driver.scheduler.note(driver.scheduler.load(), now=8.0)
    # Of 10 blocks, 3, 4 (twice), 3 (twice) and 4 are held, then none. At 3, block 2 is not full, so free. At 6,
    # blocks 0, 1 and 3 stay as cache.
    found = [driver.counted(KV_BLOCK_SECONDS, state) for state in ("held", "cached", "free")]
    assert found == [21, 3 * 2, 80 - 21 - 6]


def test_four_choices_of_17_tokens_pay_for_two_blocks_and_from_the_first_write_on_for_five() -> None:
    """Blocks of 16: 2 in [0, 1], then 3 tails are copied and the last writer keeps its own: 5 in [1, 2]."""
    driver = make_driver(block_size=16)
    driver.add(make_request("a", range(17), n=4, max_tokens=2, temperature=1.0))
    driver.run()
    assert driver.now == 2.0
    assert_cost(driver.costs["a"], 2 + 5, computed=17, cached=0, generated=8)


def test_choices_are_holders_each_so_a_request_of_four_pays_four_parts_of_a_prefix_and_its_neighbour_one() -> None:
    """In [1, 2], A holds four fifths of block 0 and its four tails, B one fifth and a tail of its own."""
    driver = make_driver(block_size=16)
    driver.add(make_request("a", range(17), n=4, max_tokens=2, temperature=1.0))
    driver.step()
    driver.add(make_request("b", (*range(16), 40), max_tokens=1))
    driver.run()
    assert_cost(driver.costs["a"], 2 + 4 / 5 + 4, computed=17, cached=0, generated=8)
    assert_cost(driver.costs["b"], 1 / 5 + 1, computed=1, cached=16, generated=1)


def test_what_a_preempted_request_computes_once_more_is_told_apart() -> None:
    driver = make_driver(n_blocks=5, block_size=4)
    driver.add(make_request("a", range(6), max_tokens=10))
    driver.add(make_request("b", range(20, 26), max_tokens=10))
    driver.run()
    assert driver.counted(PREEMPTIONS) == 1
    b, chunks = (
        driver.costs["b"],
        [chunk for plan in driver.plans for chunk in plan.chunks if chunk.sequence_id == 1],
    )
    assert (b.computed_tokens, b.cached_tokens, b.generated_tokens) == (6, 0, 10)
    assert b.recomputed_tokens > 0
    n_planned = sum(len(chunk.token_ids) for chunk in chunks)
    assert n_planned == 6 + b.recomputed_tokens + 10 - 1, "the last token drawn is never computed"


def test_output_of_a_lost_replica_is_computed_once_more() -> None:
    driver = make_driver(block_size=4)
    driver.add(make_request("a", range(6), prior_output=(5, 6, 7), max_tokens=5))
    driver.run()
    assert driver.costs["a"].recomputed_tokens == 3
    assert (driver.costs["a"].computed_tokens, driver.costs["a"].generated_tokens) == (6, 2)


def test_who_never_ran_pays_nothing() -> None:
    driver = make_driver(max_sequences=1)
    driver.add(make_request("a", range(6)))
    driver.add(make_request("b", range(6), n=1))
    driver.step()
    driver.abort("b")
    assert_cost(driver.costs["b"], 0, computed=0, cached=0, generated=0)


def test_an_abort_counts_as_of_the_step_before_it() -> None:
    driver = make_driver(block_size=4)
    driver.add(make_request("a", range(6)))
    driver.step()
    driver.now = 100.0
    driver.abort("a")
    assert_cost(driver.costs["a"], 2, computed=6, cached=0, generated=1)


def test_an_account_that_does_not_agree_is_found_out() -> None:
    account = Account(4)
    account.advance(0.0, n_free=4, n_cached=0, n_held=0)
    account.advance(10.0, n_free=2, n_cached=1, n_held=1)
    account.check(10.0)
    with pytest.raises(AssertionError, match=r"bills of 9.0 block-seconds; blocks were held for 10.0"):
        account.check(9.0)
    account.advance(11.0, n_free=2, n_cached=1, n_held=2)
    with pytest.raises(AssertionError, match="is not all of"):
        account.check(12.0)


def test_a_clock_that_goes_back_charges_nobody() -> None:
    account = Account(1)
    account.advance(5.0, n_free=0, n_cached=0, n_held=1)
    account.advance(3.0, n_free=0, n_cached=0, n_held=1)
    account.advance(6.0, n_free=0, n_cached=0, n_held=1)
    assert (account.time.held, account.elapsed_s) == (1.0, 1.0)


def test_the_reading_of_a_cached_block_is_the_same_before_and_after_it_is_taken_again() -> None:
    account = Account(1)
    account.advance(0.0, n_free=1, n_cached=0, n_held=0)
    account.begin(0)
    account.advance(2.0, n_free=0, n_cached=0, n_held=1)
    account.change(0, 1)  # its holder lets it go
    account.advance(5.0, n_free=0, n_cached=1, n_held=0)
    account.change(0, 0)
    assert account.reading([0], [0]) == account.reading([0], [1]) == 0.0
