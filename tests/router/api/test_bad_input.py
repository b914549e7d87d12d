"""Whatever a client gets wrong is a 4xx in the envelope that names the field, and nobody else notices."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator

import httpx
import pytest
import pytest_asyncio
from bakehouse_router.text.model_text import ModelText
from gateways import MODEL, VOCABULARY_SIZE, fake_engine, served, settings

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


# path, body, status, param, part of the message
BODIES: list[tuple[str, Fields, int, str | None, str]] = [
    # the model
    (CHAT, _chat(model="gpt-4"), 404, "model", "'gpt-4' is not served here"),
    (COMPLETIONS, _completion(model="gpt-4"), 404, "model", MODEL),
    (CHAT, _without("model", _chat()), 400, "model", "required"),
    (CHAT, _chat(model=None), 400, "model", "must be a valid string"),
    (CHAT, _chat(model=7), 400, "model", "model is 7"),
    # unsupported and misspelled fields
    (CHAT, _chat(logprobs=True), 400, "logprobs", "unsupported field"),
    (CHAT, _chat(tools=[]), 400, "tools", "unsupported field"),
    (CHAT, _chat(response_format={"type": "json_object"}), 400, "response_format", "unsupported field"),
    (CHAT, _chat(logit_bias={"AI": 1}), 400, "logit_bias", "unsupported field"),
    (CHAT, _chat(temprature=0.5), 400, "temprature", "unsupported field"),
    (CHAT, _chat(prompt="hi"), 400, "prompt", "unsupported field"),
    (COMPLETIONS, _completion(messages=[]), 400, "messages", "unsupported field"),
    (COMPLETIONS, _completion(echo=True), 400, "echo", "unsupported field"),
    (COMPLETIONS, _completion(max_completion_tokens=4), 400, "max_completion_tokens", "unsupported field"),
    (COMPLETIONS, _completion(best_of=2), 400, "best_of", "unsupported field"),
    # messages
    (CHAT, _without("messages", _chat()), 400, "messages", "required"),
    (CHAT, _chat(messages=[]), 400, "messages", "at least 1 item"),
    (CHAT, _chat(messages="hi"), 400, "messages", "must be a valid list"),
    (CHAT, _chat(messages=["hi"]), 400, "messages[0]", "messages[0]"),
    (CHAT, _message(role="wizard"), 400, "messages[0].role", "'wizard'"),
    (CHAT, _message(role="tool"), 400, "messages[0].role", "'system', 'developer', 'user' or 'assistant'"),
    (CHAT, _message(content=None), 400, "messages[0].content", "string or a list of text parts"),
    (CHAT, _message(content=[]), 400, "messages[0].content", "string or a list of text parts"),
    (
        CHAT,
        _message(content=[{"type": "image_url"}]),
        400,
        "messages[0].content",
        "not supported",
    ),
    (CHAT, _message(content=[{"type": "text", "text": "a", "b": 1}]), 400, "messages[0].content", "field 'b'"),
    (CHAT, _message(name="Bob"), 400, "messages[0].name", "unsupported field"),
    (
        CHAT,
        _chat(messages=[{"role": "user", "content": "hi"}, {"role": "system", "content": "late"}]),
        400,
        "messages",
        "a system message must be first",
    ),
    # prompts
    (COMPLETIONS, _without("prompt", _completion()), 400, "prompt", "required"),
    (COMPLETIONS, _completion(prompt=""), 400, "prompt", "must not be empty"),
    (COMPLETIONS, _completion(prompt=[]), 400, "prompt", "must not be empty"),
    (COMPLETIONS, _completion(prompt=["a", ""]), 400, "prompt", "must not be empty"),
    (COMPLETIONS, _completion(prompt=[[]]), 400, "prompt", "must not be empty"),
    (COMPLETIONS, _completion(prompt=None), 400, "prompt", "string, a list of token ids"),
    (COMPLETIONS, _completion(prompt=7), 400, "prompt", "string, a list of token ids"),
    (COMPLETIONS, _completion(prompt=[1.5]), 400, "prompt", "string, a list of token ids"),
    (COMPLETIONS, _completion(prompt=[True]), 400, "prompt", "string, a list of token ids"),
    (COMPLETIONS, _completion(prompt=[1, "a"]), 400, "prompt", "string, a list of token ids"),
    (COMPLETIONS, _completion(prompt=[-1]), 400, "prompt", "token id -1"),
    (COMPLETIONS, _completion(prompt=[VOCABULARY_SIZE]), 400, "prompt", f"between 0 and {VOCABULARY_SIZE - 1}"),
    (COMPLETIONS, _completion(prompt=[10**30]), 400, "prompt", "token id 1000"),
    (COMPLETIONS, _completion(prompt=["a"] * 65), 400, "prompt", "the limit is 64"),
    # numbers that are none
    (CHAT, _chat(max_tokens="5"), 400, "max_tokens", "max_tokens is '5'; it must be a valid integer"),
    (CHAT, _chat(max_tokens=5.0), 400, "max_tokens", "valid integer"),
    (CHAT, _chat(max_tokens=True), 400, "max_tokens", "valid integer"),
    (CHAT, _chat(temperature="hot"), 400, "temperature", "valid number"),
    (CHAT, _chat(temperature=True), 400, "temperature", "valid number"),
    (CHAT, _chat(temperature=[1]), 400, "temperature", "is a list"),
    (CHAT, _chat(stream="yes"), 400, "stream", "valid boolean"),
    (CHAT, _chat(stream=1), 400, "stream", "valid boolean"),
    (CHAT, _chat(ignore_eos="no"), 400, "ignore_eos", "valid boolean"),
    (CHAT, _chat(user=5), 400, "user", "valid string"),
    (CHAT, _chat(seed="x"), 400, "seed", "valid integer"),
    (CHAT, _chat(cache_salt=5), 400, "cache_salt", "valid string"),
    # ranges
    (CHAT, _chat(max_tokens=0), 400, "max_tokens", "greater than or equal to 1"),
    (CHAT, _chat(max_tokens=-1), 400, "max_tokens", "max_tokens is -1"),
    (CHAT, _chat(max_tokens=10**12), 400, "max_tokens", f"context is {LIMIT} tokens"),
    (CHAT, _without("max_tokens", _chat(max_completion_tokens=0)), 400, "max_completion_tokens", "is 0"),
    (CHAT, _chat(max_completion_tokens=5), 400, "max_completion_tokens", "give one of them"),
    (CHAT, _without("max_tokens", _chat(max_completion_tokens=999)), 400, "max_completion_tokens", "is 999"),
    (CHAT, _chat(min_tokens=-1), 400, "min_tokens", "greater than or equal to 0"),
    (CHAT, _chat(min_tokens=5), 400, "min_tokens", "at most max_tokens (4)"),
    (CHAT, _chat(n=0), 400, "n", "greater than or equal to 1"),
    (CHAT, _chat(n=17), 400, "n", "at most 16"),
    (CHAT, _chat(temperature=-0.1), 400, "temperature", "between 0 and 100"),
    (CHAT, _chat(temperature=101), 400, "temperature", "between 0 and 100"),
    (CHAT, _chat(top_p=0), 400, "top_p", "above 0 and at most 1"),
    (CHAT, _chat(top_p=1.1), 400, "top_p", "above 0 and at most 1"),
    (CHAT, _chat(top_k=-1), 400, "top_k", "greater than or equal to 0"),
    (CHAT, _chat(min_p=2), 400, "min_p", "between 0 and 1"),
    (CHAT, _chat(presence_penalty=2.1), 400, "presence_penalty", "between -2 and 2"),
    (CHAT, _chat(frequency_penalty=-3), 400, "frequency_penalty", "between -2 and 2"),
    (CHAT, _chat(repetition_penalty=0), 400, "repetition_penalty", "between 0.01 and 10"),
    (CHAT, _chat(repetition_penalty=5e-324), 400, "repetition_penalty", "between 0.01 and 10"),
    (CHAT, _chat(max_tokens=int("9" * 4300)), 400, "max_tokens", "less than 9223372036854775808"),
    (
        CHAT,
        _chat(max_completion_tokens=int("9" * 4300)),
        400,
        "max_completion_tokens",
        "less than 9223372036854775808",
    ),
    (CHAT, _chat(min_tokens=2**63), 400, "min_tokens", "less than 9223372036854775808"),
    (CHAT, _chat(seed=2**63), 400, "seed", "64-bit"),
    (CHAT, _chat(priority=2**31), 400, "priority", "less than"),
    (CHAT, _chat(user="u" * 257), 400, "user", "at most 256"),
    (CHAT, _chat(cache_salt="s" * 257), 400, "cache_salt", "at most 256"),
    # stops
    (CHAT, _chat(stop=""), 400, "stop", "must not be empty"),
    (CHAT, _chat(stop=["a", ""]), 400, "stop", "must not be empty"),
    (CHAT, _chat(stop=5), 400, "stop", "a string or a list of strings"),
    (CHAT, _chat(stop=[5]), 400, "stop", "a string or a list of strings"),
    (CHAT, _chat(stop=[str(index) for index in range(17)]), 400, "stop", "the limit is 16"),
    (CHAT, _chat(stop="x" * 257), 400, "stop", "the limit is 256"),
    (CHAT, _chat(stop_token_ids=[-1]), 400, "stop_token_ids", "token id -1"),
    (CHAT, _chat(stop_token_ids=[VOCABULARY_SIZE]), 400, "stop_token_ids", f"token id {VOCABULARY_SIZE}"),
    (CHAT, _chat(stop_token_ids=[True]), 400, "stop_token_ids[0]", "valid integer"),
    (CHAT, _chat(stop_token_ids=5), 400, "stop_token_ids", "valid list"),
    # streams
    (CHAT, _chat(stream_options={"include_usage": True}), 400, "stream_options", "only where stream is true"),
    (CHAT, _chat(stream=True, stream_options={"x": 1}), 400, "stream_options.x", "unsupported field"),
    (CHAT, _chat(stream=True, stream_options=[]), 400, "stream_options", "is a list"),
    (CHAT, _chat(stream=True, model="gpt-4"), 404, "model", "not served"),
    (CHAT, _chat(stream=True, max_tokens=999), 400, "max_tokens", "999"),
]

CHAT_INPUT, COMPLETION_INPUT = b'"messages": [{"role": "user", "content": "a"}]', b'"prompt": "a"'

# content, status, param, part of the message
RAW: list[tuple[bytes, int, str | None, str]] = [
    (b"", 400, None, "not valid JSON"),
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


@pytest.mark.parametrize(("path", "body", "status", "param", "message"), BODIES, ids=lambda value: str(value)[:60])
async def test_a_wrong_field_is_refused_by_its_name(
    client: httpx.AsyncClient, path: str, body: Fields, status: int, param: str | None, message: str
) -> None:
    _check_envelope(await client.post(path, json=body), status, param, message)


@pytest.mark.parametrize(("content", "status", "param", "message"), RAW, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_body_that_is_no_request_is_refused(
    client: httpx.AsyncClient, path: str, content: bytes, status: int, param: str | None, message: str
) -> None:
    if path == COMPLETIONS:
        content = content.replace(CHAT_INPUT, COMPLETION_INPUT)
    _check_envelope(await client.post(path, content=content), status, param, message)


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


async def test_neighbours_are_unaffected_by_bad_requests(client: httpx.AsyncClient) -> None:
    good = _chat(max_tokens=30, ignore_eos=True)
    alone = (await client.post(CHAT, json=good)).json()["choices"]

    async def bad(path: str, body: Fields) -> int:
        return (await client.post(path, content=json.dumps(body))).status_code

    neighbours = [client.post(CHAT, json=good) for _ in range(4)]
    replies, statuses = await asyncio.gather(
        asyncio.gather(*neighbours), asyncio.gather(*(bad(path, body) for path, body, *_ in BODIES))
    )
    assert all(400 <= status < 500 for status in statuses)
    assert [reply.json()["choices"] for reply in replies] == [alone] * 4
