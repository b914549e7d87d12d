"""The engine: streams, cancel, refusal, drain and the end of everything, on the fake executor."""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from bakehouse_replica.core.errors import EngineDead, InvalidRequest, Overloaded, Unavailable
from bakehouse_replica.core.types import (
    Capacity,
    Delivery,
    FailureKind,
    FinishReason,
    ReplicaCard,
    Request,
    SamplingParams,
    SchedulingPolicy,
    StepPlan,
    TokenDelta,
)
from bakehouse_replica.engine import Engine
from bakehouse_replica.executors.fake import FakeExecutor
from bakehouse_router.client import ReplicaClient

CAPACITY = Capacity(n_blocks=64, block_size=4, max_step_tokens=32, max_sequences=8)
CARD = ReplicaCard(
    replica_id="r1",
    model_name="fake",
    model_digest="fake",
    hash_key=b"",
    block_size=CAPACITY.block_size,
    n_blocks=CAPACITY.n_blocks,
    vocabulary_size=1000,
    max_model_len=200,
    max_sequences=CAPACITY.max_sequences,
)
WAIT_S = 10.0


def request(
    request_id: str, *, prompt: tuple[int, ...] = (1, 2, 3, 4, 5), n: int = 1, **fields: object
) -> Request:
    params = SamplingParams(n=n, max_tokens=int(str(fields.get("max_tokens", 6))), seed=1)
    timeout_s = fields.get("timeout_s")
    assert timeout_s is None or isinstance(timeout_s, float)
    return Request(request_id=request_id, prompt_ids=prompt, params=params, timeout_s=timeout_s)


class Gate:
    """Lets the engine's thread make one step per permit; `open` lets it run free."""

    def __init__(self, n_permits: int = 0) -> None:
        self._permits = threading.Semaphore(n_permits)
        self._is_open = threading.Event()
        self.n_steps = 0

    def before_step(self, plan: StepPlan) -> None:
        if not self._is_open.is_set():
            assert self._permits.acquire(timeout=WAIT_S), f"step {plan.step} was never let through"
        self.n_steps += 1

    def allow(self, n_steps: int) -> None:
        self._permits.release(n_steps)

    def open(self) -> None:
        self._is_open.set()
        self._permits.release()


@asynccontextmanager
async def engine_with(
    before_step: Callable[[StepPlan], None] | None = None,
    *,
    max_waiting_requests: int = 100,
    clock: Callable[[], float] | None = None,
    on_failure: Callable[[str], None] | None = None,
) -> AsyncGenerator[Engine, None]:
    ticks = iter(range(1_000_000))
    engine = Engine(
        executor=FakeExecutor(CAPACITY, before_step=before_step),
        policy=SchedulingPolicy(max_model_len=CARD.max_model_len, max_waiting_requests=max_waiting_requests),
        card=CARD,
        clock=clock or (lambda: float(next(ticks))),
        on_failure=on_failure,
    )
    engine.start()
    try:
        async with asyncio.timeout(WAIT_S):
            yield engine
    finally:
        await engine.close()


async def collect(engine: Engine, wanted: Request) -> list[TokenDelta]:
    return [delta async for delivery in engine.generate(wanted) for delta in delivery.deltas]


async def wait_until_idle(engine: Engine) -> None:
    assert await engine.drain(WAIT_S)


def ids_of(deltas: list[TokenDelta], choice: int = 0) -> list[int]:
    """The choice's ids, after checking that its deltas are contiguous and end exactly once, on the last."""
    own = [delta for delta in deltas if delta.choice == choice]
    ids: list[int] = []
    for delta in own:
        assert delta.start == len(ids)
        ids += delta.token_ids
    assert [delta.finish is not None for delta in own] == [False] * (len(own) - 1) + [True]
    return ids


