"""Deltas by subscription: by which way they come, what breaks with it and what does not, and who notices."""

import asyncio

import pytest
from bakehouse_replica.core.errors import EngineDead, Unavailable
from bakehouse_replica.core.step_message import Receipt, ReturnAddress, Subscribe
from bakehouse_replica.core.types import Delivery, Request, TokenDelta
from bakehouse_router import subscription_client
from bakehouse_router.subscription_client import SubscriptionClient
from engines import WAIT_S, Gate, engine_with, ids_of, request
from local_calls import LocalCall, LocalCalls, LocalReplica, cut_short

pytestmark = pytest.mark.timeout(120)  # most wait without a limit of their own
PERIOD_S = 0.01
LOST = "the connection was lost by a test"


async def subscribed(*replicas: LocalReplica) -> tuple[SubscriptionClient, LocalCalls]:
    """A client of these replicas that has subscribed to each."""
    calls = LocalCalls(*replicas)
    client = SubscriptionClient(calls, status_period_s=PERIOD_S)
    n_before = [len(replica.subscriptions) for replica in replicas]
    client.start()
    while [len(replica.subscriptions) for replica in replicas] == n_before:
        await asyncio.sleep(PERIOD_S)
    await rounds(calls)
    return client, calls


async def rounds(calls: LocalCalls) -> None:
    """The client has asked anew, and acted on the answers."""
    n_asked = calls.n_asked
    while calls.n_asked < n_asked + 2:
        await asyncio.sleep(PERIOD_S)


async def collected(client: SubscriptionClient, wanted: Request) -> list[TokenDelta]:
    return [delta async for delivery in client.generate(wanted) for delta in delivery.deltas]


async def test_a_call_carries_nothing_but_its_end() -> None:
    async with engine_with() as engine:
        replica = LocalReplica(engine)
        client, _ = await subscribed(replica)
        assert len(ids_of(await collected(client, request("a")))) == 6
        assert [type(item) for item in replica.requests[0].items] == [Receipt]
        (subscription,) = replica.subscriptions
        assert len(subscription.items) >= 1
        await client.close()


async def test_requests_of_one_step_share_a_message() -> None:
    gate = Gate()
    async with engine_with(gate.before_step) as engine:
        replica = LocalReplica(engine)
        client, _ = await subscribed(replica)
        crowd = [asyncio.ensure_future(collected(client, request(f"{k}", max_tokens=30))) for k in range(6)]
        while len(replica.requests) < 6:
            await asyncio.sleep(PERIOD_S)
        gate.open()
        await asyncio.gather(*crowd)
        (subscription,) = replica.subscriptions
        assert len(subscription.items) <= gate.n_steps
        await client.close()


async def test_before_it_has_subscribed_deltas_come_by_the_call() -> None:
    async with engine_with() as engine:
        replica = LocalReplica(engine)
        client = SubscriptionClient(LocalCalls(replica), status_period_s=PERIOD_S)
        assert len(ids_of(await collected(client, request("a")))) == 6
        assert {type(item) for item in replica.requests[0].items} == {Delivery}
        assert replica.subscriptions == []


async def test_a_call_may_end_before_its_last_message_arrives() -> None:
    async with engine_with() as engine:
        replica = LocalReplica(engine)
        client, _ = await subscribed(replica)
        replica.messages_may_arrive.clear()
        waiting = asyncio.ensure_future(collected(client, request("a")))
        while not (replica.requests and replica.requests[0].task.done()):
            await asyncio.sleep(PERIOD_S)
        assert not waiting.done()
        replica.messages_may_arrive.set()
        assert len(ids_of(await waiting)) == 6
        await client.close()


async def test_the_last_message_may_arrive_before_the_call_ends() -> None:
    async with engine_with() as engine:
        replica = LocalReplica(engine)
        replica.ends_may_arrive.clear()
        client, _ = await subscribed(replica)
        assert len(ids_of(await collected(client, request("a")))) == 6
        await client.close()


async def test_the_last_delivery_waits_for_the_end_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription_client, "END_TIMEOUT_S", WAIT_S)
    async with engine_with() as engine:
        replica = LocalReplica(engine)
        replica.ends_may_arrive.clear()
        client, _ = await subscribed(replica)
        whole = asyncio.ensure_future(collected(client, request("a")))
        (subscription,) = replica.subscriptions
        while not any(delta.finish for message in subscription.items for _, delta in message.others):
            await asyncio.sleep(0)
        while subscription.n_taken < len(subscription.items) or not replica.requests[0].task.done():
            await asyncio.sleep(0)
        for _ in range(8):  # more turns than it takes to hand the delivery on
            await asyncio.sleep(0)
        assert not replica.requests[0].end_was_taken
        replica.ends_may_arrive.set()
        await whole
        assert replica.requests[0].end_was_taken, "the client may ask again before its charge is released"
        await client.close()


