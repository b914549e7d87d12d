"""`bakehouse chat`: the conversation, and a server that is talked to over real HTTP."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from bakehouse_cluster.answerers import ChatOptions, ServerAnswerer
from bakehouse_cluster.chat import Conversation, converse
from bakehouse_replica.core.errors import BakehouseError, Overloaded, Unavailable
from bakehouse_router.text.messages import ChatMessage
from gateways import ScriptedDispatcher, served, tiny_text
from rich.console import Console


class Echo:
    """Answers with how many turns it was given, in two pieces; `error` instead of the second."""

    def __init__(self, error: BakehouseError | None = None) -> None:
        self.seen: list[list[ChatMessage]] = []
        self.error = error
        self.is_closed = asyncio.Event()

    async def answer(self, turns: list[ChatMessage]) -> AsyncGenerator[str, None]:
        self.seen.append(turns)
        try:
            yield f"{len(turns)} "
            if self.error is not None:
                raise self.error
            yield "turns"
        finally:
            self.is_closed.set()

    async def reach(self) -> None:
        pass

    async def close(self) -> None:
        pass


async def test_each_answer_sees_all_that_was_said_before() -> None:
    echo, written = Echo(), list[str]()
    conversation = Conversation(echo, system="be brief", write=written.append)
    await conversation.say("one")
    await conversation.say("two")
    assert written == ["2 ", "turns", "4 ", "turns"]
    assert [(turn.role, turn.content) for turn in echo.seen[-1]] == [
        ("system", "be brief"),
        ("user", "one"),
        ("assistant", "2 turns"),
        ("user", "two"),
    ]
    conversation.reset()
    await conversation.say("three")
    assert [turn.content for turn in echo.seen[-1]] == ["be brief", "three"]


async def test_what_was_not_answered_may_be_said_again() -> None:
    echo = Echo(Unavailable("nobody serves"))
    conversation = Conversation(echo, system=None, write=lambda _: None)
    with pytest.raises(Unavailable):
        await conversation.say("one")
    echo.error = None
    await conversation.say("one")
    assert [turn.content for turn in echo.seen[-1]] == ["one"]


async def test_an_answer_that_is_broken_off_is_cancelled_and_remembered() -> None:
    echo = Echo()
    reached = asyncio.Event()

    class Slow(Echo):
        async def answer(self, turns: list[ChatMessage]) -> AsyncGenerator[str, None]:
            self.seen.append(turns)
            try:
                yield "half an"
                reached.set()
                await asyncio.Event().wait()
            finally:
                self.is_closed.set()

    echo = Slow()
    conversation = Conversation(echo, system=None, write=lambda _: None)
    saying = asyncio.create_task(conversation.say("one"))
    await reached.wait()
    saying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saying
    assert echo.is_closed.is_set()
    saying = asyncio.create_task(conversation.say("two"))
    while len(echo.seen) < 2:
        await asyncio.sleep(0)
    saying.cancel()
    await asyncio.gather(saying, return_exceptions=True)
    assert [turn.content for turn in echo.seen[-1]] == ["one", "half an", "two"]


async def collect(answerer: ServerAnswerer) -> str:
    return "".join([piece async for piece in answerer.answer([ChatMessage(role="user", content="hi")])])


async def test_a_server_answers_by_the_name_it_lists(tmp_path: Path) -> None:
    dispatcher = ScriptedDispatcher(["Hel", "lo é"])
    async with served(tiny_text(tmp_path), dispatcher) as url:
        for address in (url, f"{url}/", f"{url}/v1"):
            answerer = ServerAnswerer(address, model=None, key="none", options=ChatOptions(max_tokens=9))
            assert await collect(answerer) == "Hello é"
            await answerer.close()
    assert dispatcher.requests[0].params.max_tokens == 9


async def test_what_the_server_refuses_is_told_in_its_own_words(tmp_path: Path) -> None:
    async with served(tiny_text(tmp_path), ScriptedDispatcher([Overloaded("too many")])) as url:
        answerer = ServerAnswerer(url, model=None, key="none", options=ChatOptions())
        with pytest.raises(BakehouseError, match=r"^too many$"):
            await collect(answerer)
        await answerer.close()


def test_a_server_that_is_not_there_ends_the_conversation_before_it_begins() -> None:
    answerer = ServerAnswerer("http://127.0.0.1:9", model="m", key="none", options=ChatOptions())
    with pytest.raises(Unavailable, match="no server answers at"):
        converse(answerer, system=None, console=Console(stderr=True))


async def test_a_server_that_is_not_there_is_told_by_its_address() -> None:
    answerer = ServerAnswerer("http://127.0.0.1:9", model=None, key="none", options=ChatOptions())
    with pytest.raises(
        Unavailable, match=r"no server answers at http://127\.0\.0\.1:9: Connection refused; start"
    ):
        await collect(answerer)
    await answerer.close()
