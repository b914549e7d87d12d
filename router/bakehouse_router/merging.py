"""Several asynchronous streams as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class _Next(Generic[Item]):
    item: Item


@dataclass(frozen=True, slots=True)
class _End:
    """A stream is over; `error` where it broke."""

    error: Exception | None = None


async def merged(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """The items of all streams as they come, until each has ended.

    Raises what the first one to break raises, after what had come before. Closes all of them, however it ends.
    """
    # One place: a stream that nobody reads does not run ahead.
    queue: asyncio.Queue[_Next[Item] | _End] = asyncio.Queue(maxsize=1)
    pumps = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    n_open = len(pumps)
    try:
        while n_open:
            match await queue.get():
                case _Next(item):
                    yield item
                case _End(error):
                    n_open -= 1
                    if error is not None:
                        raise error
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(stream: AsyncGenerator[Item, None], queue: asyncio.Queue[_Next[Item] | _End]) -> None:
    ended = _End()
    try:
        async with aclosing(stream):
            async for item in stream:
                await queue.put(_Next(item))
    except Exception as error:  # raised again by `merged`
        ended = _End(error)
    await queue.put(ended)
