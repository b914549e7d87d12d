"""Stories as an engine tells them: with the last delta, and between two steps to whoever asks."""

import asyncio

import pytest
from bakehouse_replica.core.story import Admitted, WaitReason
from bakehouse_replica.core.types import SchedulingPolicy, StepPlan
from bakehouse_replica.engine import Engine
from bakehouse_replica.executors.fake import FakeExecutor
from bakehouse_replica.service import ReplicaService
from engines import CAPACITY, CARD, Gate, collect, engine_with, request

pytestmark = pytest.mark.usefixtures("max_flights")


async def test_the_last_delta_of_a_request_tells_its_story_and_no_other_does() -> None:
    async with engine_with() as engine:
        deltas = await collect(engine, request("r", n=3))
    stories = [delta.story for delta in deltas if delta.story is not None]
    assert len(stories) == 1
    assert deltas[-1].story is stories[0]
    assert isinstance(stories[0].entries[-1], Admitted)


async def test_who_lives_or_was_cancelled_here_can_be_asked_for_and_nobody_else() -> None:
    gate = Gate()
    async with engine_with(gate.before_step) as engine:
        service = ReplicaService(engine)
        runs = asyncio.create_task(collect(engine, request("runs", n=CAPACITY.max_sequences, max_tokens=30)))
        leaves = asyncio.create_task(collect(engine, request("leaves", max_tokens=30)))
        await asyncio.sleep(0)
        asked = asyncio.create_task(service.explain(["runs", "leaves", "nobody"]))
        await asyncio.sleep(0)
        gate.allow(3)
        told = {one.request_id: one for one in await asked}
        assert set(told) == {"runs", "leaves"}
        assert {one.replica_id for one in told.values()} == {"r1"}
        assert told["leaves"].story.ended_at_s is None
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        gate.open()
        (cancelled,) = await service.explain(["leaves"])
        assert cancelled.story.ended_at_s is not None
        assert WaitReason.NO_SLOT in {total.reason for total in cancelled.story.waited}
        await runs
        assert await service.explain(["runs"]) == ()


async def test_an_engine_that_has_not_started_failed_or_been_closed_tells_nothing() -> None:
    def fail(plan: StepPlan) -> None:
        raise RuntimeError("a step fails")

    idle = Engine(executor=FakeExecutor(CAPACITY), policy=SchedulingPolicy(max_model_len=200), card=CARD)
    assert await idle.explain(["r"]) == ()
    async with engine_with(fail) as engine:
        await collect(engine, request("r"))
        assert engine.failure is not None
        assert await engine.explain(["r"]) == ()
    assert await engine.explain(["r"]) == ()


async def test_who_asks_does_not_wait_for_a_step_that_hangs() -> None:
    gate = Gate()
    executor = FakeExecutor(CAPACITY, before_step=gate.before_step)
    policy = SchedulingPolicy(max_model_len=CARD.max_model_len)
    engine = Engine(executor=executor, policy=policy, card=CARD, explain_timeout_s=0.01)
    engine.start()
    runs = asyncio.create_task(collect(engine, request("r")))
    await asyncio.sleep(0)
    while engine._commands.qsize() or not engine._scheduler.has_work:
        await asyncio.sleep(0.001)
    told: tuple[object, ...] = await engine.explain(["r"])
    gate.open()
    await runs
    await engine.close()
    assert told == ()
