"""Whatever a client gets wrong is a 4xx in the envelope that names the field, and nobody else notices."""

from collections.abc import AsyncGenerator, AsyncIterator

import httpx
import pytest
import pytest_asyncio
from bakehouse_replica.core.errors import InvalidRequest, RequestTooLarge
from bakehouse_router.api.json_body import parse_object
from bakehouse_router.api.parse import parse_body
from bakehouse_router.api.schema import ChatBody
from bakehouse_router.text.model_text import ModelText
from gateways import MODEL, fake_engine, served, settings

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one server for the whole table

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMIT = 64
MAX_BODY_BYTES = 20_000

Fields = dict[str, object]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(text: ModelText) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with (
        fake_engine(max_model_len=LIMIT) as engine,
        served(text, engine, settings(max_body_bytes=MAX_BODY_BYTES)) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        yield http


def _chat(**fields: object) -> Fields:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}


def _completion(**fields: object) -> Fields:
    return {"model": MODEL, "prompt": "hi", "max_tokens": 4, **fields}


def _message(**fields: object) -> Fields:
    return _chat(messages=[{"role": "user", "content": "hi", **fields}])


def _without(name: str, body: Fields) -> Fields:
    return {key: value for key, value in body.items() if key != name}


CHAT_INPUT, COMPLETION_INPUT = b'"messages": [{"role": "user", "content": "a"}]', b'"prompt": "a"'

# content, status, param, part of the message
RAW: list[tuple[bytes, int, str | None, str]] = [
    (b"", 400, None, "the body is empty"),
    (b"{", 400, None, "not valid JSON"),
    (b'{"model": "tiny",}', 400, None, "not valid JSON"),
    (b"[]", 400, None, "must be an object"),
    (b"null", 400, None, "must be an object"),
    (b'"hi"', 400, None, "must be an object"),
    (b"\xff\xfe{}", 400, None, "not UTF-8: byte 0"),
    (b'{"model": "\xe9"}', 400, None, "not UTF-8: byte 11"),
    (b"\xef\xbb\xbf{}", 400, None, "not valid JSON"),
    (b'{"temperature": NaN}', 400, None, "NaN"),
    (b'{"temperature": -Infinity}', 400, None, "-Infinity"),
    (
        b'{"model": "tiny", ' + CHAT_INPUT + b', "temperature": 1e999}',
        400,
        "temperature",
        "finite",
    ),
    (b'{"n": 1, "n": 2}', 400, "n", "given twice"),
    (b'{"messages": [{"role": "user", "role": "system"}]}', 400, "role", "given twice"),
    (b'{"user": "\\ud800"}', 400, "user", "surrogate"),
    (b'{"messages": [{"content": "a\\uDFFFb"}]}', 400, "messages", "surrogate"),
    (b'{"\\ud800": 1}', 400, "?", "surrogate"),
    (b"[" * 9_000, 400, None, "nested too deeply"),
    (b'{"a":' * 3_000 + b"1" + b"}" * 3_000, 400, None, "nested too deeply"),
    (b'{"seed": ' + b"9" * 5_000 + b"}", 400, None, "too long"),
    (b'{"seed": ' + b"9" * 4_000 + b"}", 400, "model", "required"),
    (b" " * (MAX_BODY_BYTES + 1), 413, None, f"the limit is {MAX_BODY_BYTES}"),
]


def _check_envelope(reply: httpx.Response, status: int, param: str | None, message: str) -> None:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert reply.headers["x-request-id"]


@pytest.mark.parametrize(("content", "status", "param", "message"), RAW, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_body_that_is_no_request_is_refused(
    client: httpx.AsyncClient, path: str, content: bytes, status: int, param: str | None, message: str
) -> None:
    if path == COMPLETIONS:
        content = content.replace(CHAT_INPUT, COMPLETION_INPUT)
    _check_envelope(await client.post(path, content=content), status, param, message)


async def test_a_refusal_does_not_repeat_a_name_of_any_length(client: httpx.AsyncClient) -> None:
    name = b'"' + b"k" * 5_000 + b'": 1'
    reply = await client.post(CHAT, content=b"{" + name + b", " + name + b"}")
    _check_envelope(reply, 400, "k" * 200 + "…", "given twice")
    assert len(reply.content) < 1_000


async def test_a_streamed_body_without_a_length_is_bounded_too(client: httpx.AsyncClient) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 1000 + 1):
            yield b" " * 1000

    _check_envelope(await client.post(CHAT, content=chunks()), 413, None, "more than")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/models/gpt-4", 404, "model_not_found"),
    ],
)
async def test_a_wrong_route_has_the_envelope_too(
    client: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    reply = await client.request(method, path)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)


async def test_c23_a_length_error_shows_prompt_request_and_limit(client: httpx.AsyncClient) -> None:
    reply = await client.post(COMPLETIONS, json=_completion(prompt=[5] * 8, max_tokens=LIMIT - 3))
    _check_envelope(reply, 400, "max_tokens", "context is 64 tokens; the prompt has 8 and max_tokens is 61, 69")
    assert reply.json()["error"]["code"] == "context_length_exceeded"


async def test_c24_the_limit_itself_is_served_and_one_more_is_not(client: httpx.AsyncClient) -> None:
    fits = await client.post(COMPLETIONS, json=_completion(prompt=[5] * (LIMIT - 1), max_tokens=1))
    assert fits.status_code == 200
    over = await client.post(COMPLETIONS, json=_completion(prompt=[5] * LIMIT, max_tokens=1))
    _check_envelope(over, 400, "prompt", f"the prompt has {LIMIT} tokens")
    assert over.json()["error"]["code"] == "context_length_exceeded"


async def test_c24_without_max_tokens_the_rest_of_the_context_is_used(client: httpx.AsyncClient) -> None:
    body = _completion(prompt=[5] * 10, max_tokens=None, ignore_eos=True)
    usage = (await client.post(COMPLETIONS, json=body)).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (10, LIMIT - 10)


async def test_c30_an_unknown_model_has_code_and_param(client: httpx.AsyncClient) -> None:
    error = (await client.post(CHAT, json=_chat(model="gpt-4"))).json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_more_lists_and_objects_than_any_request_needs_are_refused_before_they_are_built() -> None:
    with pytest.raises(RequestTooLarge, match="50001 opening brackets; the limit is 50000"):
        parse_object(b"[" * 25_000 + b"{" * 25_001)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": "a"}] * 4097, "messages"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}] * 1025}], "messages[0].content"),
    ],
)
async def test_more_messages_or_parts_than_anyone_needs_are_refused(messages: object, param: str) -> None:
    with pytest.raises(InvalidRequest, match="at most") as refused:
        parse_body(ChatBody, {"model": MODEL, "messages": messages})
    assert refused.value.param == param
