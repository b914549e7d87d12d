"""`/v1/responses` by the official `openai` package: text, JSON by a schema, tools, and turns that follow."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Literal

import openai
import pytest
from bakehouse_replica.core.errors import EngineDead
from bakehouse_router.text.model_text import ModelText
from gateways import MODEL as TINY
from gateways import ScriptedDispatcher
from openai.types.responses import (
    FunctionToolParam,
    ResponseCompletedEvent,
    ResponseFunctionCallArgumentsDeltaEvent,
    ResponseFunctionToolCall,
    ResponseInputParam,
    ResponseOutputMessage,
    ResponseTextDeltaEvent,
)
from pydantic import BaseModel
from responses import checked, package_to, without_names
from scripted import MODEL, Piece, ScriptedServer, saying, scripted_server

WEATHER: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[FunctionToolParam] = [
    {"type": "function", "name": "weather", "description": "now", "parameters": WEATHER, "strict": True},
    {"type": "function", "name": "clock", "parameters": None, "strict": None},
]
CALL: list[Piece] = [
    "<tool_call>",
    '{"name": "weather", ',
    '"arguments": ',
    '{"city": ',
    '"Oslo"}}',
    "</tool_call>",
]
CLOCK: list[Piece] = ["<tool_call>", '{"name": "clock"}', "</tool_call>"]
CALLING = saying("Let me see. ", *CALL, "\n", *CLOCK, tokens_per_step=3)


class Place(BaseModel):
    """What the model is to answer with."""

    city: str


@asynccontextmanager
async def connected(server: ScriptedServer) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_the_package_reads_a_whole_answer() -> None:
    async with scripted_server(saying("bread", " and", " salt")) as server, connected(server) as client:
        response = await client.responses.create(model=MODEL, input="What is for lunch?", store=False)
    assert response.output_text == "bread and salt"
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.output_tokens == 4
    assert response._request_id is not None
    checked(response.to_dict())


async def test_the_package_reads_a_stream_and_finds_the_whole_answer_in_it() -> None:
    async with scripted_server(saying("bread", " and", " salt")) as server, connected(server) as client:
        whole = await client.responses.create(model=MODEL, input="hi")
        stream = await client.responses.create(model=MODEL, input="hi", stream=True)
        events = [event async for event in stream]
        async with client.responses.stream(model=MODEL, input="hi") as managed:
            snapshots = [event.snapshot async for event in managed if event.type == "response.output_text.delta"]
            parsed = await managed.get_final_response()
    deltas = [event.delta for event in events if isinstance(event, ResponseTextDeltaEvent)]
    assert "".join(deltas) == snapshots[-1] == "bread and salt"
    assert isinstance(events[-1], ResponseCompletedEvent)
    assert _without_cache(without_names(events[-1].response)) == _without_cache(without_names(whole))
    assert parsed.output_text == whole.output_text


def _without_cache(told: dict[str, object]) -> dict[str, object]:
    """Of equal prompts the later ones find the first's blocks."""
    return told | {"usage": None}


async def test_the_package_parses_json_by_a_schema() -> None:
    # The script also says what the schema forbids: the grammar stands above it.
    tree = saying("Well, ", '{"city": ', '"Oslo"', "}", prefer=[[2], [3], [4], []])
    async with scripted_server(tree) as server, connected(server) as client:
        response = await client.responses.parse(model=MODEL, input="Where?", text_format=Place)
        async with client.responses.stream(model=MODEL, input="Where?", text_format=Place) as stream:
            streamed = await stream.get_final_response()
    assert response.output_parsed == streamed.output_parsed == Place(city="Oslo")
    assert response.status == "completed"
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"


