"""The official `openai` package on a scripted model: what its own helpers make of our answers and streams."""

import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import openai
import pytest
from answers import Json
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel
from scripted import MODEL, Piece, saying, scripted_server, vocabulary

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Weather in Oslo?"}]
CALL: list[Piece] = ["<tool_call>", '{"name": "weather", "argum', 'ents": {"city": "Os', 'lo"}}', "</tool_call>"]
CLOCK: list[Piece] = ["<tool_call>", '{"name": "clock", "arguments": {}}', "</tool_call>"]


class Place(BaseModel):
    """What the model is to answer with."""

    city: str
    warmth: int


class Weather(BaseModel):
    """What the tool is to be called with."""

    city: str


class Clock(BaseModel):
    """A tool without arguments."""


TOOLS: list[ChatCompletionToolParam] = [
    openai.pydantic_function_tool(Weather, name="weather"),
    openai.pydantic_function_tool(Clock, name="clock"),
]


@asynccontextmanager
async def package_to(tree: Json) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with (
        scripted_server(tree) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_the_package_parses_json_by_a_schema_streamed_and_whole() -> None:
    # The model would begin with "Sure"; the schema rules that out, and the preferred piece comes instead.
    said = ["Sure", 'city": "Oslo', '", "warmth": ', "7", "}"]
    tree = saying(*said, pieces=vocabulary(*said, '{"'), prefer=[[6]])
    async with package_to(tree) as client:
        whole = await client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, temperature=0, max_tokens=60, response_format=Place
        )
        async with client.chat.completions.stream(
            model=MODEL, messages=MESSAGES, temperature=0, max_tokens=60, response_format=Place
        ) as stream:
            kinds = {event.type async for event in stream}
            streamed = await stream.get_final_completion()
    assert whole.choices[0].message.parsed == Place(city="Oslo", warmth=7)
    assert streamed.choices[0].message.parsed == whole.choices[0].message.parsed
    assert whole.choices[0].finish_reason == streamed.choices[0].finish_reason == "stop"
    assert {"chunk", "content.delta", "content.done"} <= kinds


async def test_the_package_reads_calls_of_tools_streamed_and_whole() -> None:
    async with package_to(saying("Let me see. ", *CALL, *CLOCK, tokens_per_step=2)) as client:
        whole = await client.chat.completions.parse(model=MODEL, messages=MESSAGES, temperature=0, tools=TOOLS)
        async with client.chat.completions.stream(
            model=MODEL,
            messages=MESSAGES,
            temperature=0,
            tools=TOOLS,
            stream_options={"include_usage": True},
        ) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_completion()
    for answer in (whole, streamed):
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        calls = choice.message.tool_calls
        assert calls is not None
        assert [(call.function.name, call.function.arguments) for call in calls] == [
            ("weather", '{"city": "Oslo"}'),
            ("clock", "{}"),
        ]
        assert calls[0].function.parsed_arguments == Weather(city="Oslo")
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert whole.usage is not None
    assert streamed.usage is not None
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens == 10


async def test_the_package_reads_log_probabilities_of_both_routes_streamed_and_whole() -> None:
    rows = [[[1, math.log(0.75)], [2, math.log(0.25)]], [[2, math.log(0.6)], [1, math.log(0.4)]]]
    tree = saying("a", "b") | {"default": {"ids": [1, 2], "logprobs": rows}}
    async with package_to(tree) as client:
        chat = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, max_tokens=2, logprobs=True, top_logprobs=2
        )
        chat_stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, max_tokens=2, logprobs=True, top_logprobs=2, stream=True
        )
        streamed = [
            token
            async for chunk in chat_stream
            if chunk.choices[0].logprobs
            for token in chunk.choices[0].logprobs.content or []
        ]
        completion = await client.completions.create(
            model=MODEL, prompt="hi", temperature=0, max_tokens=2, logprobs=2
        )
    assert chat.choices[0].logprobs is not None
    whole = chat.choices[0].logprobs.content
    assert whole == streamed
    assert whole is not None
    assert [token.token for token in whole] == ["a", "b"]
    assert [math.exp(token.logprob) for token in whole] == pytest.approx([0.75, 0.6], abs=1e-5)
    assert [{top.token for top in token.top_logprobs} for token in whole] == [{"a", "b"}] * 2
    told = completion.choices[0].logprobs
    assert told is not None
    assert told.tokens == ["a", "b"]
    assert told.text_offset == [0, 1]
    assert [math.exp(value or -99) for value in told.token_logprobs or []] == pytest.approx([0.75, 0.6], abs=1e-5)
