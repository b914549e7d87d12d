"""What an engine refuses, what ends its requests early, and how it ends itself, on the fake executor."""

import asyncio
import logging
import queue
import threading
from dataclasses import replace

import pytest
from bakehouse_replica.core.errors import EngineDead, InvalidRequest, Overloaded, Unavailable
from bakehouse_replica.core.types import FailureKind, FinishReason, SchedulingPolicy, StepPlan
from bakehouse_replica.engine import Engine
from bakehouse_replica.executors.fake import FakeExecutor
from engines import CAPACITY, CARD, WAIT_S, Gate, collect, engine_with, ids_of, request

pytestmark = pytest.mark.usefixtures("max_flights")


async def test_an_id_outside_the_vocabulary_is_refused_and_the_neighbour_unharmed() -> None:
    gate = Gate()
    async with engine_with(gate.before_step) as engine:
        neighbour = asyncio.create_task(collect(engine, request("a")))
        for wrong in (1000, -1):
            with pytest.raises(InvalidRequest, match=f"prompt holds token id {wrong}; .* between 0 and 999"):
                await collect(engine, request("b", prompt=(1, wrong)))
        gate.open()
        assert len(ids_of(await neighbour)) == 6


async def test_stop_ids_that_leave_no_token_before_min_tokens_are_refused() -> None:
    async with engine_with() as engine:
        possible = request("a")
        params = replace(possible.params, min_tokens=1, stop_token_ids=tuple(range(CARD.vocabulary_size)))
        with pytest.raises(InvalidRequest, match=r"before min_tokens \(1\).*stop_token_ids has 1000"):
            await collect(engine, replace(possible, params=params))
        assert len(ids_of(await collect(engine, request("b")))) == 6


async def test_a_request_that_never_fits_is_refused_on_the_first_step() -> None:
    async with engine_with() as engine:
        with pytest.raises(InvalidRequest) as caught:
            await collect(engine, request("a", max_tokens=500))
        assert caught.value.param == "max_tokens"
        assert len(ids_of(await collect(engine, request("a")))) == 6


async def test_an_id_in_use_is_refused_and_its_owner_unharmed() -> None:
    gate = Gate(1)
    async with engine_with(gate.before_step) as engine:
        stream = engine.generate(request("a"))
        deltas = list((await anext(stream)).deltas)
        second = asyncio.create_task(collect(engine, request("a")))
        await asyncio.sleep(0)  # lets it put its command before the step that precedes the next look
        gate.allow(1)
        with pytest.raises(InvalidRequest, match="already being served"):
            await second
        gate.open()
        deltas += [delta async for delivery in stream for delta in delivery.deltas]
    assert len(ids_of(deltas)) == 6


async def test_a_full_queue_refuses_the_next_request() -> None:
    gate = Gate()
    async with engine_with(gate.before_step, max_waiting_requests=1) as engine:
        streams = [asyncio.create_task(collect(engine, request(f"{k}", n=8))) for k in range(9)]
        await asyncio.sleep(0)  # all have been handed over
        gate.open()
        done = await asyncio.gather(*streams, return_exceptions=True)
    assert any(isinstance(outcome, Overloaded) for outcome in done)
    assert all(isinstance(outcome, Overloaded | list) for outcome in done)


async def test_a_deadline_that_passes_ends_the_request_as_failed() -> None:
    now = [0.0]

    def let_time_pass(plan: StepPlan) -> None:
        now[0] += 1.0

    async with engine_with(let_time_pass, clock=lambda: now[0]) as engine:
        deltas = await collect(engine, request("a", max_tokens=100, timeout_s=5.0))
    assert deltas[-1].finish is FinishReason.ERROR
    assert deltas[-1].failure is not None
    assert deltas[-1].failure.kind is FailureKind.DEADLINE
    assert len(ids_of(deltas)) <= 6


