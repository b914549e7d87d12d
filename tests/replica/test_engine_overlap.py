"""An engine whose steps overlap: the same streams, whoever leaves, fails or closes with steps in flight."""

import asyncio
import queue
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from bakehouse_replica.core.executor import Executor, Pending
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Capacity, FailureKind, FinishReason, StepPlan, StepResult, TokenDelta
from bakehouse_replica.engine import Engine
from bakehouse_replica.executors.fake import FakeExecutor
from engines import CAPACITY, WAIT_S, Gate, collect, engine_with, ids_of, request, wait_until_idle

OVERLAPPING = replace(CAPACITY, max_flights=2)


@asynccontextmanager
async def overlapping(gate: Gate | None = None) -> AsyncGenerator[Engine, None]:
    executor = FakeExecutor(OVERLAPPING, before_step=None if gate is None else gate.before_step)
    async with engine_with(executor=executor) as engine:
        yield engine


class Watched:
    """An executor that notes in which order steps are begun and results taken, and breaks where it is told."""

    def __init__(self, inner: Executor, breaks_at: tuple[str, int] | None = None) -> None:
        self._inner = inner
        self._breaks_at = breaks_at
        self.events: list[tuple[str, int]] = []

    @property
    def capacity(self) -> Capacity:
        return self._inner.capacity

    def prepare(self, params: SamplingParams) -> None:
        self._inner.prepare(params)

    def begin(self, plan: StepPlan) -> "WatchedStep":
        self._note("begin", plan.step)
        return WatchedStep(self, self._inner.begin(plan), plan.step)

    def take(self, pending: Pending, step: int) -> StepResult:
        self._note("result", step)
        return pending.result()

    def _note(self, event: str, step: int) -> None:
        self.events.append((event, step))
        if (event, step) == self._breaks_at:
            raise RuntimeError("the oven is on fire")

    def close(self) -> None:
        self.events.append(("close", 0))
        self._inner.close()

    @property
    def most_in_flight(self) -> int:
        n_begun = n_most = 0
        for event, _ in self.events:
            n_begun += {"begin": 1, "result": -1, "close": 0}[event]
            n_most = max(n_most, n_begun)
        return n_most


class WatchedStep:
    def __init__(self, executor: Watched, pending: Pending, step: int) -> None:
        self._executor, self._pending, self._step = executor, pending, step

    def result(self) -> StepResult:
        return self._executor.take(self._pending, self._step)


def endings(deltas: Iterable[TokenDelta]) -> list[FinishReason]:
    return [delta.finish for delta in deltas if delta.finish is not None]


async def test_the_next_step_is_begun_before_a_result_is_taken_and_results_come_in_order() -> None:
    watched = Watched(FakeExecutor(OVERLAPPING))
    async with engine_with(executor=watched) as engine:
        assert len(ids_of(await collect(engine, request("a", max_tokens=4)))) == 4
    assert watched.events == [
        ("begin", 0),
        ("begin", 1),
        ("result", 0),
        ("begin", 2),
        ("result", 1),
        ("begin", 3),
        ("result", 2),
        ("result", 3),  # the fourth token is known to be the last
        ("close", 0),
    ]


async def test_a_crowd_gets_the_same_ids_as_without_overlap() -> None:
    asked = [request(f"{k}", prompt=tuple(range(1, 2 + k)), n=1 + k % 3, max_tokens=4 + k) for k in range(12)]
    found = []
    for capacity in (CAPACITY, OVERLAPPING):
        watched = Watched(FakeExecutor(capacity))
        async with engine_with(executor=watched) as engine:
            crowd = await asyncio.gather(*(collect(engine, each) for each in asked))
            await wait_until_idle(engine)
            assert engine.load().n_held_blocks == 0
        assert watched.most_in_flight == capacity.max_flights
        found.append([[ids_of(deltas, choice) for choice in range(1 + k % 3)] for k, deltas in enumerate(crowd)])
    assert found[0] == found[1]


