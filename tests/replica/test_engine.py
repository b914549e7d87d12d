"""The engine's streams: what arrives, when and in which pieces, and how a client leaves, on the fake executor."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Delivery, FinishReason, Request
from bakehouse_replica.engine import Engine
from bakehouse_replica.executors.fake import FakeExecutor
from bakehouse_router.client import ReplicaClient
from engines import CAPACITY, CARD, Gate, collect, engine_with, ids_of, request, wait_until_idle

pytestmark = pytest.mark.usefixtures("max_flights")


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


async def test_log_probabilities_arrive_whole_however_deltas_are_merged() -> None:
    gate = Gate()
    asked = request("a", n=2, prompt=tuple(range(50)))
    asked = replace(asked, params=replace(asked.params, logprobs=1, prompt_logprobs=2))
    executor = FakeExecutor(CAPACITY, tokens_per_step=4, before_step=gate.before_step)
    async with engine_with(executor=executor) as engine, aclosing(engine.generate(asked)) as stream:
        gate.allow(2)
        deltas = list((await anext(stream)).deltas)
        gate.open()
        await wait_until_idle(engine)
        deltas += [delta async for delivery in stream for delta in delivery.deltas]
    for choice in range(2):
        assert len(ids_of(deltas, choice)) == 6
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
    assert [(delta.choice, len(delta.prompt_logprobs)) for delta in deltas if delta.prompt_logprobs] == [(0, 49)]


async def test_a_request_without_output_ends_with_its_usage_and_its_prompt_scored() -> None:
    async with engine_with() as engine:
        plain = request("plain", max_tokens=0)
        scored = replace(plain, request_id="scored", params=replace(plain.params, prompt_logprobs=0))
        for asked, n_scores in ((plain, 0), (scored, 4)):
            (delta,) = await collect(engine, asked)
            assert (delta.token_ids, delta.finish) == ((), FinishReason.LENGTH)
            assert len(delta.prompt_logprobs) == n_scores
            assert delta.usage is not None
            assert (delta.usage.prompt_tokens, delta.usage.completion_tokens) == (5, 0)


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


async def test_c45_closing_the_stream_frees_its_blocks_within_two_steps() -> None:
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


async def test_c45_an_abort_may_precede_its_request() -> None:
    async with engine_with() as engine:
        engine.abort("a")
        (delta,) = await collect(engine, request("a"))
    assert (delta.finish, delta.token_ids) == (FinishReason.CANCELLED, ())


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
