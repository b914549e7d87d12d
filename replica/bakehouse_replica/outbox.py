"""What the subscriptions of gateways have not taken yet, of all their requests here.

Everything here lives on one event loop. A subscription ends when its gateway closes it, asks for another one, or
has been silent for long: over Ray's actor calls, Serve's default, the calls of a gateway that was killed run
on (for 12 s and more, measured; over gRPC they are cancelled in 20 ms). A gateway's requests end with it.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from bakehouse_replica.core.errors import Unavailable
from bakehouse_replica.core.step_message import Received, ReturnAddress, StepMessage, Subscribe, pack
from bakehouse_replica.core.types import TokenDelta
from bakehouse_replica.mailbox import Letter, put_merged

# Over Ray's actor calls Serve takes a message off our hands at once and queues it without bound, and over gRPC as
# many as fit its window (0.9 ms of CPU each, both processes together); only what still waits here merges. So
# messages are at least this far apart, which holds up no step of 2 ms or more, and at most so many are on their
# way that the gateway has not told to have: 8 s of them, where it tells every half second, or every 5 s beside a
# replica that does not answer.
MIN_GAP_S = 0.002
MAX_UNACKNOWLEDGED = 4096
# A gateway reports every half second, later where cores are busy (2 s at load 10).
SILENT_S = 15.0
LOST = "the gateway's subscription has been lost"


class Feed:
    """One request whose deltas go into an outbox; a `Recipient`."""

    def __init__(self, outbox: "Outbox", first_stream: int, n_choices: int) -> None:
        self.loop = outbox.loop
        self._outbox = outbox
        self._first_stream = first_stream
        self._n_open = n_choices
        self._error: Exception | None = None
        self._has_ended = asyncio.Event()
        self.has_left = False  # the request's call is over: nobody wants anything any more but its cost

    @property
    def is_complete(self) -> bool:
        """Whether each choice's terminal delta, or an error, has been put."""
        return self._n_open == 0

    def put(self, letter: Letter) -> None:
        """Add a delta to the outbox, or end the request with an error, which does not go through it."""
        if not isinstance(letter, TokenDelta):
            self._n_open = 0
            self._end(letter)
            return
        if self.has_left and letter.cost is None:
            return
        self._outbox.add(self._first_stream + letter.choice, letter)
        if letter.finish is not None:
            self._n_open -= 1
            if self._n_open == 0:
                self._end(None)

    def lose(self, error: Exception) -> None:
        """The outbox is gone: what was put before its end arrives nowhere, so the request is not complete."""
        if not self._has_ended.is_set():
            self._end(error)

    async def ended(self) -> None:
        """Returns when all deltas are in the outbox. Raises the error that was put, or it was lost with."""
        await self._has_ended.wait()
        if self._error is not None:
            raise self._error

    def _end(self, error: Exception | None) -> None:
        self._error = error
        self._has_ended.set()


class Outbox:
    """The deltas of one gateway's requests, merged by stream: as much as their answers, however slow it is."""

    def __init__(
        self, subscribe: Subscribe, silent_s: float, *, max_unacknowledged: int = MAX_UNACKNOWLEDGED
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.subscribe = subscribe
        self._silent_s = silent_s
        self._max_unacknowledged = max_unacknowledged
        self._waiting: dict[int, TokenDelta] = {}
        self._feeds: set[Feed] = set()
        self._n_sent = 0
        self._n_received = 0
        self._heard_at = self.loop.time()
        self.is_closed = False
        self._may_go_on = asyncio.Event()
        self._timer = self.loop.call_later(silent_s, self._close_if_silent)

    @contextmanager
    def feed(self, address: ReturnAddress, n_choices: int) -> Iterator[Feed]:
        """A request's way into this outbox, for as long as the context lasts."""
        feed = Feed(self, address.first_stream, n_choices)
        self._feeds.add(feed)
        try:
            yield feed
        finally:
            self._feeds.discard(feed)
            feed.has_left = True

    def add(self, stream: int, delta: TokenDelta) -> None:
        """Add a delta, merged into what waits of its stream."""
        if not self._waiting:
            self._may_go_on.set()
        put_merged(self._waiting, stream, delta)

    def hear(self, n_received: int) -> None:
        """The gateway lives and has so many messages."""
        self._heard_at = self.loop.time()
        self._n_received = n_received
        self._may_go_on.set()

    async def messages(self) -> AsyncGenerator[StepMessage, None]:
        """What waits, all of it at once, whenever something does; ends when the outbox is closed."""
        while not self.is_closed:
            if self._waiting and self._n_sent - self._n_received < self._max_unacknowledged:
                waiting, self._waiting = self._waiting, {}
                self._n_sent += 1
                yield pack(waiting.items())
                await asyncio.sleep(MIN_GAP_S)
            else:
                self._may_go_on.clear()
                await self._may_go_on.wait()

    def close(self) -> None:
        """End the subscription and all requests that deliver to it; idempotent."""
        self._timer.cancel()
        self.is_closed = True
        self._may_go_on.set()
        for feed in self._feeds:
            feed.lose(Unavailable(LOST))

    def _close_if_silent(self) -> None:
        left_s = self._heard_at + self._silent_s - self.loop.time()
        if left_s > 0:
            self._timer = self.loop.call_later(left_s, self._close_if_silent)
        else:
            self.close()


class Outboxes:
    """One replica's outboxes: the latest of each gateway."""

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._by_gateway: dict[str, Outbox] = {}

    def of(self, gateway_id: str) -> Outbox | None:
        """The gateway's outbox, None where it has not subscribed, or has been given up."""
        outbox = self._by_gateway.get(gateway_id)
        return None if outbox is None or outbox.is_closed else outbox

    @contextmanager
    def open(self, subscribe: Subscribe) -> Iterator[Outbox]:
        """An outbox for as long as the context lasts; it takes the place of the one that this gateway had."""
        earlier = self._by_gateway.get(subscribe.gateway_id)
        if earlier is not None:
            earlier.close()
        outbox = self._by_gateway[subscribe.gateway_id] = Outbox(subscribe, self._silent_s)
        try:
            yield outbox
        finally:
            outbox.close()
            if self._by_gateway.get(subscribe.gateway_id) is outbox:
                del self._by_gateway[subscribe.gateway_id]

    def hear(self, received: Received) -> None:
        """Take a gateway's sign of life."""
        outbox = self._by_gateway.get(received.gateway_id)
        if outbox is not None:
            outbox.hear(received.n_messages.get(outbox.subscribe.subscription_id, 0))