async def test_a_step_that_hangs_is_told_while_it_does_and_no_other() -> None:
    hangs, goes_on, now = threading.Event(), threading.Event(), [0.0]

    def hang(plan: StepPlan) -> None:
        hangs.set()
        assert goes_on.wait(WAIT_S)

    async with engine_with(hang, clock=lambda: now[0]) as engine:
        assert engine.stall(5.0) is None
        streaming = asyncio.create_task(collect(engine, request("a")))
        assert await asyncio.to_thread(hangs.wait, WAIT_S)
        now[0] += 5.0
        assert engine.stall(5.0) is None
        now[0] += 0.5
        assert engine.stall(5.0) == "the engine of this replica has failed: a step has taken longer than 5 s"
        goes_on.set()
        assert len(ids_of(await streaming)) == 6
        now[0] += 60.0  # idle hours are no step
        assert await engine.drain(WAIT_S)
        assert engine.stall(5.0) is None


async def test_an_engine_that_has_failed_hangs_in_no_step() -> None:
    now = [0.0]

    def break_first(plan: StepPlan) -> None:
        raise RuntimeError("the oven is on fire")

    async with engine_with(break_first, clock=lambda: now[0]) as engine:
        await collect(engine, request("a"))
        now[0] += 60.0
        assert engine.stall(5.0) is None


async def test_a_resumed_request_that_fails_again_ends_where_its_output_stands() -> None:
    def break_third(plan: StepPlan) -> None:
        if plan.step == 2:
            raise RuntimeError("the oven is on fire")

    async with engine_with(break_third) as engine:
        deltas = await collect(engine, replace(request("a"), prior_output=(7, 8, 9)))
    assert sum(len(delta.token_ids) for delta in deltas) == 2
    assert (deltas[0].start, deltas[-1].finish) == (3, FinishReason.ERROR)
    assert deltas[-1].start + len(deltas[-1].token_ids) == 5


async def test_c48_a_broken_executor_ends_every_stream_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    failures: queue.Queue[str] = queue.Queue()

    def break_third(plan: StepPlan) -> None:
        if plan.step == 3:
            raise RuntimeError("the oven is on fire")

    caplog.set_level(logging.ERROR)
    async with engine_with(break_third, on_failure=failures.put) as engine:
        done = await asyncio.gather(
            *(collect(engine, request(f"{k}", n=2, max_tokens=50)) for k in range(6))
        )  # two wait
        for deltas in done:
            for choice in range(2):
                ids_of(deltas, choice)
            ends = [delta for delta in deltas if delta.finish]
            assert {delta.finish for delta in ends} == {FinishReason.ERROR}
            for delta in ends:
                assert delta.failure is not None
                assert delta.failure.kind is FailureKind.ENGINE
                assert "oven" not in delta.failure.message
        with pytest.raises(Unavailable) as refused:
            await collect(engine, request("late"))
        assert not isinstance(refused.value, EngineDead)  # which is for requests that may be the cause
        assert engine.failure is not None
        assert await asyncio.to_thread(failures.get, timeout=WAIT_S) == engine.failure
        (status,) = await engine.statuses()
        assert status.problem == engine.failure
    assert "the oven is on fire" in caplog.text


async def test_draining_refuses_new_requests_and_finishes_those_that_run() -> None:
    gate = Gate(1)
    async with engine_with(gate.before_step) as engine:
        stream = engine.generate(request("a"))
        deltas = list((await anext(stream)).deltas)
        assert not await engine.drain(0.01)
        with pytest.raises(Unavailable, match="draining"):
            await collect(engine, request("b"))
        gate.open()
        assert await engine.drain(WAIT_S)
        deltas += [delta async for delivery in stream for delta in delivery.deltas]
    assert len(ids_of(deltas)) == 6


async def test_closing_cancels_what_is_open_and_is_idempotent() -> None:
    gate = Gate(1)
    async with engine_with(gate.before_step) as engine:
        stream = engine.generate(request("a", max_tokens=100))
        await anext(stream)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        gate.open()
        await closing
        rest = [delta async for delivery in stream for delta in delivery.deltas]
        assert rest[-1].finish is FinishReason.CANCELLED
        await engine.close()
        with pytest.raises(Unavailable):
            await collect(engine, request("b"))


async def test_a_replica_that_has_not_started_refuses() -> None:
    engine = Engine(
        executor=FakeExecutor(CAPACITY), policy=SchedulingPolicy(max_model_len=CARD.max_model_len), card=CARD
    )
    with pytest.raises(Unavailable, match="not started"):
        await collect(engine, request("a"))
    await engine.close()
