"""What an engine tells of its steps, its blocks and its audits."""

import asyncio
from collections.abc import Callable

import pytest
from bakehouse_replica.core.counts import Distribution
from bakehouse_replica.core.metric_table import (
    BATCH_FILL,
    KV_BLOCK_SECONDS,
    KV_BLOCKS,
    KV_CONSISTENT,
    METRICS,
    PREFIX_HIT_TOKENS,
    REPLICA_SERVES,
    STEP_SECONDS,
    Metric,
    Source,
)
from bakehouse_replica.core.types import StepPlan
from bakehouse_replica.engine import Engine
from bakehouse_replica.meter import AUDIT_PATIENCE, AUDIT_PERIOD_S, AUDIT_SHARE, Meter
from engines import CAPACITY, collect, engine_with, ids_of, request, wait_until_idle


def counted(engine: Engine, metric: Metric, *labels: str) -> float | Distribution:
    (value,) = (one.value for one in engine.series if (one.name, one.labels) == (metric.name, labels))
    return value


def n_samples(engine: Engine, metric: Metric, *labels: str) -> int:
    distribution = counted(engine, metric, *labels)
    assert isinstance(distribution, Distribution)
    return distribution.at_most[-1]


async def test_each_step_is_timed_in_three_parts() -> None:
    plans: list[StepPlan] = []
    async with engine_with(plans.append) as engine:  # the clock ticks by a second with every look at it
        await collect(engine, request("r"))
        await wait_until_idle(engine)
        assert n_samples(engine, BATCH_FILL) == len(plans) == 6
        for phase in ("plan", "execute", "publish"):
            distribution = counted(engine, STEP_SECONDS, phase)
            assert isinstance(distribution, Distribution)
            assert (distribution.at_most[-1], distribution.total) == (6, 6.0)


async def test_a_status_carries_all_that_the_replica_counts_by_our_names() -> None:
    async with engine_with() as engine:
        for _ in range(2):
            await collect(engine, request("r"))
        await wait_until_idle(engine)
        (status,) = await engine.statuses()
    found = {(one.name, one.labels): one.value for one in status.counted}
    assert found[PREFIX_HIT_TOKENS.name, ()] == 4
    assert found[KV_BLOCKS.name, ("held",)] == 0
    assert sum(found[KV_BLOCKS.name, (state,)] for state in ("free", "cached", "held")) == CAPACITY.n_blocks  # type: ignore[misc]
    assert found[REPLICA_SERVES.name, ()] == 0, "it is draining"
    names = {metric.name for metric in METRICS if metric.source is Source.REPLICA}
    assert {name for name, _ in found} == names


async def test_a_failed_engine_says_that_it_serves_no_more() -> None:
    def fail(plan: StepPlan) -> None:
        raise RuntimeError("out of dough")

    async with engine_with(fail) as engine:
        await collect(engine, request("r"))
        assert counted(engine, REPLICA_SERVES) == 0


async def test_a_pool_that_has_lost_a_block_is_found_inconsistent_for_ever_while_others_are_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [100.0]
    async with engine_with(clock=lambda: now[0]) as engine:
        before = ids_of(await collect(engine, request("before")))
        engine._scheduler._pool._free.pop()
        for index in range(3):
            now[0] += 2 * AUDIT_PERIOD_S
            assert ids_of(await collect(engine, request(f"after-{index}"))) == before
        await wait_until_idle(engine)
        assert counted(engine, KV_CONSISTENT) == 0
    assert "the audit of sequences and KV blocks has failed" in caplog.text


async def test_the_block_seconds_of_an_idle_replica_go_on_and_never_back() -> None:
    now, states = [100.0], ("free", "cached", "held")
    async with engine_with(clock=lambda: now[0]) as engine:

        def block_seconds() -> list[float]:
            values = [counted(engine, KV_BLOCK_SECONDS, state) for state in states]
            return [value for value in values if not isinstance(value, Distribution)]

        await collect(engine, request("r"))
        while not engine._meter._samples.is_asleep:
            await asyncio.sleep(0.001)
        n_blocks = [counted(engine, KV_BLOCKS, state) for state in states]
        assert n_blocks[2] == 0
        assert n_blocks[1] != 0, "the prompt has left a prefix"
        before, series = block_seconds(), engine._meter._samples
        now[0] += 7.0
        assert block_seconds() == [begun + 7 * n for begun, n in zip(before, n_blocks, strict=True)]  # type: ignore[operator]
        (status,) = await engine.statuses()
        found = {one.labels[0]: one.value for one in status.counted if one.name == KV_BLOCK_SECONDS.name}
        assert [found[state] for state in states] == block_seconds()
        assert engine._meter._samples is series, "nobody has been woken for it"
        idle = block_seconds()
        await collect(engine, request("other"))  # in no time
        while not engine._meter._samples.is_asleep:
            await asyncio.sleep(0.001)
        assert block_seconds() == idle
    assert sum(idle) == 7 * CAPACITY.n_blocks


class Audit:
    """Takes `cost_s` of the time in hand, and counts how often it ran."""

    def __init__(self, cost_s: float) -> None:
        self.now = 100.0
        self.n_runs = 0
        self._cost_s = cost_s

    def __call__(self) -> None:
        self.now += self._cost_s
        self.n_runs += 1

    def runs_at(self, moment: float, meter: Meter, *, is_idle: bool) -> bool:
        self.now, n_before = moment, self.n_runs
        clock: Callable[[], float] = lambda: self.now  # noqa: E731
        meter.audit_if_due(self, clock, is_idle=is_idle)
        return self.n_runs > n_before


@pytest.mark.parametrize(
    ("cost_s", "pause_s"),
    [pytest.param(0.002, AUDIT_PERIOD_S, id="cheap"), pytest.param(0.1, 0.1 / AUDIT_SHARE, id="dear")],
)
def test_audits_wait_for_idle_moments_and_for_less_long_the_cheaper_they_are(
    cost_s: float, pause_s: float
) -> None:
    meter, audit = Meter(), Audit(cost_s)
    assert audit.runs_at(100.0, meter, is_idle=True)
    ended_at = 100.0 + cost_s
    assert not audit.runs_at(ended_at + 0.99 * pause_s, meter, is_idle=True)
    assert not audit.runs_at(ended_at + 1.01 * pause_s, meter, is_idle=False)
    assert audit.runs_at(ended_at + 1.01 * pause_s, meter, is_idle=True)
    ended_at = audit.now
    assert not audit.runs_at(ended_at + (AUDIT_PATIENCE - 0.01) * pause_s, meter, is_idle=False)
    assert audit.runs_at(ended_at + (AUDIT_PATIENCE + 0.01) * pause_s, meter, is_idle=False), "it never idles"
