"""Responses of `/v1/responses` as tests read them: the official package's types, checked field by field."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import httpx
import openai
from bakehouse_replica.core.types import FinishReason
from bakehouse_router.text.model_text import ModelText
from gateways import MODEL, ScriptedDispatcher, Step, delta, served, settings
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

RESPONSES = "/v1/responses"

Fields = dict[str, object]

_EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def cut(answer: str, n_chars: int, finish: FinishReason = FinishReason.STOP) -> list[Step]:
    """A script that says `answer` so many characters at a time."""
    cuts = [answer[start : start + n_chars] for start in range(0, len(answer), n_chars)]
    return [*((delta(0, piece),) for piece in cuts), (delta(0, "", finish),)]


def asking(**fields: object) -> Fields:
    """A body."""
    return {"model": MODEL, "input": "hi", **fields}


@asynccontextmanager
async def http_to(
    text: ModelText, dispatcher: ScriptedDispatcher, **changes: float
) -> AsyncGenerator[httpx.AsyncClient, None]:
    """A plain client of a server over `dispatcher`; `changes` are gateway settings."""
    async with (
        served(text, dispatcher, settings(**changes)) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        yield http


@asynccontextmanager
async def package_to(text: ModelText, dispatcher: ScriptedDispatcher) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    """The official package as a client of a server over `dispatcher`."""
    async with (
        served(text, dispatcher) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def checked(reply: object) -> Response:
    """A response of exactly the official shape."""
    return Response.model_validate(reply)


def read_events(content: str) -> list[ResponseStreamEvent]:
    """The events of a whole stream, each of exactly the official shape, named and numbered as they must be."""
    frames = content.split("\n\n")
    assert frames[-1] == ""
    events = []
    for number, frame in enumerate(frame for frame in frames[:-1] if not frame.startswith(":")):
        name, payload = frame.split("\n")
        told = json.loads(payload.removeprefix("data: "))
        assert name == f"event: {told['type']}"
        assert told["sequence_number"] == number
        events.append(_EVENT.validate_python(told))
        assert events[-1].type == told["type"]
    return events


def kinds(events: Sequence[ResponseStreamEvent]) -> list[str]:
    """What happened."""
    return [event.type.removeprefix("response.") for event in events]


def final(events: Sequence[ResponseStreamEvent]) -> Response:
    """The response in the last event, which alone ends a response."""
    ends = [
        event for event in events if event.type.removeprefix("response.") in ("completed", "incomplete", "failed")
    ]
    assert ends == [events[-1]]
    response = getattr(events[-1], "response")  # noqa: B009 - of a union, each of which has it here
    assert isinstance(response, Response)
    return response


async def ask_whole(text: ModelText, script: Sequence[Step], **fields: object) -> Response:
    """The response to a body, not streamed."""
    async with http_to(text, ScriptedDispatcher(script)) as http:
        reply = await http.post(RESPONSES, json=asking(**fields))
    assert reply.status_code == 200, reply.text
    return checked(reply.json())


async def ask_streamed(text: ModelText, script: Sequence[Step], **fields: object) -> list[ResponseStreamEvent]:
    """The events that a body is answered with."""
    async with http_to(text, ScriptedDispatcher(script)) as http:
        reply = await http.post(RESPONSES, json=asking(stream=True, **fields))
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    return read_events(reply.text)


def without_names(response: Response) -> Fields:
    """What two responses to one question have in common: all but ids and times."""
    told = response.model_dump(exclude={"id", "created_at", "completed_at"})
    for item in told["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return told
