"""What a waiting task hears of, and when it hears that nothing came."""

import asyncio

import pytest
from bakehouse_router.inbox import Inbox
from virtual_time import in_virtual_time

NEVER_S = 3600.0


async def test_everything_that_has_arrived_is_taken_at_once_and_in_order() -> None:
    inbox: Inbox[int] = Inbox(NEVER_S)
    inbox.put(1)
    inbox.put(2)
    assert await inbox.take() == [1, 2]


async def test_an_item_ends_a_wait() -> None:
    inbox: Inbox[int] = Inbox(NEVER_S)
    taking = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    inbox.put(1)
    assert await asyncio.wait_for(taking, 60) == [1]
    inbox.close()


@in_virtual_time
async def test_a_pause_counts_from_the_last_wait_on() -> None:
    """The timer of the first wait is due while the second one is on, and must not end it."""
    loop = asyncio.get_running_loop()
    inbox: Inbox[int] = Inbox(5.0)
    taking = asyncio.create_task(inbox.take())
    await asyncio.sleep(3.0)
    inbox.put(1)
    assert await taking == [1]
    assert await inbox.take() == []
    assert loop.time() == pytest.approx(3.0 + 5.0)


@in_virtual_time
async def test_a_moment_before_the_pause_ends_the_wait() -> None:
    loop = asyncio.get_running_loop()
    inbox: Inbox[int] = Inbox(NEVER_S)
    taking = asyncio.create_task(inbox.take())  # its timer is due long after the next wait ends
    await asyncio.sleep(0)
    inbox.put(1)
    await taking
    assert await inbox.take(until=2.0) == []
    assert loop.time() == pytest.approx(2.0)
    assert await inbox.take(until=1.0) == []  # has passed already
    assert loop.time() == pytest.approx(2.0)
    inbox.close()


async def test_a_wait_that_was_cancelled_takes_nothing_with_it() -> None:
    inbox: Inbox[int] = Inbox(NEVER_S)
    taking = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    inbox.put(1)
    assert await inbox.take() == [1]
    inbox.close()
