"""What is asked of latencies, and what meets it."""

from collections.abc import Mapping

import pytest
from bakehouse_cluster.bench.records import Outcome
from bakehouse_cluster.bench.statistics import Distribution
from bakehouse_cluster.plan.choices import Percentile
from bakehouse_cluster.plan.objective import Objective, parse_objective
from bakehouse_cluster.plan.records import SimulatedRecord
from bakehouse_replica.core.errors import StartupError


def record(
    outcome: Outcome = Outcome.OK, ttft_s: float | None = 1.0, gap_s: float | None = 0.05, e2e_s: float = 3.0
) -> SimulatedRecord:
    return SimulatedRecord(
        request_id="r",
        outcome=outcome,
        due_s=2.0,
        first_s=None if ttft_s is None else 2.0 + ttft_s,
        ended_s=2.0 + e2e_s,
        n_input=4,
        n_output=3,
        n_cached=0,
        mean_gap_s=gap_s,
        replica_id="replica-0",
    )


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("ttft=1s", {"ttft": 1.0}),
        ("ttft=1s,itl=50ms", {"ttft": 1.0, "itl": 0.05}),
        ("itl=2.5ms, e2e=.5s", {"itl": 0.0025, "e2e": 0.5}),
    ],
)
def test_limits_are_times_by_the_names_of_latencies(text: str, limits: Mapping[str, float]) -> None:
    assert parse_objective(text, percentile=Percentile.P90, goodput=0.5).limits == limits


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is unknown"),
        ("tpot=1s", "'tpot' is unknown; there are ttft, itl, e2e"),
        ("ttft=1", "ttft=1 is no time above 0 in s or ms"),
        ("ttft=0s", "ttft=0s is no time above 0"),
        ("ttft=-1s", "is no time above 0"),
        ("ttft", "ttft= is no time above 0"),
        ("ttft=1s,ttft=2s", "ttft is given twice"),
    ],
)
def test_anything_else_is_refused(text: str, said: str) -> None:
    with pytest.raises(StartupError, match=said):
        parse_objective(text, percentile=Percentile.P99, goodput=0.99)


@pytest.mark.parametrize("goodput", [0.0, -0.1, 1.01, float("nan")])
def test_goodput_is_a_share(goodput: float) -> None:
    with pytest.raises(StartupError, match="--goodput"):
        parse_objective("ttft=1s", percentile=Percentile.P99, goodput=goodput)


@pytest.mark.parametrize(
    ("found", "is_good"),
    [
        (record(), True),
        (record(ttft_s=1.001), False),
        (record(gap_s=0.051), False),
        (record(e2e_s=3.001), False),
        (record(gap_s=None), True),  # a single token has no gap
        (record(Outcome.SHORT), True),
        (record(Outcome.SHED, ttft_s=None, gap_s=None, e2e_s=0.0), False),
        (record(Outcome.ABORTED), False),
        (record(Outcome.ERROR), False),
    ],
)
def test_a_request_is_good_where_it_is_answered_within_all_limits(found: SimulatedRecord, is_good: bool) -> None:
    assert Objective(ttft_s=1.0, itl_s=0.05, e2e_s=3.0).is_good(found) == is_good


TIMES = Distribution(mean=2.0, p50=1.0, p90=3.0, p99=5.0, max=9.0)


@pytest.mark.parametrize(
    ("limit", "percentile", "good_share", "misses"),
    [
        (5.0, Percentile.P99, 0.99, ()),
        (4.9, Percentile.P99, 0.99, ("p99 TTFT is 5 s",)),
        (3.0, Percentile.P90, 0.99, ()),
        (0.9, Percentile.P50, 0.98, ("p50 TTFT is 1 s", "goodput is 0.98")),
    ],
)
def test_a_run_misses_what_it_lacks(
    limit: float, percentile: Percentile, good_share: float, misses: tuple[str, ...]
) -> None:
    objective = Objective(ttft_s=limit, percentile=percentile)
    assert objective.misses({"ttft": TIMES, "itl": None, "e2e": None}, good_share) == misses


def test_a_run_without_a_single_answer_misses_its_goodput() -> None:
    assert Objective(ttft_s=1.0).misses({"ttft": None, "itl": None, "e2e": None}, 0.0) == ("goodput is 0",)
