"""Who gets a place next, and that none is lost."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from bakehouse_replica.core.errors import Overloaded
from bakehouse_router.lanes import Lane

WAIT_S = 60.0


class Visits:
    """Calls that take a place in turn, noted in `order`, and hold it until told to go."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._arrived = asyncio.Condition()
        self._may_go: dict[str, asyncio.Event] = {}
        self.order: list[str] = []

    async def send(self, name: str) -> "asyncio.Task[None]":
        """Returns when the call holds a place or waits; its tenant is the name's first letter."""
        self._may_go[name] = asyncio.Event()
        task = asyncio.create_task(self._visit(name))
        await asyncio.sleep(0)
        return task

    async def end(self, name: str, n_arrived: int) -> None:
        """Lets one call go; returns when so many have had a place."""
        self._may_go[name].set()
        async with asyncio.timeout(WAIT_S), self._arrived:
            await self._arrived.wait_for(lambda: len(self.order) >= n_arrived)

    async def _visit(self, name: str) -> None:
        async with self._lane.place(name[0]):
            async with self._arrived:
                self.order.append(name)
                self._arrived.notify_all()
            await self._may_go[name].wait()


async def test_tenants_take_turns_each_in_the_order_of_its_arrivals() -> None:
    visits = Visits(Lane(1, max_waiting=4))
    for name in ("a1", "a2", "a3", "a4", "b1", "c1", "b2"):
        await visits.send(name)
    for n_arrived in range(2, 8):
        await visits.end(visits.order[-1], n_arrived)
    assert visits.order == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_all_places_are_taken_before_anybody_waits() -> None:
    visits = Visits(Lane(2, max_waiting=4))
    for name in ("a1", "a2", "a3"):
        await visits.send(name)
    assert visits.order == ["a1", "a2"]
    await visits.end("a2", 3)
    assert visits.order == ["a1", "a2", "a3"]


async def test_a_tenant_with_too_many_waiting_is_refused_and_another_is_not() -> None:
    visits = Visits(Lane(1, max_waiting=1))
    for name in ("a1", "a2"):
        await visits.send(name)
    with pytest.raises(Overloaded, match="1 grammars are waiting"):
        await (await visits.send("a3"))
    await visits.send("b1")
    await visits.end("a1", 2)
    await visits.end("a2", 3)
    assert visits.order == ["a1", "a2", "b1"]


async def test_who_leaves_the_queue_costs_nobody_a_turn() -> None:
    visits = Visits(Lane(1, max_waiting=4))
    await visits.send("a1")
    leaving = [await visits.send(name) for name in ("a2", "b1")]
    await visits.send("c1")
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    await visits.end("a1", 2)
    assert visits.order == ["a1", "c1"]


@pytest.mark.parametrize("is_cancelled_first", [True, False])
async def test_a_place_given_to_who_leaves_at_that_moment_is_passed_on(is_cancelled_first: bool) -> None:
    lane = Lane(1, max_waiting=4)
    visits = Visits(lane)
    async with AsyncExitStack() as holding:
        await holding.enter_async_context(lane.place("a"))
        leaving = await visits.send("b1")
        await visits.send("c1")
        if is_cancelled_first:
            leaving.cancel()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await visits.end("b1", 1)
    assert visits.order == ["c1"]