async def test_a_first_token_does_not_wait_for_the_second() -> None:
    gate = Gate(1)
    async with overlapping(gate) as engine, aclosing(engine.generate(request("a"))) as stream:
        first = await anext(stream)
        assert gate.n_steps == 1
        gate.open()
    assert [(delta.start, len(delta.token_ids)) for delta in first.deltas] == [(0, 1)]


async def test_closing_the_stream_with_steps_in_flight_frees_its_blocks() -> None:
    gate = Gate()
    async with overlapping(gate) as engine:
        stream = engine.generate(request("a", max_tokens=100))
        gate.allow(3)
        await anext(stream)
        await stream.aclose()
        gate.allow(2)
        await wait_until_idle(engine)
        assert engine.load().n_held_blocks == 0
        assert gate.n_steps <= 5


async def test_an_abort_by_id_with_steps_in_flight_ends_the_stream_once() -> None:
    gate = Gate(2)
    async with overlapping(gate) as engine:
        stream = engine.generate(request("a", n=2, max_tokens=100))
        deltas = list((await anext(stream)).deltas)
        for _ in range(3):
            engine.abort("a")
        gate.open()
        deltas += [delta async for delivery in stream for delta in delivery.deltas]
        await wait_until_idle(engine)
        assert engine.load().n_held_blocks == 0
    for choice in range(2):
        ids_of(deltas, choice)
    assert endings(deltas) == [FinishReason.CANCELLED] * 2


async def test_a_stop_is_the_last_token_though_a_step_was_in_flight_behind_it() -> None:
    async with overlapping() as engine:
        whole = ids_of(await collect(engine, request("a", max_tokens=9)))
        stopping = request("b", max_tokens=9)
        stopping = replace(stopping, params=replace(stopping.params, stop_token_ids=(whole[3],)))
        deltas = await collect(engine, stopping)
        assert ids_of(deltas) == whole[:4]
        assert endings(deltas) == [FinishReason.STOP]
        await wait_until_idle(engine)
        assert engine.load().n_held_blocks == 0


async def test_draining_waits_for_steps_in_flight() -> None:
    gate = Gate(1)
    async with overlapping(gate) as engine:
        stream = engine.generate(request("a"))
        deltas = list((await anext(stream)).deltas)
        assert not await engine.drain(0.01)
        gate.open()
        assert await engine.drain(WAIT_S)
        deltas += [delta async for delivery in stream for delta in delivery.deltas]
    assert len(ids_of(deltas)) == 6


async def test_closing_takes_the_results_in_flight_before_it_closes_the_executor() -> None:
    gate = Gate(1)
    watched = Watched(FakeExecutor(OVERLAPPING, before_step=gate.before_step))
    async with engine_with(executor=watched) as engine:
        stream = engine.generate(request("a", max_tokens=100))
        await anext(stream)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        gate.open()
        await closing
        rest = [delta async for delivery in stream for delta in delivery.deltas]
        assert endings(rest) == [FinishReason.CANCELLED]
    begun = [step for event, step in watched.events if event == "begin"]
    taken = [step for event, step in watched.events[: watched.events.index(("close", 0))] if event == "result"]
    assert taken == begun


@pytest.mark.parametrize("broken", ["begin", "result"])
async def test_whatever_breaks_with_a_step_in_flight_ends_every_stream_with_an_error(broken: str) -> None:
    failures: queue.Queue[str] = queue.Queue()
    watched = Watched(FakeExecutor(OVERLAPPING), breaks_at=(broken, 3))
    async with engine_with(executor=watched, on_failure=failures.put) as engine:
        done = await asyncio.gather(*(collect(engine, request(f"{k}", max_tokens=50)) for k in range(3)))
        for deltas in done:
            ids_of(deltas)
            assert endings(deltas) == [FinishReason.ERROR]
            assert deltas[-1].failure is not None
            assert deltas[-1].failure.kind is FailureKind.ENGINE
        assert await asyncio.to_thread(failures.get, timeout=WAIT_S) == engine.failure
    after = watched.events[watched.events.index((broken, 3)) + 1 :]
    assert after == [("close", 0)], "nothing is begun or taken after a failure"