async def test_a_request_streams_its_tokens_and_ends_once_with_usage() -> None:
    async with engine_with() as engine:
        deltas = await collect(engine, request("a", max_tokens=6))
    assert len(ids_of(deltas)) == 6
    assert deltas[-1].finish is FinishReason.LENGTH
    assert deltas[-1].usage is not None
    assert (deltas[-1].usage.prompt_tokens, deltas[-1].usage.completion_tokens) == (5, 6)


async def test_text_in_a_crowd_equals_text_alone() -> None:
    prompts = [tuple(range(1, 2 + k)) for k in range(24)]
    async with engine_with() as engine:
        alone = [ids_of(await collect(engine, request(f"alone-{k}", prompt=p))) for k, p in enumerate(prompts)]
        crowd = await asyncio.gather(
            *(collect(engine, request(f"crowd-{k}", prompt=p)) for k, p in enumerate(prompts))
        )
    assert [ids_of(deltas) for deltas in crowd] == alone


async def test_every_choice_of_a_request_ends_once() -> None:
    async with engine_with() as engine:
        deltas = await collect(engine, request("a", n=4))
    assert all(len(ids_of(deltas, choice)) == 6 for choice in range(4))


async def test_the_first_token_travels_at_once() -> None:
    gate = Gate()
    async with engine_with(gate.before_step) as engine, aclosing(engine.generate(request("a"))) as stream:
        gate.allow(1)
        first = await anext(stream)
        gate.open()
    assert [(delta.start, len(delta.token_ids)) for delta in first.deltas] == [(0, 1)]
    assert first.replica_id == "r1"


async def test_what_accumulates_while_the_consumer_is_busy_travels_together() -> None:
    gate = Gate()
    async with engine_with(gate.before_step) as engine, aclosing(engine.generate(request("a"))) as stream:
        gate.allow(1)
        await anext(stream)
        gate.open()
        await wait_until_idle(engine)
        rest = [delivery async for delivery in stream]
    (delivery,) = rest
    (delta,) = delivery.deltas
    assert (delta.start, len(delta.token_ids), delta.finish) == (1, 5, FinishReason.LENGTH)


async def test_a_resumed_request_continues_at_the_next_output_index() -> None:
    async with engine_with() as engine:
        whole = ids_of(await collect(engine, request("a")))
        resumed = Request(
            request_id="b",
            prompt_ids=(1, 2, 3, 4, 5),
            params=SamplingParams(max_tokens=6, seed=1),
            prior_output=tuple(whole[:4]),
        )
        deltas = await collect(engine, resumed)
    assert deltas[0].start == 4
    assert [token_id for delta in deltas for token_id in delta.token_ids] == whole[4:]


async def test_closing_the_stream_frees_its_blocks_within_two_steps() -> None:
    gate = Gate()
    async with engine_with(gate.before_step) as engine:
        stream = engine.generate(request("a", max_tokens=100))
        gate.allow(3)
        await anext(stream)
        await stream.aclose()
        gate.allow(2)
        await wait_until_idle(engine)
        assert engine.load().n_held_blocks == 0
        assert gate.n_steps <= 5


async def test_cancelling_a_consumer_that_waits_cancels_its_request() -> None:
    gate = Gate()
    async with engine_with(gate.before_step) as engine:
        task = asyncio.create_task(collect(engine, request("a", max_tokens=100)))
        gate.allow(3)
        while gate.n_steps < 3:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.allow(2)
        await wait_until_idle(engine)
        assert (engine.load().n_held_blocks, engine.load().n_running) == (0, 0)


async def test_an_abort_by_id_ends_the_stream_as_cancelled_and_may_be_repeated() -> None:
    gate = Gate(2)
    async with engine_with(gate.before_step) as engine:
        stream = engine.generate(request("a", n=2, max_tokens=100))
        deltas = list((await anext(stream)).deltas)
        for _ in range(3):
            engine.abort("a")
        gate.open()
        deltas += [delta async for delivery in stream for delta in delivery.deltas]
    for choice in range(2):
        ids_of(deltas, choice)
    assert [delta.finish for delta in deltas if delta.finish] == [FinishReason.CANCELLED] * 2