class CutShort(LocalCalls):
    """Calls for requests end after so many items, and nothing tells that it is too early."""

    def __init__(self, *replicas: LocalReplica, n_items: int) -> None:
        super().__init__(*replicas)
        self._n_items = n_items

    def serve(self, request: Request, address: ReturnAddress) -> LocalCall[Delivery | Receipt]:
        return LocalCall(cut_short(self.replicas[0].service.serve(request, address), self._n_items))


@pytest.mark.parametrize("n_items", [0, 1])
async def test_a_call_that_ends_early_fails_its_request(n_items: int) -> None:
    gate = Gate(1)  # so that the first item is not the last
    async with engine_with(gate.before_step) as engine:
        client = SubscriptionClient(CutShort(LocalReplica(engine), n_items=n_items), status_period_s=PERIOD_S)
        with pytest.raises(EngineDead, match="ended before its request did"):
            await collected(client, request("a"))
        gate.open()


async def test_a_replica_is_told_how_many_messages_have_come() -> None:
    async with engine_with() as engine:
        replica = LocalReplica(engine)
        client, calls = await subscribed(replica)
        for k in range(3):
            await collected(client, request(f"{k}"))
        await rounds(calls)
        (subscription,) = replica.subscriptions
        assert calls.received is not None
        (n_messages,) = calls.received.n_messages.values()
        assert n_messages == len(subscription.items) >= 3
        await client.close()


async def test_a_replica_that_was_away_for_a_while_is_kept_for_the_requests_it_got_since() -> None:
    gate = Gate()
    async with engine_with(gate.before_step) as engine:
        replica = LocalReplica(engine)
        client, calls = await subscribed(replica)
        before = asyncio.ensure_future(collected(client, request("before", max_tokens=2)))
        gate.allow(1)
        while gate.n_steps < 1:
            await asyncio.sleep(PERIOD_S)
        replica.is_candidate = False
        await rounds(calls)
        replica.is_candidate = True
        await rounds(calls)
        since = asyncio.ensure_future(collected(client, request("since", max_tokens=30)))
        while len(replica.requests) < 2:
            await asyncio.sleep(PERIOD_S)
        gate.allow(4)
        assert len(ids_of(await before)) == 2
        replica.is_candidate = False
        await rounds(calls)
        gate.open()
        assert len(ids_of(await since)) == 30
        (subscription,) = replica.subscriptions
        while not subscription.task.done():
            await asyncio.sleep(PERIOD_S)
        await client.close()


async def test_what_was_lost_on_its_way_after_the_call_had_ended_fails_the_request() -> None:
    async with engine_with() as engine:
        replica = LocalReplica(engine)
        client, _ = await subscribed(replica)
        replica.messages_may_arrive.clear()
        waiting = asyncio.ensure_future(collected(client, request("a")))
        while not (replica.requests and replica.requests[0].task.done()):
            await asyncio.sleep(PERIOD_S)
        replica.subscriptions[0].break_off(EngineDead(LOST))
        replica.messages_may_arrive.set()
        with pytest.raises(EngineDead):
            await waiting
        await client.close()


async def test_a_receipt_of_a_subscription_that_is_lost_already_fails_the_request() -> None:
    async with engine_with() as engine:
        replica = LocalReplica(engine)
        client, calls = await subscribed(replica)
        replica.messages_may_arrive.clear()
        replica.ends_may_arrive.clear()
        waiting = asyncio.ensure_future(collected(client, request("a")))
        while not (replica.requests and replica.requests[0].task.done()):
            await asyncio.sleep(PERIOD_S)
        replica.subscriptions[0].break_off(EngineDead(LOST))
        replica.messages_may_arrive.set()
        await rounds(calls)
        assert not waiting.done()
        replica.ends_may_arrive.set()
        with pytest.raises(EngineDead, match="that had the end of this request was lost"):
            await waiting
        await client.close()


async def test_a_lost_subscription_fails_its_requests_at_once_and_nobody_else_s() -> None:
    gate, other_gate = Gate(), Gate()
    async with (
        engine_with(gate.before_step) as engine,
        engine_with(other_gate.before_step, replica_id="r2") as other,
    ):
        breaking, sound = LocalReplica(engine), LocalReplica(other)
        client, _ = await subscribed(breaking, sound)
        begun, queued = client.generate(request("begun", max_tokens=100)), client.generate(request("queued", n=8))
        first = asyncio.ensure_future(anext(begun))
        while not breaking.requests:
            await asyncio.sleep(0)
        waiting = asyncio.ensure_future(anext(queued))
        gate.allow(2)
        await first
        breaking.is_candidate = False
        elsewhere = asyncio.ensure_future(collected(client, request("elsewhere")))
        while not sound.requests:
            await asyncio.sleep(0)

        breaking.subscriptions[0].break_off(EngineDead(LOST))

        with pytest.raises(EngineDead, match=LOST):
            await anext(begun)
        await asyncio.wait({call.task for call in breaking.requests})
        gate.open()
        with pytest.raises(Unavailable, match="subscription has been lost"):
            await waiting
        assert await engine.drain(WAIT_S)
        assert engine.load().n_held_blocks == 0
        assert gate.n_steps < 50
        other_gate.open()
        assert len(ids_of(await elsewhere)) == 6
        await client.close()


