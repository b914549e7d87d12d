"""A few places that calls take in turn, so that no tenant keeps the others waiting for long."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from bakehouse_replica.core.errors import Overloaded


class Lane:
    """Has `n_places`; who finds none waits. Tenants are served by turns, each in the order of its arrivals.

    Each tenant may have `max_waiting` at once.
    """

    def __init__(self, n_places: int, *, max_waiting: int) -> None:
        self._n_free = n_places
        self._max_waiting = max_waiting
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next tenant first

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncGenerator[None, None]:
        """A place while the context lasts. Raises `Overloaded` where too many of this tenant's are waiting."""
        if self._n_free:
            self._n_free -= 1
        else:
            await self._wait(tenant)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, tenant: str) -> None:
        queue = self._waiting.setdefault(tenant, deque())
        if len(queue) >= self._max_waiting:
            raise Overloaded(
                f"{len(queue)} grammars are waiting to be compiled, which is the limit; try again later"
            )
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(tenant, turn)
            else:  # both at once
                self._pass_on()
            raise

    def _forget(self, tenant: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(tenant, deque())
        if turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[tenant]

    def _pass_on(self) -> None:
        while self._waiting:
            tenant, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self._n_free += 1
