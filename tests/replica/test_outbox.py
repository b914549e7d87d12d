"""Outboxes: one message for all that waits, merged by stream where the gateway is slow, and an end for each."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from bakehouse_replica.core.errors import Overloaded, Unavailable
from bakehouse_replica.core.step_message import Received, ReturnAddress, StepMessage, Subscribe
from bakehouse_replica.core.types import Cost, FinishReason, TokenDelta
from bakehouse_replica.outbox import MIN_GAP_S, Outbox, Outboxes
from virtual_time import in_virtual_time

COST = Cost(block_seconds=1.5, computed_tokens=3, cached_tokens=0, recomputed_tokens=0, generated_tokens=3)
SUBSCRIBE = Subscribe(replica_id="r", gateway_id="g", subscription_id="g-0")
pytestmark = pytest.mark.timeout(60)  # no wait has a limit of its own
NEVER_S = 3600.0
N_AHEAD = 8


def address(first_stream: int) -> ReturnAddress:
    return ReturnAddress(gateway_id="g", first_stream=first_stream)


def delta(start: int, *token_ids: int, choice: int = 0, finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(request_id="a", choice=choice, start=start, token_ids=token_ids, finish=finish)


@pytest.fixture
async def outbox() -> AsyncIterator[Outbox]:
    made = Outbox(SUBSCRIBE, NEVER_S, max_unacknowledged=N_AHEAD)
    yield made
    made.close()


async def test_what_waits_of_all_requests_is_one_message_and_one_delta_a_stream(outbox: Outbox) -> None:
    with outbox.feed(address(10), 2) as two, outbox.feed(address(5), 1) as one:
        for feed, put in (
            (two, delta(0, 1)),
            (one, delta(7, 2)),
            (two, delta(3, 3, choice=1)),
            (one, delta(8, 4)),
        ):
            feed.put(put)

        message = await anext(outbox.messages())

    assert message == StepMessage(streams=(10, 5, 11), starts=(0, 7, 3), token_ids=((1,), (2, 4), (3,)), others=())


async def test_messages_are_apart_and_what_comes_between_merges(outbox: Outbox) -> None:
    loop = asyncio.get_running_loop()
    messages = outbox.messages()
    with outbox.feed(address(0), 1) as feed:
        feed.put(delta(0, 1))
        await anext(messages)
        sent_s = loop.time()
        feed.put(delta(1, 2))
        later = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0)
        feed.put(delta(2, 3))

        assert (await later).token_ids == ((2, 3),)

        assert loop.time() - sent_s >= 0.9 * MIN_GAP_S  # a timer may be early by the clock's resolution


async def test_a_feed_ends_when_each_of_its_choices_has(outbox: Outbox) -> None:
    with outbox.feed(address(0), 2) as feed:
        feed.put(delta(0, 1, choice=1, finish=FinishReason.STOP))
        assert not feed.is_complete
        feed.put(delta(0, 1, finish=FinishReason.STOP))
        await feed.ended()


async def test_an_error_ends_its_request_and_nobody_else_hears_of_it(outbox: Outbox) -> None:
    with outbox.feed(address(0), 1) as refused, outbox.feed(address(1), 1) as neighbour:
        refused.put(Overloaded("full"))
        neighbour.put(delta(0, 1))
        with pytest.raises(Overloaded, match="full"):
            await refused.ended()
        assert (await anext(outbox.messages())).streams == (1,)
        assert not neighbour.is_complete


async def test_a_gateway_that_takes_nothing_costs_no_more_than_its_answers(outbox: Outbox) -> None:
    with outbox.feed(address(0), 1) as feed:
        messages = outbox.messages()
        for index in range(N_AHEAD):
            feed.put(delta(index, index))
            await anext(messages)
        later = asyncio.ensure_future(anext(messages))
        for index in range(N_AHEAD, N_AHEAD + 100):
            feed.put(delta(index, index))
            await asyncio.sleep(0)
        assert not later.done()

        outbox.hear(1)

        (token_ids,) = (await later).token_ids
    assert token_ids == tuple(range(N_AHEAD, N_AHEAD + 100))


async def test_closing_ends_the_messages_and_every_request_that_is_open(outbox: Outbox) -> None:
    waiting = asyncio.ensure_future(anext(outbox.messages(), None))
    with outbox.feed(address(0), 1) as feed, outbox.feed(address(1), 1) as complete:
        complete.put(delta(0, 1, finish=FinishReason.STOP))
        await waiting
        outbox.close()
        with pytest.raises(Unavailable, match="subscription has been lost"):
            await feed.ended()
        await complete.ended()
    assert [message async for message in outbox.messages()] == []


@in_virtual_time
async def test_a_gateway_that_falls_silent_is_given_up_and_one_that_speaks_is_not() -> None:
    outboxes = Outboxes(silent_s=10.0)
    other = Subscribe(replica_id="r", gateway_id="h", subscription_id="h-0")
    with (
        outboxes.open(SUBSCRIBE) as silent,
        outboxes.open(other) as speaking,
        silent.feed(address(0), 1) as lost,
        speaking.feed(address(0), 1) as kept,
    ):
        ended = [asyncio.ensure_future(feed.ended()) for feed in (lost, kept)]
        for _ in range(5):
            outboxes.hear(Received(gateway_id="h", n_messages={}))
            await asyncio.sleep(4.0)
        assert isinstance(ended[0].exception(), Unavailable)
        assert not ended[1].done()
        assert outboxes.of("g") is None, "its next request would be fed to nobody"
        assert outboxes.of("h") is speaking
        ended[1].cancel()


async def test_a_gateway_s_new_subscription_takes_the_place_of_the_one_before() -> None:
    outboxes = Outboxes(silent_s=NEVER_S)
    again = Subscribe(replica_id="r", gateway_id="g", subscription_id="g-1")
    with outboxes.open(SUBSCRIBE) as earlier, outboxes.open(again) as later:
        assert outboxes.of("g") is later
        assert [message async for message in earlier.messages()] == []
    assert outboxes.of("g") is None
    with outboxes.open(again) as later:
        assert outboxes.of("g") is later
    assert outboxes.of("g") is None


async def test_once_its_call_is_over_a_request_sends_nothing_but_its_cost(outbox: Outbox) -> None:
    with outbox.feed(address(0), 2) as feed:
        pass
    feed.put(delta(0, 1))
    feed.put(delta(0, finish=FinishReason.CANCELLED))
    end = replace(delta(0, choice=1, finish=FinishReason.CANCELLED), cost=COST)
    feed.put(end)
    message = await anext(outbox.messages())
    assert (message.streams, message.others) == ((), ((1, end),))
    assert message.others[0][1].cost == COST
