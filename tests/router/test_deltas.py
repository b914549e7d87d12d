"""Answers in deltas, as handles get them: the same as HTTP's, and whole again when they are joined."""

import asyncio
from collections.abc import Mapping

import pytest
from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.types import FinishReason
from bakehouse_router.api.bodies import Origin
from bakehouse_router.api.deltas import Kind, stream_deltas
from bakehouse_router.gateway import Gateway
from bakehouse_router.generation import CallUsage
from bakehouse_router.handle_messages import Delta, whole_reply
from bakehouse_router.text.messages import ToolCall
from bakehouse_router.text.model_text import ModelText
from bakehouse_router.text.tools.parser import CallDelta
from gateways import MODEL, ScriptedDispatcher, delta, ids_of, settings


async def deltas_of(
    text: ModelText, dispatcher: ScriptedDispatcher, kind: Kind, fields: Mapping[str, object]
) -> list[Delta]:
    gateway = Gateway(settings(), dispatcher, text)
    asked = {"model": MODEL, "stream": True, **fields}
    return [one async for one in stream_deltas(gateway, kind, asked, origin=Origin())]


async def test_deltas_join_to_the_whole_reply(text: ModelText) -> None:
    script = ("He", (delta(1, "Hi"), delta(0, "y", FinishReason.STOP)), (delta(1, "!", FinishReason.LENGTH),))
    deltas = await deltas_of(
        text, ScriptedDispatcher(script), "completion", {"prompt": [5, 6], "n": 2, "logprobs": 0}
    )
    reply = whole_reply(deltas)
    assert [(choice.text, choice.finish_reason) for choice in reply.choices] == [
        ("Hey", "stop"),
        ("Hi!", "length"),
    ]
    assert [[token.token_id for token in choice.tokens] for choice in reply.choices] == [
        list(ids_of("Hey")),
        list(ids_of("Hi!")),
    ]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (2, 6)
    assert reply.call_id == deltas[0].call_id


def test_the_pieces_of_a_tool_call_are_joined() -> None:
    first = CallDelta(index=0, call_id="c", name="oven", arguments='{"he')
    deltas = [
        Delta(call_id="x", choice=0, text="so ", tool_calls=(first,)),
        Delta(call_id="x", choice=0, tool_calls=(CallDelta(index=0, arguments='at": 1}'),)),
        Delta(call_id="x", choice=0, finish_reason="tool_calls"),
        Delta(call_id="x", usage=None),
    ]
    with pytest.raises(AssertionError, match="usage"):
        whole_reply(deltas)
    made = whole_reply([*deltas[:3], Delta(call_id="x", usage=usage())])
    assert made.tool_calls == (ToolCall(call_id="c", name="oven", arguments='{"heat": 1}'),)
    assert (made.text, made.finish_reason) == ("so ", "tool_calls")


def usage() -> CallUsage:
    return CallUsage(prompt_tokens=1, cached_tokens=0, completion_tokens=1)


async def test_the_prompt_is_reported_once_for_each_prompt(text: ModelText) -> None:
    fields = {"prompt": [[5, 6], [7, 8]], "n": 2, "max_tokens": 1, "return_token_ids": True}
    script = ((delta(0, "a", FinishReason.LENGTH), delta(1, "b", FinishReason.LENGTH)),)
    deltas = await deltas_of(text, ScriptedDispatcher(script), "completion", fields)
    told = {one.choice: one.prompt.token_ids for one in deltas if one.prompt is not None}
    assert told == {0: (5, 6), 2: (7, 8)}


async def test_a_wrong_field_is_told_before_anything_is_sent(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher()
    with pytest.raises(InvalidRequest, match="oven"):
        await deltas_of(text, dispatcher, "chat", {"messages": [{"role": "user", "content": "x"}], "oven": 1})
    assert not dispatcher.requests


async def test_closing_the_deltas_cancels_the_call(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher(["a", asyncio.Event()])
    gateway = Gateway(settings(), dispatcher, text)
    fields = {"model": MODEL, "prompt": "x"}
    deltas = stream_deltas(gateway, "completion", fields, origin=Origin())
    await anext(deltas)
    await deltas.aclose()
    async with asyncio.timeout(60):
        await dispatcher.closed.wait()
