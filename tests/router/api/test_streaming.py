"""The bytes of a stream: shapes, order, keep-alive comments, and how it fails."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import httpx
import pytest
from bakehouse_replica.core.errors import DeadlineExceeded, EngineDead, InvalidRequest, Overloaded, Unavailable
from bakehouse_replica.core.types import Failure, FailureKind, FinishReason, TokenDelta
from bakehouse_router.api.generating import REPLICA_HEADER
from bakehouse_router.text.model_text import ModelText
from gateways import MODEL, ScriptedDispatcher, Step, delta, ids_of, served, settings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEEP_ALIVE = ": keep-alive"
DONE = "data: [DONE]"
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH

Fields = dict[str, object]


def _chat(**fields: object) -> Fields:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}


def _completion(**fields: object) -> Fields:
    return {"model": MODEL, "prompt": "hi", "stream": True, **fields}


@asynccontextmanager
async def _client(
    text: ModelText, dispatcher: ScriptedDispatcher, keep_alive_s: float = 5.0
) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with (
        served(text, dispatcher, settings(keep_alive_s=keep_alive_s)) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        yield http


async def _events(text: ModelText, script: Sequence[Step], path: str, body: Fields) -> list[Fields]:
    """The JSON events of a stream that ends as every stream does."""
    async with _client(text, ScriptedDispatcher(script)) as client:
        reply = await client.post(path, json=body)
    assert reply.status_code == 200
    frames = reply.text.split("\n\n")
    assert frames[-2:] == [DONE, ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def _choices(events: Sequence[Fields]) -> list[Fields]:
    return [event["choices"][0] for event in events if event["choices"]]  # type: ignore[index]


async def test_a_chat_streams_role_then_content_then_finish_then_usage(text: ModelText) -> None:
    body = _chat(stream_options={"include_usage": True})
    events = await _events(text, ["Hi ", "you"], CHAT, body)
    assert [event["object"] for event in events] == ["chat.completion.chunk"] * 5
    assert [choice["delta"] for choice in _choices(events)] == [
        {"role": "assistant", "content": ""},
        {"content": "Hi "},
        {"content": "you"},
        {},
    ]
    assert [choice["finish_reason"] for choice in _choices(events)] == [None, None, None, "length"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 6  # type: ignore[index]
    assert [event["usage"] for event in events[:-1]] == [None] * 4


async def test_without_being_asked_for_no_usage_is_streamed(text: ModelText) -> None:
    events = await _events(text, ["Hi"], CHAT, _chat())
    assert not any("usage" in event for event in events)
    assert len(events) == 3


async def test_a_completion_streams_text_then_finish(text: ModelText) -> None:
    events = await _events(text, ["Hi ", "you"], COMPLETIONS, _completion())
    assert _choices(events) == [
        {"index": 0, "text": "Hi ", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "you", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"},
    ]


async def test_c02_only_what_may_become_a_stop_is_held_back(text: ModelText) -> None:
    events = await _events(text, ["a", "b", "c", "E", "x"], COMPLETIONS, _completion(stop="END"))
    assert [choice["text"] for choice in _choices(events)] == ["a", "b", "c", "Ex", ""]


async def test_c06_half_a_character_waits_for_its_other_half(text: ModelText) -> None:
    first, second = ids_of("ď")
    halves = [(TokenDelta(request_id="", choice=0, start=0, token_ids=(half,)),) for half in (first, second)]
    events = await _events(text, [*halves, "ábel"], COMPLETIONS, _completion())
    assert [choice["text"] for choice in _choices(events)] == ["ď", "ábel", ""]


async def test_a_stop_string_ends_the_stream_and_cancels_the_request(text: ModelText) -> None:
    never = asyncio.Event()
    dispatcher = ScriptedDispatcher(["Hi E", "ND and more", never])
    async with _client(text, dispatcher) as client:
        reply = await client.post(COMPLETIONS, json=_completion(stop=["END"], stream=False))
        await asyncio.wait_for(dispatcher.closed.wait(), 60)
    assert dispatcher.n_open == 0
    body = reply.json()
    assert body["choices"][0]["text"] == "Hi "
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 6  # up to and including the token in which the stop completes


async def test_a_choice_that_stopped_early_ignores_the_rest_while_others_go_on(text: ModelText) -> None:
    script: list[Step] = [
        (delta(0, "aEND"), delta(1, "b")),
        (delta(0, "zz", LENGTH), delta(1, "c")),
        (delta(1, "d", STOP),),
    ]
    async with _client(text, ScriptedDispatcher(script)) as client:
        reply = await client.post(COMPLETIONS, json=_completion(stop="END", n=2, stream=False))
    choices = reply.json()["choices"]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [("a", "stop"), ("bcd", "stop")]
    assert reply.json()["usage"]["completion_tokens"] == 4 + 3


async def test_c16_usage_counts_all_choices_and_the_prompt_once(text: ModelText) -> None:
    script: list[Step] = [(delta(0, "abc", STOP), delta(1, "vwxyz", STOP))]
    body = _completion(n=2, stream_options={"include_usage": True}, prompt=[5, 6, 7])
    events = await _events(text, script, COMPLETIONS, body)
    assert events[-1]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 8,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_stream_names_its_replica_and_forbids_buffering(text: ModelText) -> None:
    async with _client(text, ScriptedDispatcher(["Hi"])) as client:
        streamed = await client.post(CHAT, json=_chat())
        whole = await client.post(CHAT, json=_chat(stream=False))
    assert streamed.headers[REPLICA_HEADER] == whole.headers[REPLICA_HEADER] == "replica-1"
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert streamed.headers["cache-control"] == "no-cache"
    assert streamed.headers["x-accel-buffering"] == "no"


async def test_a_waiting_stream_sends_comments_before_and_between_its_tokens(text: ModelText) -> None:
    first, second = asyncio.Event(), asyncio.Event()
    dispatcher = ScriptedDispatcher([first, "a", second, "b"])
    frames: list[str] = []
    async with (
        _client(text, dispatcher, keep_alive_s=0.02) as client,
        client.stream("POST", COMPLETIONS, json=_completion()) as reply,
    ):
        assert REPLICA_HEADER not in reply.headers  # not known when the headers went out
        async for line in reply.aiter_lines():
            if line == KEEP_ALIVE and len(frames) >= 2:
                first.set()
            if line == KEEP_ALIVE and any('"a"' in frame for frame in frames):
                second.set()
            if line:
                frames.append(line)
    assert frames[:2] == [KEEP_ALIVE] * 2
    texts = [json.loads(frame[6:])["choices"][0]["text"] for frame in frames[:-1] if frame != KEEP_ALIVE]
    assert texts == ["a", "b", ""]
    assert frames[-1] == DONE


ERRORS = [
    (InvalidRequest("n is odd", "n"), 400, "invalid_request", None),
    (Overloaded("the queue is full", 2.5), 429, "overloaded", "3"),
    (Unavailable("nobody serves"), 503, "unavailable", "1"),
    (EngineDead("the engine has failed"), 503, "engine_dead", "1"),
    (DeadlineExceeded("too late"), 408, "deadline_exceeded", None),
    (ZeroDivisionError("secret internals"), 500, "internal_error", None),
]


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(("error", "status", "code", "retry_after"), ERRORS, ids=lambda value: str(value))
async def test_an_error_before_the_first_token_is_a_status(
    text: ModelText, error: Exception, status: int, code: str, retry_after: str | None, is_streamed: bool
) -> None:
    async with _client(text, ScriptedDispatcher([error])) as client:
        reply = await client.post(CHAT, json=_chat(stream=is_streamed), headers={"x-request-id": "mine"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert reply.headers.get("retry-after") == retry_after
    assert reply.headers["x-request-id"] == "mine"
    assert "secret" not in reply.text


@pytest.mark.parametrize(("error", "status", "code", "retry_after"), ERRORS, ids=lambda value: str(value))
async def test_c10_an_error_after_it_is_one_event_and_then_done(
    text: ModelText, error: Exception, status: int, code: str, retry_after: str | None
) -> None:
    events = await _events(text, ["a", "b", error], CHAT, _chat())
    assert [choice["delta"].get("content") for choice in _choices(events[:-1])] == ["", "a", "b"]  # type: ignore[attr-defined]
    assert events[-1].keys() == {"error"}
    assert events[-1]["error"]["code"] == code  # type: ignore[index]
    assert "secret" not in json.dumps(events)


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (FailureKind.DEADLINE, 408, "deadline_exceeded"),
        (FailureKind.NO_ROOM, 400, "invalid_request"),
        (FailureKind.ENGINE, 503, "engine_dead"),
    ],
)
async def test_a_choice_that_fails_fails_the_call(
    text: ModelText, kind: FailureKind, status: int, code: str
) -> None:
    failed = TokenDelta(
        request_id="",
        choice=0,
        start=0,
        token_ids=(),
        finish=FinishReason.ERROR,
        failure=Failure(kind=kind, message="it broke"),
    )
    async with _client(text, ScriptedDispatcher([(failed,)])) as client:
        reply = await client.post(CHAT, json=_chat(stream=False))
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert reply.json()["error"]["message"] == "it broke"
    events = await _events(text, ["a", (failed,)], CHAT, _chat())
    assert events[-1]["error"]["code"] == code  # type: ignore[index]


async def test_a_request_that_the_replica_cancels_is_an_error_not_an_end(text: ModelText) -> None:
    events = await _events(text, ["a", (delta(0, "", FinishReason.CANCELLED),)], CHAT, _chat())
    assert events[-1]["error"]["code"] == "unavailable"  # type: ignore[index]
