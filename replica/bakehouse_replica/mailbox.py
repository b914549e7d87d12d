"""What a request's consumer has not taken yet, merged so that a slow consumer gets few and large messages.

The first token travels at once, for nobody is behind it; what follows while the consumer is busy with the previous
message waits here and travels together. A mailbox lives on one event loop: the engine's thread reaches it only
through `post`, once per step and loop.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from bakehouse_replica.core.types import Cost, TokenDelta

Letter = TokenDelta | Exception


class Recipient(Protocol):
    """To whom the deltas of one request go; lives on one event loop."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop on which `put` is called."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether everything has been put: each choice's terminal delta, or an error."""
        ...

    def put(self, letter: Letter) -> None:
        """Take a delta, or the error that ends the request."""
        ...


class Mailbox:
    """The deltas of one request's `n_choices` choices. Create and use it on its loop, where one task may wait.

    It waits for a future and not for an `asyncio.Event`, which costs more with each token.
    """

    def __init__(self, n_choices: int) -> None:
        self.loop = asyncio.get_running_loop()
        self._pending: dict[int, TokenDelta] = {}
        self._n_open = n_choices
        self._error: Exception | None = None
        self._has_letter = False
        self._waiter: asyncio.Future[None] | None = None
        self._pay: Callable[[Cost], None] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether everything has been put: each choice's terminal delta, or an error."""
        return self._n_open == 0 or self._error is not None

    @property
    def is_finished(self) -> bool:
        """Whether everything has been taken."""
        return self.is_complete and not self._has_letter

    def put(self, letter: Letter) -> None:
        """Add a delta, merged into what waits for its choice, or the error that ends the request."""
        if self._pay is not None:
            if isinstance(letter, TokenDelta) and letter.cost is not None:
                self._pay(letter.cost)
        elif isinstance(letter, TokenDelta):
            put_merged(self._pending, letter.choice, letter)
            self._n_open -= letter.finish is not None
        else:
            self._error = letter
        self._has_letter = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def leave(self, pay: Callable[[Cost], None]) -> None:
        """Nobody takes any more. `pay` gets the request's cost, be it here or to come, unless it was taken."""
        self._pay = pay
        for delta in self._pending.values():
            if delta.cost is not None:
                pay(delta.cost)

    async def take(self) -> tuple[TokenDelta, ...]:
        """Wait for news and take all of it: one delta for each choice that has any. Raises the error put last."""
        if not self._has_letter:
            await self._wait()
        self._has_letter = bool(self._pending) and self._error is not None
        if self._pending:
            taken, self._pending = tuple(self._pending.values()), {}
            return taken
        assert self._error is not None, "a letter was announced that is not there"
        raise self._error

    async def _wait(self) -> None:
        self._waiter = self.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


def post(letters: Mapping[asyncio.AbstractEventLoop, Sequence[tuple[Recipient, Letter]]]) -> list[Recipient]:
    """Hand letters, by the loop of who gets them, over from any thread, waking each event loop once.

    Returns the recipients that cannot be reached any more, because their loop has closed.
    """
    unreachable: list[Recipient] = []
    for loop, group in letters.items():
        try:
            loop.call_soon_threadsafe(_put_all, group)
        except RuntimeError:  # the loop is closed, and its consumers with it
            unreachable += [recipient for recipient, _ in group]
    return unreachable


def put_merged(waiting: dict[int, TokenDelta], key: int, delta: TokenDelta) -> None:
    """Add a delta to those that wait, as the continuation of the one that has its key, if there is one."""
    earlier = waiting.get(key)
    waiting[key] = delta if earlier is None else _merge(earlier, delta)


def _put_all(letters: Iterable[tuple[Recipient, Letter]]) -> None:
    for recipient, letter in letters:
        recipient.put(letter)


def _merge(earlier: TokenDelta, later: TokenDelta) -> TokenDelta:
    assert earlier.start + len(earlier.token_ids) == later.start, (earlier, later)
    return replace(
        later,
        start=earlier.start,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=earlier.logprobs + later.logprobs,
        prompt_logprobs=earlier.prompt_logprobs + later.prompt_logprobs,
        usage=later.usage or earlier.usage,
    )
