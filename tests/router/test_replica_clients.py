"""What a gateway may rely on, whether deltas come by a call each or by subscription: one suite for both."""

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace

import pytest
from bakehouse_replica.core.errors import EngineDead, InvalidRequest, Overloaded, Unavailable
from bakehouse_replica.core.types import Delivery, FailureKind, FinishReason, Request, StepPlan, TokenDelta
from bakehouse_router.client import ReplicaClient
from bakehouse_router.dispatch import Dispatcher
from bakehouse_router.replica_calls import ReplicaCalls
from bakehouse_router.replica_watch import NOBODY_SERVES_S
from bakehouse_router.streaming_client import StreamingClient
from bakehouse_router.subscription_client import SubscriptionClient
from engines import WAIT_S, Gate, collect, engine_with, ids_of, request
from local_calls import KILLED, LocalCalls, LocalReplica

pytestmark = pytest.mark.timeout(120)  # most wait without a limit of their own
PERIOD_S = 0.01
Client = StreamingClient | SubscriptionClient
MakeClient = Callable[..., Client]


@pytest.fixture(params=[StreamingClient, SubscriptionClient])
async def make_client(request: pytest.FixtureRequest) -> AsyncIterator[MakeClient]:
    clients: list[Client] = []

    def make(calls: ReplicaCalls, **options: Callable[[], float]) -> Client:
        clients.append(request.param(calls, status_period_s=PERIOD_S, **options))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


async def settled(client: Client, calls: LocalCalls) -> None:
    """The client has been started and knows its replicas; one that subscribes has done so."""
    client.start()
    n_asked = calls.n_asked
    while calls.n_asked < n_asked + 2:
        await asyncio.sleep(PERIOD_S)


async def collected(client: ReplicaClient, wanted: Request) -> list[TokenDelta]:
    return [delta async for delivery in client.generate(wanted) for delta in delivery.deltas]


async def test_everybody_gets_the_tokens_that_the_engine_gives(make_client: MakeClient) -> None:
    wanted = [request(f"{k}", prompt=tuple(range(1, 2 + k)), n=1 + k % 3, max_tokens=9) for k in range(24)]
    async with engine_with() as engine:
        alone = [await collect(engine, each) for each in wanted]
        calls = LocalCalls(LocalReplica(engine))
        client = make_client(calls)
        await settled(client, calls)

        crowd = await asyncio.gather(
            *(collected(client, replace(each, request_id="c" + each.request_id)) for each in wanted)
        )

    for each, lonely, crowded in zip(wanted, alone, crowd, strict=True):
        for choice in range(each.params.n):
            assert ids_of(crowded, choice) == ids_of(lonely, choice)
            (end,) = [delta for delta in crowded if delta.choice == choice and delta.finish]
            assert (end.finish, end.usage is not None) == (FinishReason.LENGTH, True)
            assert end.request_id == "c" + each.request_id


async def test_log_probabilities_and_the_replica_s_name_come_along(make_client: MakeClient) -> None:
    wanted = request("a", n=2, prompt=tuple(range(20)))
    wanted = replace(wanted, params=replace(wanted.params, logprobs=1, prompt_logprobs=2))
    async with engine_with() as engine:
        calls = LocalCalls(LocalReplica(engine))
        client = make_client(calls)
        await settled(client, calls)

        deliveries = [delivery async for delivery in client.generate(wanted)]

    deltas = [delta for delivery in deliveries for delta in delivery.deltas]
    assert {delivery.replica_id for delivery in deliveries} == {"r1"}
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
    assert [len(delta.prompt_logprobs) for delta in deltas if delta.prompt_logprobs] == [19]


async def test_the_first_token_does_not_wait_for_the_second_and_the_call_is_told(make_client: MakeClient) -> None:
    gate = Gate()
    async with engine_with(gate.before_step) as engine:
        replica = LocalReplica(engine)
        calls = LocalCalls(replica)
        client = make_client(calls)
        await settled(client, calls)
        async with aclosing(client.generate(request("a"))) as stream:
            coming = asyncio.ensure_future(anext(stream))
            while not replica.requests:
                await asyncio.sleep(0)
            assert not replica.requests[0].is_prefilled
            gate.allow(1)
            (delta,) = (await coming).deltas
            assert replica.requests[0].is_prefilled
            gate.open()
    assert (delta.start, len(delta.token_ids)) == (0, 1)