async def test_an_abort_may_precede_its_request() -> None:
    async with engine_with() as engine:
        engine.abort("a")
        (delta,) = await collect(engine, request("a"))
    assert (delta.finish, delta.token_ids) == (FinishReason.CANCELLED, ())


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
        with pytest.raises(InvalidRequest, match="stop_token_ids holds all 1000 tokens"):
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


async def test_a_resumed_request_that_fails_again_ends_where_its_output_stands() -> None:
    def break_third(plan: StepPlan) -> None:
        if plan.step == 2:
            raise RuntimeError("the oven is on fire")

    async with engine_with(break_third) as engine:
        deltas = await collect(engine, replace(request("a"), prior_output=(7, 8, 9)))
    assert sum(len(delta.token_ids) for delta in deltas) == 2
    assert (deltas[0].start, deltas[-1].finish) == (3, FinishReason.ERROR)
    assert deltas[-1].start + len(deltas[-1].token_ids) == 5


async def test_a_broken_executor_ends_every_stream_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    failures: queue.Queue[str] = queue.Queue()

    def break_third(plan: StepPlan) -> None:
        if plan.step == 3:
            raise RuntimeError("the oven is on fire")

    caplog.set_level(logging.ERROR)
    async with engine_with(break_third, on_failure=failures.put) as engine:
        done = await asyncio.gather(*(collect(engine, request(f"{k}", n=2, max_tokens=50)) for k in range(3)))
        for deltas in done:
            for choice in range(2):
                ids_of(deltas, choice)
            ends = [delta for delta in deltas if delta.finish]
            assert {delta.finish for delta in ends} == {FinishReason.ERROR}
            for delta in ends:
                assert delta.failure is not None
                assert delta.failure.kind is FailureKind.ENGINE
                assert "oven" not in delta.failure.message
        with pytest.raises(EngineDead):
            await collect(engine, request("late"))
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


async def test_streams_of_several_event_loops_are_served_side_by_side() -> None:
    async with engine_with() as engine:

        def in_own_loop(name: str) -> list[int]:
            return ids_of(asyncio.run(collect(engine, request(name))))

        results = await asyncio.gather(*(asyncio.to_thread(in_own_loop, f"loop-{k}") for k in range(3)))
    assert results[0] == results[1] == results[2]
    assert len(results[0]) == 6


async def test_a_loop_that_closes_with_a_stream_open_harms_nobody() -> None:
    gate = Gate(1)
    kept: list[AsyncGenerator[Delivery, None]] = []  # else the loop would be asked to close what it collects

    def leave_open(engine: Engine) -> None:
        loop = asyncio.new_event_loop()
        kept.append(engine.generate(request("lost", max_tokens=100)))
        loop.run_until_complete(anext(kept[0]))
        loop.close()

    async with engine_with(gate.before_step) as engine:
        await asyncio.to_thread(leave_open, engine)
        gate.open()
        assert len(ids_of(await collect(engine, request("a")))) == 6
        await wait_until_idle(engine)
        assert engine.failure is None
        assert engine.load().n_held_blocks == 0


async def test_an_idle_engine_does_nothing_until_it_is_asked() -> None:
    n_looks = [0]

    def clock() -> float:
        n_looks[0] += 1
        return float(n_looks[0])

    async with engine_with(clock=clock) as engine:
        await collect(engine, request("a"))
        await wait_until_idle(engine)
        looks_before = n_looks[0]
        nothing_happens = threading.Event()
        await asyncio.to_thread(nothing_happens.wait, 0.1)
        assert n_looks[0] - looks_before <= 1  # the look that follows the drain command itself


async def test_the_engine_is_a_replica_client() -> None:
    async with engine_with() as engine:
        client: ReplicaClient = engine
        (status,) = await client.statuses()
    assert (status.card, status.problem) == (CARD, None)
