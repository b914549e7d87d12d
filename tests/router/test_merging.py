"""Several streams read as one."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

import pytest
from bakehouse_router.merging import merged


class Streams:
    """Generators that count which of them have been closed."""

    def __init__(self) -> None:
        self.n_closed = 0
        self.n_produced = 0

    async def of(self, items: Iterable[int], error: Exception | None = None) -> AsyncGenerator[int, None]:
        try:
            for item in items:
                self.n_produced += 1
                yield item
                await asyncio.sleep(0)
            if error is not None:
                raise error
        finally:
            self.n_closed += 1


async def test_all_items_come_and_those_of_a_stream_in_their_order() -> None:
    streams = Streams()
    found = [item async for item in merged([streams.of(range(5)), streams.of(range(10, 13)), streams.of(())])]

    assert sorted(found) == [0, 1, 2, 3, 4, 10, 11, 12]
    assert [item for item in found if item < 10] == [0, 1, 2, 3, 4]
    assert streams.n_closed == 3


async def test_a_stream_that_breaks_ends_them_all() -> None:
    streams = Streams()
    found: list[int] = []

    async def read() -> None:
        async for item in merged([streams.of((1, 2), ValueError("broken")), streams.of(range(10, 99))]):
            found.append(item)

    with pytest.raises(ValueError, match="broken"):
        await read()

    assert [item for item in found if item < 10] == [1, 2]
    assert streams.n_closed == 2


async def test_closing_it_closes_them_all() -> None:
    streams = Streams()
    async with aclosing(merged([streams.of(range(9)), streams.of(range(9))])) as both:
        await anext(both)

    assert streams.n_closed == 2


async def test_streams_that_nobody_reads_do_not_run_ahead() -> None:
    streams = Streams()
    async with aclosing(merged([streams.of(range(99)), streams.of(range(99))])) as both:
        await anext(both)
        for _ in range(50):
            await asyncio.sleep(0)

        assert streams.n_produced <= 5
