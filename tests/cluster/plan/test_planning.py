"""Whole plans whose answers can be computed by hand, and what they are kept as."""

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from bakehouse_cluster.bench.records import Outcome
from bakehouse_cluster.bench.result import Load
from bakehouse_cluster.bench.traces import Trace
from bakehouse_cluster.bench.workloads import Demand, FixedLengths, SharedPrefixes
from bakehouse_cluster.plan.choices import Percentile, Routing
from bakehouse_cluster.plan.cost_file import CostFile
from bakehouse_cluster.plan.fleet import GatewayShape, ReplicaShape
from bakehouse_cluster.plan.objective import Objective
from bakehouse_cluster.plan.planning import make_plan
from bakehouse_cluster.plan.plot import plot_plan
from bakehouse_cluster.plan.result import PlanResult, Question, write_plan
from bakehouse_cluster.plan.table import show_plan
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.core.types import Capacity, SchedulingPolicy
from bakehouse_replica.executors.simulated import StepCost
from rich.console import Console

A_SECOND = CostFile(cost=StepCost(step_s=1.0), device="cpu", model="m")


def trace_of(*demands: Demand) -> Trace:
    return Trace(file_name="t.jsonl", digest="d", lines=demands)


# Four requests at once, each of three steps of a second, one at a time.
AT_ONCE = trace_of(*(Demand(n_input=4, n_output=3, arrival_s=0.0) for _ in range(4)))


def question(workload: Trace | FixedLengths | SharedPrefixes, **changes: Any) -> Question:
    asked = Question(
        workload="trace",
        kind=workload.kind,
        parameters=workload.parameters(),
        load=Load(kind="speed", value=1),
        n_requests=workload.n_requests,
        seed=0,
        model="m",
        replica=ReplicaShape(
            capacity=Capacity(n_blocks=64, block_size=4, max_step_tokens=64, max_sequences=1),
            policy=SchedulingPolicy(max_model_len=100),
            cost=A_SECOND.cost,
            vocabulary_size=100,
        ),
        gateways=GatewayShape(),
        cost=A_SECOND,
        objective=Objective(ttft_s=4.0),
        routing=Routing.PRODUCTION,
        timeout_s=None,
        max_replicas=8,
    )
    return replace(asked, **changes)


def no_text(_: object) -> tuple[int, ...]:
    raise AssertionError("no prompt is given as text")


def plan(
    workload: Trace | FixedLengths | SharedPrefixes, *, simulates_all: bool = False, **changes: Any
) -> PlanResult:
    return make_plan(question(workload, **changes), workload, no_text, simulates_all=simulates_all)


@pytest.mark.parametrize(("limit_s", "answer"), [(10.0, 1), (9.9, 2), (4.0, 2), (3.9, 4), (1.0, 4), (0.9, None)])
def test_the_smallest_sufficient_number_is_found(limit_s: float, answer: int | None) -> None:
    """First tokens come after 1, 4, 7, 10 s with one replica; after 1, 1, 4, 4 with two; 1, 1, 1, 4 with three."""
    assert plan(AT_ONCE, objective=Objective(ttft_s=limit_s)).answer == answer


def test_every_size_has_the_latencies_that_it_must_have() -> None:
    result = plan(AT_ONCE, simulates_all=True, max_replicas=4)
    slowest = [size.ttft_s.max if size.ttft_s else None for size in result.sizes]
    assert slowest == [10.0, 4.0, 4.0, 1.0]
    assert [size.duration_s for size in result.sizes] == [12.0, 6.0, 6.0, 3.0]
    assert [size.output_tokens_per_s for size in result.sizes] == [1.0, 2.0, 2.0, 4.0]
    assert [size.good_share for size in result.sizes] == [0.5, 1.0, 1.0, 1.0]
    assert [size.mean_running for size in result.sizes] == [1.0, 1.0, pytest.approx(12 / 18), 1.0]
    assert [sum(size.requests_by_replica) for size in result.sizes] == [4] * 4
    assert sorted(result.sizes[1].requests_by_replica) == [2, 2]
    assert {size.itl_s.p99 if size.itl_s else None for size in result.sizes} == {1.0}
    assert result.sizes[0].misses == ("p99 TTFT is 10 s", "goodput is 0.5")


@pytest.mark.parametrize("arrival_s", [4.3e9, 1e300])
def test_times_that_the_clock_cannot_tell_apart_are_refused(arrival_s: float) -> None:
    late = trace_of(Demand(n_input=4, n_output=3, arrival_s=arrival_s, origin="trace t, line 1"))
    with pytest.raises(StartupError, match=r"line 1: the last request comes at .* goes up to 4294967296 s"):
        plan(late)