async def test_calls_are_items_of_their_own_after_the_text_before_them() -> None:
    async with scripted_server(CALLING) as server, connected(server) as client:
        whole = await client.responses.create(model=MODEL, input="Oslo?", tools=TOOLS)
        stream = await client.responses.create(model=MODEL, input="Oslo?", tools=TOOLS, stream=True)
        events = [event async for event in stream]
    checked(whole.to_dict())
    message, weather, clock = whole.output
    assert isinstance(message, ResponseOutputMessage)
    assert isinstance(weather, ResponseFunctionToolCall)
    assert isinstance(clock, ResponseFunctionToolCall)
    assert whole.output_text == "Let me see."
    assert (weather.name, json.loads(weather.arguments)) == ("weather", {"city": "Oslo"})
    assert (clock.name, clock.arguments) == ("clock", "{}")
    assert weather.call_id != clock.call_id
    assert {item.status for item in (message, weather, clock)} == {"completed"}
    arguments = {"": ""}
    for event in events:
        if isinstance(event, ResponseFunctionCallArgumentsDeltaEvent):
            arguments[event.item_id] = arguments.get(event.item_id, "") + event.delta
    assert isinstance(events[-1], ResponseCompletedEvent)
    assert [*arguments.values()] == ["", weather.arguments, clock.arguments]
    assert _without_cache(without_names(events[-1].response)) == _without_cache(without_names(whole))
    assert [tool.to_dict() for tool in whole.tools] == [
        {"type": "function", "name": "weather", "description": "now", "parameters": WEATHER, "strict": True},
        {"type": "function", "name": "clock", "description": None, "parameters": None, "strict": None},
    ]


async def test_results_of_calls_go_back_with_the_items_that_asked_for_them() -> None:
    tree = CALLING | {"replies": [{"when": "tool: rain", "pieces": [" and", "bread"]}]}
    tree["pieces"] = [*CALLING["pieces"], " and", "bread"]  # type: ignore[misc]
    async with scripted_server(tree) as server, connected(server) as client:
        turns: ResponseInputParam = [{"role": "user", "content": "Oslo?"}]
        first = await client.responses.create(model=MODEL, input=turns, tools=TOOLS)
        turns += first.output  # type: ignore[arg-type]
        for item in first.output:
            if isinstance(item, ResponseFunctionToolCall):
                turns.append({"type": "function_call_output", "call_id": item.call_id, "output": "rain"})
        second = await client.responses.create(model=MODEL, input=turns, tools=TOOLS)
        prompt = b"".join(map(server.text.tokenizer.vocabulary.bytes_of, server.client.requests[-1].prompt_ids))
    assert second.output_text == " andbread"
    shown = prompt.decode()
    assert 'assistant: Let me see.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}' in shown
    assert (
        '<tool_call>{"name": "clock", "arguments": {}}</tool_call>\ntool: rain\ntool: rain\nassistant: ' in shown
    )


@pytest.mark.parametrize("choice", ["required", "named"])
async def test_forced_calls_follow_their_schema(choice: Literal["required", "named"]) -> None:
    tree = saying("No. ", *CALL, prefer=[[index] for index in range(2, 9)])
    async with scripted_server(tree) as server, connected(server) as client:
        response = await client.responses.create(
            model=MODEL,
            input="Oslo?",
            tools=TOOLS[:1],
            tool_choice="required" if choice == "required" else {"type": "function", "name": "weather"},
            parallel_tool_calls=False,
        )
    (call,) = response.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
    assert response.output_text == ""
    assert response.tool_choice == "required" or response.to_dict()["tool_choice"] == {
        "type": "function",
        "name": "weather",
    }


async def test_a_call_that_is_cut_off_is_incomplete() -> None:
    async with scripted_server(CALLING) as server, connected(server) as client:
        response = await client.responses.create(model=MODEL, input="Oslo?", tools=TOOLS, max_output_tokens=5)
    assert response.status == "incomplete"
    message, call = response.output
    assert isinstance(message, ResponseOutputMessage)
    assert isinstance(call, ResponseFunctionToolCall)
    assert (message.status, call.status, call.arguments) == ("completed", "incomplete", '{"city": ')


async def test_an_error_in_mid_stream_reaches_the_package_as_events(text: ModelText) -> None:
    async with package_to(text, ScriptedDispatcher(["a", EngineDead("it broke")])) as client:
        stream = await client.responses.create(model=TINY, input="hi", stream=True)
        kinds = [event.type async for event in stream]
    assert kinds[-3:] == ["response.output_text.delta", "error", "response.failed"]


async def test_refusals_reach_the_package_as_its_own() -> None:
    async with scripted_server(saying("a")) as server, connected(server) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model=MODEL, input="hi", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
