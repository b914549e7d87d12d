"""Fleets on the virtual clock: moments that can be computed by hand, what is shed, and where requests go."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random

import pytest
from bakehouse_cluster.bench.records import Outcome
from bakehouse_cluster.plan.fleet import (
    Fleet,
    FleetRun,
    GatewayShape,
    ReplicaShape,
    closed_loop,
    open_loop,
)
from bakehouse_cluster.plan.gateway import Route
from bakehouse_cluster.plan.policies import choose_at_random, choose_least_loaded
from bakehouse_cluster.plan.records import SimulatedRecord
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Capacity, Request, SchedulingPolicy, StepPlan
from bakehouse_replica.executors.simulated import SimulatedExecutor, StepCost
from bakehouse_router.policy.pick import choose
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from workloads import CAPACITIES, MAX_MODEL_LEN, POLICIES

# A second a step, whatever is in it, and one request at a time: every moment is a small whole number.
ONE_BY_ONE = ReplicaShape(
    capacity=Capacity(n_blocks=64, block_size=4, max_step_tokens=64, max_sequences=1),
    policy=SchedulingPolicy(max_model_len=100),
    cost=StepCost(step_s=1.0),
    vocabulary_size=100,
)


def request(index: int, n_input: int = 4, n_output: int = 3, *, timeout_s: float | None = None) -> Request:
    prompt = Random(index).choices(range(100), k=n_input)
    return Request(
        request_id=f"r{index}",
        prompt_ids=tuple(prompt),
        params=SamplingParams(max_tokens=n_output, seed=index),
        timeout_s=timeout_s,
    )


def at_once(n: int, moment: float = 0.0) -> list[tuple[float, Request]]:
    return [(moment, request(index)) for index in range(n)]


def by_id(run: FleetRun) -> list[SimulatedRecord]:
    return sorted(run.records, key=lambda record: int(record.request_id[1:]))


def test_a_request_alone_takes_a_step_for_each_token() -> None:
    run = open_loop(Fleet(ONE_BY_ONE, 1), [(5.0, request(0))])
    (record,) = run.records
    assert (record.outcome, record.due_s, record.first_s, record.ended_s) == (Outcome.OK, 5.0, 6.0, 8.0)
    assert (record.ttft_s, record.latency_s, record.mean_gap_s, record.n_output) == (1.0, 3.0, 1.0, 3)
    assert dict(run.gaps) == {1.0: 2}
    (totals,) = run.totals
    assert (totals.n_steps, totals.busy_s, totals.running_s, totals.waiting_s) == (3, 3.0, 3.0, 0.0)


def test_requests_wait_for_each_other_where_there_is_one_slot() -> None:
    run = open_loop(Fleet(ONE_BY_ONE, 1), at_once(4))
    assert [record.ttft_s for record in by_id(run)] == [1.0, 4.0, 7.0, 10.0]
    assert run.duration_s == 12.0
    assert run.totals[0].waiting_s == 3 * 3 + 2 * 3 + 1 * 3


def test_two_replicas_share_them() -> None:
    run = open_loop(Fleet(ONE_BY_ONE, 2), at_once(4))
    assert [record.ttft_s for record in by_id(run)] == [1.0, 1.0, 4.0, 4.0]
    assert len({record.replica_id for record in by_id(run)[:2]}) == 2


def test_requests_board_the_running_batch_at_the_next_step() -> None:
    shape = replace(ONE_BY_ONE, capacity=replace(ONE_BY_ONE.capacity, max_sequences=8))
    run = open_loop(Fleet(shape, 1), [(0.0, request(0)), (0.5, request(1)), (0.9, request(2))])
    assert [record.first_s for record in by_id(run)] == [1.0, 2.0, 2.0]


def test_an_overlapped_step_begins_where_the_last_one_ends() -> None:
    shape = replace(ONE_BY_ONE, capacity=replace(ONE_BY_ONE.capacity, max_flights=2, max_sequences=2))
    run = open_loop(Fleet(shape, 1), [(0.0, request(0)), (0.5, request(1))])
    # The second step was planned ahead at 0, so that who came at 0.5 joins the third.
    assert [(record.first_s, record.ended_s) for record in by_id(run)] == [(1.0, 3.0), (3.0, 5.0)]


def test_who_carries_out_steps_says_how_long_they_take() -> None:
    def slow(shape: ReplicaShape) -> SimulatedExecutor:
        return SimulatedExecutor(shape.capacity, StepCost(step_s=7.0))

    (record,) = open_loop(Fleet(ONE_BY_ONE, 1, make_executor=slow), [(0.0, request(0))]).records
    assert (record.first_s, record.ended_s) == (7.0, 21.0)


def test_what_the_gateway_s_queue_cannot_hold_is_shed_and_says_so() -> None:
    run = open_loop(Fleet(ONE_BY_ONE, 1, gateways=GatewayShape(max_queued_requests=6)), at_once(7))
    outcomes = [record.outcome for record in by_id(run)]
    assert outcomes == [Outcome.OK] * 6 + [Outcome.SHED]
    (shed,) = (record for record in run.records if record.outcome is Outcome.SHED)
    assert (shed.latency_s, shed.n_output, shed.replica_id) == (0.0, 0, None)
    assert "6 requests are waiting" in (shed.problem or "")


def test_a_place_in_the_queue_is_free_again_with_the_first_token() -> None:
    fleet = Fleet(ONE_BY_ONE, 1, gateways=GatewayShape(max_queued_requests=1))
    run = open_loop(fleet, [(0.0, request(0)), (0.5, request(1)), (1.5, request(2)), (2.5, request(3))])
    assert [record.outcome for record in by_id(run)] == [Outcome.OK, Outcome.SHED, Outcome.OK, Outcome.SHED]


def test_prompt_tokens_fill_the_queue_too() -> None:
    fleet = Fleet(ONE_BY_ONE, 1, gateways=GatewayShape(max_queued_tokens=11))
    assert [record.outcome for record in by_id(open_loop(fleet, at_once(3)))] == [Outcome.OK] * 2 + [Outcome.SHED]


def test_each_gateway_has_a_queue_of_its_own_and_they_take_turns() -> None:
    fleet = Fleet(ONE_BY_ONE, 1, gateways=GatewayShape(n_gateways=2, max_queued_requests=1))
    outcomes = [record.outcome for record in by_id(open_loop(fleet, at_once(4)))]
    assert outcomes == [Outcome.OK, Outcome.OK, Outcome.SHED, Outcome.SHED]


def test_what_the_replica_s_own_queue_cannot_hold_is_shed() -> None:
    shape = replace(ONE_BY_ONE, policy=replace(ONE_BY_ONE.policy, max_waiting_requests=2))
    run = open_loop(Fleet(shape, 1), at_once(5))
    assert [record.outcome for record in by_id(run)] == [Outcome.OK] * 2 + [Outcome.SHED] * 3


def test_a_client_that_gives_up_is_counted_as_such() -> None:
    run = open_loop(Fleet(ONE_BY_ONE, 1), [(0.0, request(0)), (0.0, request(1, timeout_s=2.0))])
    waiting = by_id(run)[1]
    assert (waiting.outcome, waiting.first_s, waiting.n_output) == (Outcome.ABORTED, None, 0)
    assert waiting.ended_s == 2.0


def test_a_request_that_can_never_fit_fails_alone() -> None:
    run = open_loop(Fleet(ONE_BY_ONE, 1), [(0.0, request(0, n_input=99, n_output=2)), (0.0, request(1))])
    failed, served = by_id(run)
    assert (failed.outcome, served.outcome) == (Outcome.ERROR, Outcome.OK)
    assert "max_model_len" in (failed.problem or "")


def test_more_users_than_requests_are_as_many_as_the_requests() -> None:
    run = closed_loop(Fleet(ONE_BY_ONE, 1), [request(index) for index in range(5)], 10**15)
    assert len(run.records) == 5


def test_in_a_closed_loop_each_user_waits_for_the_answer() -> None:
    run = closed_loop(Fleet(ONE_BY_ONE, 1), [request(index) for index in range(5)], 2)
    assert [(record.due_s, record.ended_s) for record in by_id(run)] == [
        (0.0, 3.0),
        (0.0, 6.0),
        (3.0, 9.0),
        (6.0, 12.0),
        (9.0, 15.0),
    ]


def random_arrivals(n: int) -> Iterable[tuple[float, Request]]:
    random, now = Random(3), 0.0
    for index in range(n):
        now += random.expovariate(2.0)
        yield now, request(index, n_input=random.randint(1, 40), n_output=random.randint(1, 20))


@pytest.mark.parametrize("route", [choose, choose_at_random, choose_least_loaded])
def test_the_same_seed_gives_the_same_run(route: Route) -> None:
    runs = [
        open_loop(
            Fleet(ONE_BY_ONE, 3, gateways=GatewayShape(n_gateways=2), route=route, seed=5), random_arrivals(60)
        )
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_another_seed_routes_otherwise() -> None:
    runs = [
        open_loop(Fleet(ONE_BY_ONE, 3, route=choose_at_random, seed=seed), random_arrivals(60)) for seed in (1, 2)
    ]
    assert runs[0].records != runs[1].records


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[float, Request]]:
    moments = sorted(draw(st.lists(st.floats(0, 20), min_size=1, max_size=12)))
    common = tuple(range(30, 46))
    return [
        (
            moment,
            Request(
                request_id=f"r{index}",
                prompt_ids=common[: draw(st.integers(0, 12))] + draw(st.tuples(st.integers(0, 49))),
                params=SamplingParams(
                    n=draw(st.sampled_from([1, 1, 1, 2, 3])),
                    max_tokens=draw(st.integers(0, 14)),
                    stop_token_ids=draw(st.sampled_from([(), (3, 11, 19)])),
                    seed=index,
                ),
                priority=draw(st.sampled_from([0, 0, -1, 1])),
                timeout_s=draw(st.sampled_from([None, None, 4.0])),
            ),
        )
        for index, moment in enumerate(moments)
    ]


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    CAPACITIES, POLICIES, arrivals(), st.integers(1, 3), st.integers(1, 2), st.integers(1, 4), st.integers(1, 2)
)
def test_blocks_are_conserved_and_each_request_ends_once_whatever_comes(
    capacity: Capacity,
    policy: SchedulingPolicy,
    coming: list[tuple[float, Request]],
    n_replicas: int,
    n_gateways: int,
    max_queued_requests: int,
    max_flights: int,
) -> None:
    shape = ReplicaShape(
        capacity=replace(capacity, max_flights=max_flights),
        policy=policy,
        cost=StepCost(step_s=0.3, prefill_token_s=0.1, decode_sequence_s=0.05, context_token_s=0.01),
        vocabulary_size=50,
    )
    fleet: Fleet

    def audit(index: int, _: StepPlan) -> None:
        fleet.schedulers[index].check()

    fleet = Fleet(
        shape,
        n_replicas,
        gateways=GatewayShape(n_gateways=n_gateways, max_queued_requests=max_queued_requests),
        watch=audit,
    )
    run = open_loop(fleet, coming)
    assert sorted(record.request_id for record in run.records) == sorted(each.request_id for _, each in coming)
    for scheduler in fleet.schedulers:
        scheduler.check()
        load = scheduler.load()
        assert (load.n_running, load.n_waiting, load.n_held_blocks) == (0, 0, 0)
        assert load.n_free_blocks + load.n_cached_blocks == capacity.n_blocks
    assert policy.max_model_len == MAX_MODEL_LEN
    for record in run.records:
        assert record.ended_s >= record.due_s
        assert record.first_s is None or record.due_s < record.first_s <= record.ended_s


N_GROUPS, N_ROUNDS, N_PREFIX, N_OWN, BLOCK_SIZE = 256, 6, 512, 64, 64
AFFINE = ReplicaShape(
    # Room for 42 of the 256 prefixes beside what runs: an eighth of them, and a third more, because the policy
    # spreads prefixes by chance.
    capacity=Capacity(n_blocks=42 * 8 + 12, block_size=BLOCK_SIZE, max_step_tokens=1024, max_sequences=16),
    policy=SchedulingPolicy(max_model_len=1000),
    cost=StepCost(step_s=0.002, prefill_token_s=0.00002),
    vocabulary_size=30_000,
)


def prefixed() -> Iterable[tuple[float, Request]]:
    """Each group's prompts begin alike; the groups come in another order in each round."""
    draw, now, index = Random(7), 0.0, 0
    prefixes = [draw.choices(range(30_000), k=N_PREFIX) for _ in range(N_GROUPS)]
    for _ in range(N_ROUNDS):
        for group in draw.sample(range(N_GROUPS), N_GROUPS):
            now += draw.expovariate(50.0)
            own = draw.choices(range(30_000), k=N_OWN)
            params = SamplingParams(max_tokens=2, seed=index)
            yield now, Request(request_id=f"r{index}", prompt_ids=(*prefixes[group], *own), params=params)
            index += 1


def hit_ratio(records: Sequence[SimulatedRecord]) -> float:
    """Of the prefix tokens that came before: those found, from the second round on."""
    again = [record for record in records if int(record.request_id[1:]) >= N_GROUPS]
    return sum(record.n_cached for record in again) / (N_PREFIX * len(again))


def test_affinity_finds_prefixes_that_random_routing_finds_one_time_in_eight() -> None:
    """Eight replicas, and prefixes of which each holds a good eighth: SGLang's and llm-d's experiments, small."""
    ratio_of = {
        route: hit_ratio(open_loop(Fleet(AFFINE, 8, route=route), prefixed()).records)
        for route in (choose, choose_at_random, choose_least_loaded)
    }
    assert ratio_of[choose] > 0.95
    assert ratio_of[choose_at_random] == pytest.approx(1 / 8, abs=0.05)
    assert ratio_of[choose_least_loaded] == pytest.approx(1 / 8, abs=0.05)
