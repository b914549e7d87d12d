"""What a request's consumer has not taken yet, merged so that a slow consumer gets few and large messages.

The first token travels at once, for nobody is behind it; what follows while the consumer is busy with the previous
message waits here and travels together. A mailbox lives on one event loop: the engine's thread reaches it only
through `post`, once per step and loop.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from bakehouse_replica.core.errors import BakehouseError
from bakehouse_replica.core.types import TokenDelta

Letter = TokenDelta | BakehouseError


class Mailbox:
    """The deltas of one request's `n_choices` choices. Create it and use it on its loop."""

    def __init__(self, n_choices: int) -> None:
        self.loop = asyncio.get_running_loop()
        self._pending: dict[int, TokenDelta] = {}
        self._n_open = n_choices
        self._error: BakehouseError | None = None
        self._has_letter = asyncio.Event()

    @property
    def is_finished(self) -> bool:
        """Whether everything has been taken: each choice's terminal delta, or an error."""
        return not self._has_letter.is_set() and (self._n_open == 0 or self._error is not None)

    def put(self, letter: Letter) -> None:
        """Add a delta, merged into what waits for its choice, or the error that ends the request."""
        if isinstance(letter, BakehouseError):
            self._error = letter
        else:
            waiting = self._pending.get(letter.choice)
            self._pending[letter.choice] = letter if waiting is None else _merge(waiting, letter)
            self._n_open -= letter.finish is not None
        self._has_letter.set()

    async def take(self) -> tuple[TokenDelta, ...]:
        """Wait for news and take all of it: one delta for each choice that has any. Raises the error put last."""
        await self._has_letter.wait()
        if self._pending:
            taken, self._pending = tuple(self._pending.values()), {}
            if self._error is None:
                self._has_letter.clear()
            return taken
        self._has_letter.clear()
        assert self._error is not None, "a letter was announced that is not there"
        raise self._error


def post(letters: Iterable[tuple[Mailbox, Letter]]) -> list[Mailbox]:
    """Put letters into their mailboxes from any thread, waking each event loop once.

    Returns the mailboxes that nobody can read any more, because their loop has closed.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, Letter]]] = {}
    for mailbox, letter in letters:
        by_loop.setdefault(mailbox.loop, []).append((mailbox, letter))
    unreachable: list[Mailbox] = []
    for loop, group in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put_all, group)
        except RuntimeError:  # the loop is closed, and its consumers with it
            unreachable += [mailbox for mailbox, _ in group]
    return unreachable


def _put_all(letters: Iterable[tuple[Mailbox, Letter]]) -> None:
    for mailbox, letter in letters:
        mailbox.put(letter)


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