async def test_closing_one_stream_frees_its_blocks_and_leaves_its_neighbours_alone(
    make_client: MakeClient,
) -> None:
    gate = Gate()
    async with engine_with(gate.before_step) as engine:
        replica = LocalReplica(engine)
        calls = LocalCalls(replica)
        client = make_client(calls)
        await settled(client, calls)
        neighbours = [asyncio.ensure_future(collected(client, request(f"{k}", max_tokens=40))) for k in range(3)]
        while len(replica.requests) < 3:
            await asyncio.sleep(0)
        stream = client.generate(request("closed", max_tokens=150))
        gate.allow(3)
        await anext(stream)
        await stream.aclose()
        await asyncio.wait({replica.requests[-1].task})
        gate.open()

        assert [len(ids_of(deltas)) for deltas in await asyncio.gather(*neighbours)] == [40] * 3
        assert await engine.drain(WAIT_S)
        assert engine.load().n_held_blocks == 0
        assert gate.n_steps < 100


async def test_cancelling_whoever_waits_for_the_first_token_cancels_the_request(make_client: MakeClient) -> None:
    gate = Gate()
    async with engine_with(gate.before_step) as engine:
        replica = LocalReplica(engine)
        calls = LocalCalls(replica)
        client = make_client(calls)
        await settled(client, calls)
        waiting = asyncio.ensure_future(collected(client, request("a", max_tokens=150)))
        while not replica.requests:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.wait({replica.requests[-1].task})
        gate.open()
        assert await engine.drain(WAIT_S)
        assert gate.n_steps < 100
    assert replica.requests[0].was_cancelled


async def test_refusals_are_raised_as_they_are(make_client: MakeClient) -> None:
    gate = Gate()
    async with engine_with(gate.before_step, max_waiting_requests=1) as engine:
        replica = LocalReplica(engine)
        calls = LocalCalls(replica)
        client = make_client(calls)
        await settled(client, calls)
        with pytest.raises(InvalidRequest, match="token id 1000"):
            await collected(client, request("wrong", prompt=(1000,)))
        crowd = [asyncio.ensure_future(collected(client, request(f"{k}", n=8))) for k in range(9)]
        while len(replica.requests) < 1 + 9:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # their calls have begun
        gate.open()
        done = await asyncio.gather(*crowd, return_exceptions=True)
    assert any(isinstance(outcome, Overloaded) for outcome in done)
    assert any(isinstance(outcome, list) for outcome in done)
    assert all(isinstance(outcome, Overloaded | list) for outcome in done)


async def test_a_killed_replica_fails_each_of_its_requests_once(make_client: MakeClient) -> None:
    gate = Gate()
    async with engine_with(gate.before_step) as engine:
        replica = LocalReplica(engine)
        calls = LocalCalls(replica)
        client = make_client(calls)
        await settled(client, calls)
        streams = [client.generate(request(f"{k}", n=4, max_tokens=40)) for k in range(4)]  # two of them wait
        firsts = [asyncio.ensure_future(anext(stream)) for stream in streams]
        gate.allow(3)
        await asyncio.wait(firsts, return_when=asyncio.FIRST_COMPLETED)

        replica.kill()
        gate.open()

        errors = []
        for first, stream in zip(firsts, streams, strict=True):
            with pytest.raises(EngineDead) as caught:
                await _rest(first, stream)
            errors.append(caught.value.message)
            assert [delivery async for delivery in stream] == []
    assert errors == [KILLED] * 4


async def _rest(first: asyncio.Future[Delivery], stream: AsyncGenerator[Delivery, None]) -> None:
    await first
    async for _ in stream:
        pass


async def test_an_engine_that_fails_ends_each_choice_with_its_failure(make_client: MakeClient) -> None:
    def break_fourth(plan: StepPlan) -> None:
        if plan.step == 3:
            raise RuntimeError("the oven is on fire")

    async with engine_with(break_fourth) as engine:
        calls = LocalCalls(LocalReplica(engine))
        client = make_client(calls)
        await settled(client, calls)
        crowd = await asyncio.gather(*(collected(client, request(f"{k}", n=2, max_tokens=50)) for k in range(6)))
        for deltas in crowd:
            for choice in range(2):
                ids_of(deltas, choice)
            ends = [delta.failure for delta in deltas if delta.finish]
            assert [failure and failure.kind for failure in ends] == [FailureKind.ENGINE] * 2
        with pytest.raises(Unavailable, match="the engine of this replica has failed"):
            await collected(client, request("late"))


