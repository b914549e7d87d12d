"""Sends requests as users would: each waiting for the answer before it asks again, or at their own times."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bakehouse_cluster.bench.connection import Broken, ConnectionPool
from bakehouse_cluster.bench.records import Outcome, Record
from bakehouse_cluster.bench.reply import ReplyReader
from bakehouse_cluster.reaching import reason_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Sendable:
    """A request as bytes. `n_exact`: how long the answer must be, None where any length will do.

    `arrival_s`: when it is sent, from the start; None in a closed loop. `n_input`: tokens of its prompt by our
    count.
    """

    request: bytes
    n_exact: int | None
    n_input: int | None = None
    arrival_s: float | None = None


class Sender:
    """Sends single requests over a pool of connections. `timeout_s`: for a whole answer."""

    def __init__(self, pool: ConnectionPool, *, timeout_s: float) -> None:
        self._pool = pool
        self._timeout_s = timeout_s

    async def send(self, sendable: Sendable, due_s: float) -> Record:
        """One request and all of its reply, whatever becomes of it. `due_s`: on `time.perf_counter`'s clock."""
        reader = ReplyReader(time.perf_counter)
        sent_s = time.perf_counter()
        problem = None
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._pool.exchange(sendable.request, reader)
        except TimeoutError:
            outcome, problem = Outcome.ABORTED, f"no end within {self._timeout_s:g} s"
        except Broken as error:
            outcome, problem = Outcome.ABORTED, str(error)
        except OSError as error:
            outcome, problem = Outcome.ERROR, f"no connection: {reason_of(error)}"
        else:
            outcome = reader.outcome(sendable.n_exact)
        n_frames = len(reader.frame_s)
        return Record(
            outcome=outcome,
            due_s=due_s,
            sent_s=sent_s,
            ended_s=time.perf_counter(),
            frame_s=tuple(reader.frame_s),
            frame_tokens=reader.frame_tokens(),
            n_input=reader.n_input,
            n_output=n_frames if reader.n_usage is None else reader.n_usage,
            n_input_planned=sendable.n_input,
            n_cached=reader.n_cached,
            problem=problem or reader.problem,
        )


async def closed_loop(
    sendables: Sequence[Sendable], n_users: int, sender: Sender, report: Callable[[Record], None]
) -> None:
    """`n_users` at once take the requests in order; each takes its next one when the last has ended."""
    remaining = iter(sendables)

    async def user() -> None:
        for sendable in remaining:
            report(await sender.send(sendable, time.perf_counter()))

    async with asyncio.TaskGroup() as users:
        for _ in range(min(n_users, len(sendables))):
            users.create_task(user())


async def open_loop(sendables: Sequence[Sendable], sender: Sender, report: Callable[[Record], None]) -> None:
    """Each at its `arrival_s`, however many are still waiting for answers."""
    begun_s = time.perf_counter()

    async def one(sendable: Sendable, due_s: float) -> None:
        report(await sender.send(sendable, due_s))

    async with asyncio.TaskGroup() as requests:
        for sendable in sendables:
            assert sendable.arrival_s is not None, "an open loop needs times of arrival"
            due_s = begun_s + sendable.arrival_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            requests.create_task(one(sendable, due_s))