async def test_a_lost_subscription_is_taken_out_anew() -> None:
    async with engine_with() as engine:
        replica = LocalReplica(engine)
        client, calls = await subscribed(replica)
        replica.subscriptions[0].break_off(EngineDead(LOST))
        while len(replica.subscriptions) < 2:
            await asyncio.sleep(PERIOD_S)
        await rounds(calls)
        assert len(ids_of(await collected(client, request("a")))) == 6
        assert [type(item) for item in replica.requests[0].items] == [Receipt]
        await client.close()


async def test_each_gateway_gets_its_own_requests() -> None:
    gate = Gate()
    async with engine_with(gate.before_step) as engine:
        replica = LocalReplica(engine)
        clients = [(await subscribed(replica))[0] for _ in range(3)]
        wanted = [request(f"{k}", prompt=(1, 2 + k), max_tokens=20) for k in range(3)]
        streams = [
            asyncio.ensure_future(collected(client, each)) for client, each in zip(clients, wanted, strict=True)
        ]
        await asyncio.sleep(PERIOD_S)
        gate.open()
        for each, deltas in zip(wanted, await asyncio.gather(*streams), strict=True):
            assert {delta.request_id for delta in deltas} == {each.request_id}
            assert len(ids_of(deltas)) == 20
        assert len(replica.subscriptions) == 3
        for client in clients:
            await client.close()


async def test_a_gateway_that_is_killed_leaves_no_request_and_no_subscription_behind() -> None:
    gate = Gate()
    async with engine_with(gate.before_step) as engine:
        replica = LocalReplica(engine, silent_s=2.0)  # for longer no machine stops this loop, by which one speaks
        killed, calls = await subscribed(replica)
        alive, _ = await subscribed(replica)
        lost = asyncio.ensure_future(anext(killed.generate(request("lost", max_tokens=150))))
        kept = asyncio.ensure_future(collected(alive, request("kept", max_tokens=30)))
        gate.allow(2)
        await lost
        calls.is_cut_off = True
        while not replica.requests[0].task.done() or not replica.subscriptions[0].task.done():
            await asyncio.sleep(PERIOD_S)
        gate.open()
        assert len(ids_of(await kept)) == 30
        assert await engine.drain(WAIT_S)
        assert engine.load().n_held_blocks == 0
        assert gate.n_steps < 100
        await killed.close()
        await alive.close()


async def test_a_replica_refuses_a_subscription_to_another() -> None:
    async with engine_with() as engine:
        call = LocalReplica(engine).service.subscribe(
            Subscribe(replica_id="r2", gateway_id="g", subscription_id="g-0")
        )
        with pytest.raises(Unavailable, match="replica r2 was meant, this is r1"):
            await anext(call)


async def test_a_replica_that_comes_back_under_another_id_is_subscribed_to() -> None:
    async with engine_with() as before, engine_with(replica_id="r2") as after:
        killed, successor = LocalReplica(before), LocalReplica(after)
        client, calls = await subscribed(killed)
        killed.kill()
        calls.replicas.append(successor)
        while not successor.subscriptions:
            await asyncio.sleep(PERIOD_S)
        await rounds(calls)
        assert len(ids_of(await collected(client, request("a")))) == 6
        assert [type(item) for item in successor.requests[0].items] == [Receipt]
        assert killed.n_ongoing == 0
        await client.close()


async def test_a_gateway_that_reads_late_gets_few_deliveries_and_every_token() -> None:
    gate = Gate()
    async with engine_with(gate.before_step) as engine:
        replica = LocalReplica(engine)
        client, _ = await subscribed(replica)
        stream = client.generate(request("a", max_tokens=50))
        gate.allow(1)
        deltas = list((await anext(stream)).deltas)
        gate.open()
        while not replica.requests[0].task.done():
            await asyncio.sleep(PERIOD_S)
        await asyncio.sleep(PERIOD_S)
        rest = [delivery async for delivery in stream]
        assert len(rest) <= 2
        assert len(ids_of(deltas + [delta for delivery in rest for delta in delivery.deltas])) == 50
        await client.close()