async def test_a_replica_lost_before_the_first_token_is_made_good_by_another(make_client: MakeClient) -> None:
    gate = Gate()
    async with engine_with(gate.before_step) as held, engine_with(replica_id="r2") as free:
        first = LocalReplica(held)
        calls = LocalCalls(first, LocalReplica(free))
        client = make_client(calls)
        await settled(client, calls)
        whole = asyncio.ensure_future(_all(Dispatcher(client), request("a")))
        while not first.requests:
            await asyncio.sleep(0)
        first.kill()
        gate.open()
        assert len(ids_of(await whole)) == 6


async def _all(dispatcher: Dispatcher, wanted: Request) -> list[TokenDelta]:
    return [delta async for delivery in dispatcher.stream(wanted) for delta in delivery.deltas]


async def test_a_request_does_not_wait_for_ever_for_somebody_to_serve(make_client: MakeClient) -> None:
    gate = Gate()
    async with engine_with(gate.before_step) as engine:
        replica = LocalReplica(engine)
        calls = LocalCalls(replica)
        now = [0.0]
        client = make_client(calls, clock=lambda: now[0])
        await settled(client, calls)
        waiting = asyncio.ensure_future(collected(client, request("a")))
        for _ in range(5):
            now[0] += NOBODY_SERVES_S / 3
            await settled_again(calls)
        assert not waiting.done(), "somebody serves"
        calls.is_cut_off = True
        now[0] += NOBODY_SERVES_S + 2
        with pytest.raises(Unavailable, match="no replica has served for 12 s"):
            await waiting
        gate.open()


async def test_a_replica_that_is_being_stopped_is_let_go_when_its_last_request_has_ended(
    make_client: MakeClient,
) -> None:
    gate = Gate()
    async with engine_with(gate.before_step) as old, engine_with(replica_id="r2") as new:
        leaving = LocalReplica(old)
        calls = LocalCalls(leaving, LocalReplica(new))
        client = make_client(calls)
        await settled(client, calls)
        last = asyncio.ensure_future(collected(client, request("last", max_tokens=30)))
        gate.allow(2)
        while gate.n_steps < 2:
            await asyncio.sleep(PERIOD_S)
        leaving.is_candidate = False
        await settled_again(calls)

        assert len(ids_of(await collected(client, request("elsewhere")))) == 6
        assert leaving.n_ongoing > 0
        gate.open()
        assert len(ids_of(await last)) == 30
        while leaving.n_ongoing:
            await asyncio.sleep(PERIOD_S)


async def settled_again(calls: LocalCalls) -> None:
    n_asked = calls.n_asked
    while calls.n_asked < n_asked + 2:
        await asyncio.sleep(PERIOD_S)


async def test_a_replica_without_requests_is_let_go_though_others_are_busy(make_client: MakeClient) -> None:
    gate = Gate()
    async with engine_with() as old, engine_with(gate.before_step, replica_id="r2") as new:
        leaving = LocalReplica(old)
        calls = LocalCalls(leaving, LocalReplica(new))
        client = make_client(calls)
        await settled(client, calls)
        await collected(client, request("first"))
        leaving.is_candidate = False
        await settled_again(calls)
        waits = asyncio.ensure_future(collected(client, request("waits")))
        while leaving.n_ongoing:
            await asyncio.sleep(PERIOD_S)
        assert not waits.done()
        gate.open()
        assert len(ids_of(await waits)) == 6


async def test_nothing_is_left_behind(make_client: MakeClient) -> None:
    gate = Gate()
    async with engine_with(gate.before_step) as engine:
        calls = LocalCalls(LocalReplica(engine))
        client = make_client(calls)
        await settled(client, calls)
        stream = client.generate(request("a", max_tokens=100))
        gate.allow(2)
        await anext(stream)
        await stream.aclose()
        gate.open()
        await collected(client, request("b"))
        await client.close()
        del stream
        while len(asyncio.all_tasks()) > 1:  # this one
            await asyncio.sleep(PERIOD_S)
        gc.collect()  # an exception that nobody has asked for would be reported now
