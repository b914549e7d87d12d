"""Tools over HTTP, by the official `openai` package: calls streamed and whole, and how choices with calls end."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import openai
import pytest
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import FinishReason
from bakehouse_router.text.model_text import ModelText
from gateways import (
    END,
    END_ID,
    MODEL,
    TEMPLATE,
    ScriptedDispatcher,
    Step,
    delta,
    served,
    status,
    text_in,
    tiny_card,
    write_tiny_tokenizer,
)
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam

# Knows tools and calls, in the form that most open models write.
TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for message in messages if message.tool_calls or message.role == 'tool' %}"
    "{{ message.tool_calls | tojson if message.tool_calls else message.content }}{% endfor %}"
) + TEMPLATE
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather in Oslo?"}]
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "now", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Os\\"lo", "days": [1, 2]}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def tool_text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    folder: Path = tmp_path_factory.mktemp("tools")
    write_tiny_tokenizer(folder, template=TOOL_TEMPLATE)
    return text_in(folder, defaults=SamplingParams(temperature=0.0, stop_token_ids=(END_ID,)))


@asynccontextmanager
async def _client(text: ModelText, dispatcher: ScriptedDispatcher) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with (
        served(text, dispatcher) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def _script(answer: str, n_chars: int, finish: FinishReason = FinishReason.STOP) -> list[Step]:
    cuts = [answer[start : start + n_chars] for start in range(0, len(answer), n_chars)]
    return [*((delta(0, cut),) for cut in cuts), (delta(0, "", finish),)]


def _create(client: openai.AsyncOpenAI) -> Callable[..., Awaitable[object]]:
    """The package's own method, without its types, which name each field."""
    return cast("Callable[..., Awaitable[object]]", client.chat.completions.create)


async def _whole(text: ModelText, script: Sequence[Step], **fields: object) -> ChatCompletion:
    async with _client(text, ScriptedDispatcher(script)) as client:
        reply = await _create(client)(model=MODEL, messages=MESSAGES, tools=TOOLS, **fields)
    assert isinstance(reply, ChatCompletion)
    return reply


async def _chunks(text: ModelText, script: Sequence[Step], **fields: object) -> list[ChatCompletionChunk]:
    async with _client(text, ScriptedDispatcher(script)) as client:
        stream = await _create(client)(model=MODEL, messages=MESSAGES, tools=TOOLS, stream=True, **fields)
        assert isinstance(stream, openai.AsyncStream)
        return [chunk async for chunk in stream]


@pytest.mark.parametrize("n_chars", [1, 2, 7, 1000])
async def test_c32_streamed_calls_are_those_of_the_whole_answer(tool_text: ModelText, n_chars: int) -> None:
    script = _script(f"Let me see. {CALL}\n{CLOCK}", n_chars)
    (choice,) = (await _whole(tool_text, script)).choices
    calls = choice.message.tool_calls
    assert calls is not None
    assert choice.finish_reason == "tool_calls"
    assert [(call.type, call.function.name) for call in calls if call.type == "function"] == [
        ("function", "weather"),
        ("function", "clock"),
    ]
    arguments, names, content, reasons = ["", ""], ["", ""], "", []
    for chunk in await _chunks(tool_text, script):
        told = chunk.choices[0]
        content += told.delta.content or ""
        reasons.append(told.finish_reason)
        for call in told.delta.tool_calls or []:
            assert call.function is not None
            names[call.index] += call.function.name or ""
            arguments[call.index] += call.function.arguments or ""
    assert names == ["weather", "clock"]
    assert arguments == [call.function.arguments for call in calls if call.type == "function"]
    assert json.loads(arguments[0]) == {"city": 'Os"lo', "days": [1, 2]}
    assert content == choice.message.content
    assert content.startswith("Let me see.")
    assert [reason for reason in reasons if reason] == ["tool_calls"]


async def test_each_call_has_an_id_of_its_own(tool_text: ModelText) -> None:
    (choice,) = (await _whole(tool_text, _script(CALL + CALL, 5))).choices
    calls = choice.message.tool_calls
    assert calls is not None
    assert len({call.id for call in calls}) == 2
    assert choice.message.content is None


@pytest.mark.parametrize("n_chars", [1, 1000])
async def test_c33_a_truncated_call_finishes_with_length(tool_text: ModelText, n_chars: int) -> None:
    script = _script(CALL[:-25], n_chars, FinishReason.LENGTH)
    (choice,) = (await _whole(tool_text, script)).choices
    assert choice.finish_reason == "length"
    assert (await _chunks(tool_text, script))[-1].choices[0].finish_reason == "length"


async def test_c12_a_stop_inside_the_beginning_of_a_call_loses_nothing(tool_text: ModelText) -> None:
    script = _script('text <tool_call>{"naSTOP', 1)
    (choice,) = (await _whole(tool_text, script, stop="STOP")).choices
    assert (choice.message.content, choice.finish_reason) == ('text <tool_call>{"na', "stop")
    chunks = await _chunks(tool_text, script, stop="STOP")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == 'text <tool_call>{"na'


async def test_a_choice_ends_once_its_only_call_is_whole(tool_text: ModelText) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    script: list[Step] = [CALL, asyncio.Event()]
    async with asyncio.timeout(60):
        (choice,) = (await _whole(tool_text, script, tool_choice=named)).choices
        chunks = await _chunks(tool_text, script, tool_choice=named)
    assert choice.finish_reason == chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_a_choice_that_may_not_call_is_text_whatever_it_says(tool_text: ModelText) -> None:
    (choice,) = (await _whole(tool_text, _script(CALL, 5), tool_choice="none")).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")


@pytest.mark.parametrize(
    ("choice", "is_forced"),
    [
        ("none", False),
        ("auto", False),
        ("required", True),
        ({"type": "function", "function": {"name": "clock"}}, True),
    ],
)
async def test_forced_calls_reach_the_replica_as_a_grammar(
    tool_text: ModelText, choice: object, is_forced: bool
) -> None:
    dispatcher = ScriptedDispatcher(_script(CLOCK, 100))
    async with _client(tool_text, dispatcher) as client:
        await _create(client)(model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice=choice)
    assert (dispatcher.requests[0].params.grammar is not None) == is_forced


async def test_calls_and_their_results_go_back_into_the_conversation(tool_text: ModelText) -> None:
    roomy = status(tiny_card(max_model_len=4096))
    dispatcher = ScriptedDispatcher(_script(CALL, 5), replicas=(roomy,))
    async with _client(tool_text, dispatcher) as client:
        first = await _create(client)(model=MODEL, messages=MESSAGES, tools=TOOLS)
        assert isinstance(first, ChatCompletion)
        turn = first.choices[0].message
        assert turn.tool_calls is not None
        result = {"role": "tool", "tool_call_id": turn.tool_calls[0].id, "content": f"rain{END}"}
        dispatcher.script = ["It rains."]
        turns = [*MESSAGES, turn.model_dump(), result]
        second = await _create(client)(model=MODEL, messages=turns, tools=TOOLS)
    assert isinstance(second, ChatCompletion)
    assert second.choices[0].message.content == "It rains."
