"""`bakehouse chat`: a conversation in the terminal, with a server or with a model in this process.

What the model says is written as it comes. Ctrl-C breaks off an answer, Ctrl-D (or `/exit`) leaves, `/reset`
forgets what was said. Where standard input is no terminal, each line is a turn and only the answers are printed.
"""

import asyncio
import sys
import unicodedata
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

from bakehouse_replica.core.errors import BakehouseError
from bakehouse_router.text.messages import ChatMessage
from rich.console import Console

PROMPT = "> "
HELP = "Ctrl-C breaks off an answer, Ctrl-D leaves, /reset forgets what was said.\n"


class Answerer(Protocol):
    """Whoever answers a conversation."""

    async def reach(self) -> None:
        """Raises `BakehouseError` where nobody would answer."""
        ...

    def answer(self, turns: list[ChatMessage]) -> AsyncGenerator[str, None]:
        """The answer's text as it comes; closing the generator cancels it. Raises `BakehouseError`."""
        ...

    async def close(self) -> None:
        """Release what it holds."""
        ...


class Conversation:
    """The turns so far, one of which is being answered."""

    def __init__(self, answerer: Answerer, *, system: str | None, write: Callable[[str], object]) -> None:
        self._answerer = answerer
        self._beginning = [] if system is None else [ChatMessage(role="system", content=system)]
        self._turns = list(self._beginning)
        self._write = write

    def reset(self) -> None:
        """Forget everything but the system's turn."""
        self._turns = list(self._beginning)

    async def say(self, text: str) -> None:
        """Write the answer to `text`. What is cut short by a cancel stays part of the conversation."""
        self._turns.append(ChatMessage(role="user", content=text))
        pieces: list[str] = []
        try:
            async with aclosing(self._answerer.answer(list(self._turns))) as answer:
                async for piece in answer:
                    pieces.append(piece)
                    self._write(piece)
        except BakehouseError:
            self._turns.pop()  # it was not answered, so that it may be said again
            raise
        except asyncio.CancelledError:
            self._turns.append(ChatMessage(role="assistant", content="".join(pieces)))
            raise
        self._turns.append(ChatMessage(role="assistant", content="".join(pieces)))


def converse(answerer: Answerer, *, system: str | None, console: Console) -> int:
    """Talk until the input ends; errors are told and the conversation goes on.

    Raises `BakehouseError` at once where nobody would answer. The exit status: 1 where nobody watched and a turn
    was not answered.
    """
    n_errors = 0
    is_terminal = sys.stdin.isatty()
    conversation = Conversation(answerer, system=system, write=_write_now)
    with asyncio.Runner() as runner:
        try:
            runner.run(answerer.reach())
            if is_terminal:
                import readline  # noqa: F401  (gives `input` its line editing; absent on some systems)

                console.print(HELP, highlight=False)
            while (line := _read_turn(is_terminal)) is not None:
                if line == "/reset":
                    conversation.reset()
                elif line:
                    n_errors += not _answer(runner, conversation, line, console)
        finally:
            runner.run(answerer.close())
    return int(n_errors > 0 and not is_terminal)


def _answer(runner: asyncio.Runner, conversation: Conversation, line: str, console: Console) -> bool:
    """Whether there was no error."""
    try:
        runner.run(conversation.say(line))
    except KeyboardInterrupt:
        console.print("\n(broken off)", highlight=False)
    except BakehouseError as error:
        console.print(f"\n{error.message}", style="red", highlight=False, markup=False, soft_wrap=True)
        return False
    else:
        _write_now("\n")
    return True


def _read_turn(is_terminal: bool) -> str | None:
    """The next turn, None at the end of the input."""
    try:
        line = input(PROMPT if is_terminal else "").strip()
    except (EOFError, KeyboardInterrupt):
        if is_terminal:
            _write_now("\n")
        return None
    return None if line == "/exit" else line


def _write_now(text: str) -> None:
    """What a model says must not move the cursor or rename the window: control characters are left out."""
    sys.stdout.write("".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc"))
    sys.stdout.flush()