def test_times_since_1970_give_the_latencies_of_times_since_0() -> None:
    since_1970 = trace_of(*(replace(demand, arrival_s=1_764_576_000.0) for demand in AT_ONCE.lines))
    one, other = (plan(workload).sizes[0] for workload in (AT_ONCE, since_1970))
    assert one.ttft_s == other.ttft_s
    assert one.duration_s == other.duration_s


def test_percentile_and_goodput_decide() -> None:
    """The median of 1, 4, 7, 10 s is 4 s; half of them are within 4 s."""
    lenient = Objective(ttft_s=4.0, percentile=Percentile.P50, goodput=0.5)
    assert plan(AT_ONCE, objective=lenient).answer == 1
    assert plan(AT_ONCE, objective=replace(lenient, goodput=0.51)).answer == 2
    assert plan(AT_ONCE, objective=replace(lenient, percentile=Percentile.P90)).answer == 2


def test_every_seventh_request_is_shed_where_six_may_wait() -> None:
    """E-12: 14.3 % stand beside the latencies, and those requests are no part of goodput."""
    seven = trace_of(*(Demand(n_input=4, n_output=1, arrival_s=10.0 * (index // 7)) for index in range(49)))
    result = plan(
        seven,
        gateways=GatewayShape(max_queued_requests=6),
        objective=Objective(ttft_s=100.0, goodput=0.9),
        max_replicas=1,
    )
    (size,) = result.sizes
    assert size.outcomes[Outcome.SHED] == 7
    assert size.share(Outcome.SHED) == pytest.approx(1 / 7)
    assert size.good_share == pytest.approx(6 / 7)
    assert size.misses == ("goodput is 0.8571",)
    assert result.answer is None
    shown = StringIO()
    show_plan(result, Console(file=shown, width=200))
    lines = shown.getvalue().splitlines()
    latencies = [line for line in lines if line.startswith("  1 ")][1:]
    assert [line.split()[1] for line in latencies] == ["TTFT", "ITL", "E2E"]
    assert all("14.3%" in line for line in latencies)
    assert lines[-1].startswith("1 replica does not meet p99 TTFT 100 s, goodput 0.9: goodput is 0.8571")


def test_a_client_s_patience_ends() -> None:
    result = plan(AT_ONCE, timeout_s=5.0, max_replicas=1)
    assert result.sizes[0].outcomes[Outcome.ABORTED] == 3  # the second has two of its tokens by then


def test_load_may_be_a_rate_or_a_number_of_users() -> None:
    fixed = FixedLengths(n_requests=6, n_input=4, n_output=3)
    users = plan(fixed, load=Load(kind="concurrency", value=2), max_replicas=1).sizes[0]
    assert users.duration_s == 18.0
    assert users.ttft_s is not None
    assert (users.ttft_s.p50, users.ttft_s.max) == (4.0, 4.0)
    rate = plan(fixed, load=Load(kind="rate", value=0.01), max_replicas=1).sizes[0]
    assert rate.ttft_s is not None
    assert rate.ttft_s.p50 == 1.0  # far apart, so that hardly anybody waits


def test_shared_prefixes_are_found_in_the_cache() -> None:
    shared = SharedPrefixes(n_requests=10, n_prefix=40, n_own=4, n_output=2)
    (size,) = plan(shared, load=Load(kind="rate", value=0.01), max_replicas=1).sizes
    assert size.hit_ratio == pytest.approx(9 * 40 / (10 * 44))


@pytest.mark.parametrize("routing", Routing)
def test_the_same_question_has_the_same_bytes_for_an_answer(tmp_path: Path, routing: Routing) -> None:
    shared = SharedPrefixes(n_requests=60, n_prefix=40, n_own=4, n_output=5, n_prefixes=7)
    for name in ("one.json", "two.json"):
        changes = {"load": Load(kind="rate", value=1.0), "routing": routing, "max_replicas": 4}
        write_plan(plan(shared, simulates_all=True, **changes), tmp_path / name)
    one = (tmp_path / "one.json").read_bytes()
    assert one == (tmp_path / "two.json").read_bytes()
    assert b'"format": "bakehouse-plan"' in one


def test_another_seed_is_another_answer() -> None:
    fixed = FixedLengths(n_requests=20, n_input=4, n_output=3)
    one, two = (plan(fixed, load=Load(kind="rate", value=0.5), seed=seed) for seed in (1, 2))
    assert one.sizes != two.sizes


def test_a_plan_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    plot_plan(plan(AT_ONCE), path)
    assert path.read_bytes().startswith(b"\x89PNG")
