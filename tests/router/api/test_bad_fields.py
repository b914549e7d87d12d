"""Whatever a client gets wrong in a field is a 4xx in the envelope that names it, and nobody else notices."""

import asyncio
import json
from collections.abc import AsyncGenerator

import httpx
import pytest
import pytest_asyncio
from bakehouse_router.text.model_text import ModelText
from gateways import MODEL, VOCABULARY_SIZE, fake_engine, served, settings

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one server for the whole table

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMIT = 64

Fields = dict[str, object]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(text: ModelText) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with (
        fake_engine(max_model_len=LIMIT) as engine,
        served(text, engine, settings(max_listed_tokens=4, max_tools=2)) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        yield http


def _chat(**fields: object) -> Fields:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}


def _completion(**fields: object) -> Fields:
    return {"model": MODEL, "prompt": "hi", "max_tokens": 4, **fields}


def _message(**fields: object) -> Fields:
    return _chat(messages=[{"role": "user", "content": "hi", **fields}])


def _calling(**function: object) -> Fields:
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", **function}}
    return _message(role="assistant", content=None, tool_calls=[called])


def _called(body: Fields) -> object:
    return body["messages"][0]["tool_calls"]  # type: ignore[index]


def _tools(*names: str, **fields: object) -> Fields:
    return _chat(tools=[{"type": "function", "function": {"name": name}} for name in names], **fields)


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
    # misspelled fields and those of the other route
    (CHAT, _chat(temprature=0.5), 400, "temprature", "unsupported field"),
    (CHAT, _chat(prompt="hi"), 400, "prompt", "unsupported field"),
    (CHAT, _chat(echo=True), 400, "echo", "unsupported field"),
    (CHAT, _chat(**{"x" * 500: 1}), 400, "x" * 200 + "…", "unsupported field"),
    (COMPLETIONS, _completion(messages=[]), 400, "messages", "unsupported field"),
    (COMPLETIONS, _completion(tools=[]), 400, "tools", "unsupported field"),
    (COMPLETIONS, _completion(top_logprobs=1), 400, "top_logprobs", "unsupported field"),
    (COMPLETIONS, _completion(max_completion_tokens=4), 400, "max_completion_tokens", "unsupported field"),
    # messages
    (CHAT, _without("messages", _chat()), 400, "messages", "required"),
    (CHAT, _chat(messages=[]), 400, "messages", "at least 1 item"),
    (CHAT, _chat(messages="hi"), 400, "messages", "must be a list"),
    (CHAT, _chat(messages=["hi"]), 400, "messages[0]", "messages[0]"),
    (CHAT, _message(role="wizard"), 400, "messages[0].role", "'wizard'"),
    (CHAT, _message(role="tool"), 400, "messages[0].tool_call_id", "given where the role is tool"),
    (CHAT, _message(tool_call_id="c"), 400, "messages[0].tool_call_id", "left out where the role is not tool"),
    (CHAT, _message(content=None), 400, "messages[0].content", "string or a list of text parts"),
    (CHAT, _message(content=[]), 400, "messages[0].content", "string or a list of text parts"),
    (CHAT, _message(content=5), 400, "messages[0].content", "string or a list of text parts"),
    (CHAT, _message(role="assistant", content=None), 400, "messages[0].content", "string or a list of text parts"),
    (CHAT, _message(content=[{"type": "image_url"}]), 400, "messages[0].content[0].type", "it must be 'text'"),
    (
        CHAT,
        _message(content=[{"type": "text", "text": "a", "b": 1}]),
        400,
        "messages[0].content[0].b",
        "unsupported",
    ),
    (CHAT, _message(content=["a"]), 400, "messages[0].content[0]", "it must be an object"),
    (CHAT, _message(refusal="no"), 400, "messages[0].refusal", "another server"),
    (CHAT, _message(function_call={}), 400, "messages[0].function_call", "use tool_calls"),
    (CHAT, _message(mood=1), 400, "messages[0].mood", "unsupported field"),
    (CHAT, _message(name="n" * 257), 400, "messages[0].name", "at most 256"),
    (CHAT, _message(tool_calls=[]), 400, "messages[0].tool_calls", "at least 1 item"),
    (CHAT, _message(tool_calls=_called(_calling())), 400, "messages[0].tool_calls", "not assistant"),
    (CHAT, _calling(name="a b"), 400, "messages[0].tool_calls[0].function.name", "pattern"),
    (CHAT, _calling(arguments={}), 400, "messages[0].tool_calls[0].function.arguments", "valid string"),
    (CHAT, _calling(arguments="[]"), 400, "messages[0].tool_calls[0].function.arguments", "JSON object as text"),
    (CHAT, _calling(arguments="{"), 400, "messages[0].tool_calls[0].function.arguments", "JSON object as text"),
    (
        CHAT,
        _calling(arguments="[" * 9999),
        400,
        "messages[0].tool_calls[0].function.arguments",
        "JSON object as text",
    ),
    (CHAT, _chat(continue_final_message=True), 400, "messages", "only an assistant's message"),
    (
        CHAT,
        _chat(continue_final_message=True, add_generation_prompt=True),
        400,
        "continue_final_message",
        "both true",
    ),
    (CHAT, _chat(chat_template_kwargs=[]), 400, "chat_template_kwargs", "must be an object"),
    (CHAT, _chat(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs.messages", "by the server"),
    (CHAT, _chat(chat_template_kwargs={"bos_token": ""}), 400, "chat_template_kwargs.bos_token", "by the server"),
    (CHAT, _chat(chat_template_kwargs={"thinks": True}), 400, "chat_template_kwargs.thinks", "no effect"),
    # tools
    (CHAT, _chat(tools={}), 400, "tools", "must be a list"),
    (CHAT, _chat(tools=[{"type": "web_search"}]), 400, "tools[0].type", "'function'"),
    (CHAT, _chat(tools=[{"type": "function"}]), 400, "tools[0].function", "required"),
    (CHAT, _tools("a b"), 400, "tools[0].function.name", "pattern"),
    (CHAT, _tools("n" * 65), 400, "tools[0].function.name", "pattern"),
    (CHAT, _tools("f", "f"), 400, "tools", "names must differ"),
    (CHAT, _tools("f", "g", "h"), 400, "tools", "the limit is 2"),
    (CHAT, _tools("f"), 400, "tools", "template has no tools"),
    (CHAT, _tools("f", tool_choice="any"), 400, "tool_choice", '"none", "auto", "required"'),
    (CHAT, _tools("f", tool_choice={"type": "function"}), 400, "tool_choice", '"none", "auto", "required"'),
    (
        CHAT,
        _tools("f", tool_choice={"type": "function", "function": {"name": "g"}}),
        400,
        "tool_choice",
        "not among the tools",
    ),
    (CHAT, _chat(tool_choice="required"), 400, "tool_choice", "tools must be given"),
    (CHAT, _tools("f", parallel_tool_calls="no"), 400, "parallel_tool_calls", "valid boolean"),
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
    # log-probabilities
    (CHAT, _chat(logprobs=1), 400, "logprobs", "valid boolean"),
    (CHAT, _chat(top_logprobs=1), 400, "top_logprobs", "only where logprobs is true"),
    (CHAT, _chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", "at most 20"),
    (CHAT, _chat(logprobs=True, top_logprobs=-1), 400, "top_logprobs", "greater than or equal to 0"),
    (COMPLETIONS, _completion(logprobs=True), 400, "logprobs", "valid integer"),
    (COMPLETIONS, _completion(logprobs=21), 400, "logprobs", "between 0 and 20"),
    (COMPLETIONS, _completion(logprobs=-1), 400, "logprobs", "greater than or equal to 0"),
    (COMPLETIONS, _completion(prompt_logprobs=21), 400, "prompt_logprobs", "between 0 and 20"),
    # token ids and words
    (CHAT, _chat(logit_bias=[]), 400, "logit_bias", "an object from token ids"),
    (CHAT, _chat(logit_bias={"01": 1}), 400, "logit_bias", "its key '01' is not a token id"),
    (CHAT, _chat(logit_bias={"5": "1"}), 400, "logit_bias", "token id 5 must be a number"),
    (CHAT, _chat(logit_bias={"5": 100.5}), 400, "logit_bias", "between -100 and 100"),
    (CHAT, _chat(logit_bias={str(key): 1 for key in range(5)}), 400, "logit_bias", "the limit is 4"),
    (CHAT, _chat(allowed_token_ids=[]), 400, "allowed_token_ids", "must not be empty"),
    (CHAT, _chat(allowed_token_ids=["5"]), 400, "allowed_token_ids", "item 0 is not a token id"),
    (CHAT, _chat(allowed_token_ids=[VOCABULARY_SIZE]), 400, "allowed_token_ids", f"token id {VOCABULARY_SIZE}"),
    (CHAT, _chat(allowed_token_ids=[1] * 5), 400, "allowed_token_ids", "the limit is 4"),
    (CHAT, _chat(bad_words="a"), 400, "bad_words", "a list of strings"),
    (CHAT, _chat(bad_words=[""]), 400, "bad_words", "not empty"),
    (CHAT, _chat(bad_words=["x" * 257]), 400, "bad_words", "the limit is 256"),
    (CHAT, _chat(bad_words=list("abcde")), 400, "bad_words", "the limit is 4"),
    # formats
    (CHAT, _chat(response_format="json_object"), 400, "response_format", "must be an object"),
    (CHAT, _chat(structured_outputs=[]), 400, "structured_outputs", "must be an object"),
    (CHAT, _chat(response_format={"type": "yaml"}), 400, "response_format.type", "'json_schema'"),
    (CHAT, _chat(structured_outputs={"x": 1}), 400, "structured_outputs.x", "unknown field"),
    # ranges
    (CHAT, _chat(max_tokens=0), 400, "max_tokens", "greater than or equal to 1"),
    (CHAT, _chat(max_tokens=-1), 400, "max_tokens", "max_tokens is -1"),
    (CHAT, _chat(max_tokens=10**12), 400, "max_tokens", f"context is {LIMIT} tokens"),
    (CHAT, _without("max_tokens", _chat(max_completion_tokens=0)), 400, "max_completion_tokens", "is 0"),
    (CHAT, _chat(max_completion_tokens=5), 400, "max_completion_tokens", "give one of them"),
    (CHAT, _without("max_tokens", _chat(max_completion_tokens=999)), 400, "max_completion_tokens", "is 999"),
    (COMPLETIONS, _completion(max_tokens=0), 400, "max_tokens", "at least 1 unless echo"),
    (COMPLETIONS, _completion(best_of=2), 400, "best_of", "best_of is 2 and n is 1"),
    (COMPLETIONS, _completion(best_of=1, n=2), 400, "best_of", "they must be equal"),
    (CHAT, _chat(timeout_s=0), 400, "timeout_s", "greater than 0"),
    (CHAT, _chat(timeout_s=86_401), 400, "timeout_s", "less than or equal to 86400"),
    (CHAT, _chat(timeout_s="5"), 400, "timeout_s", "valid number"),
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
    (CHAT, _chat(stop_token_ids=[True]), 400, "stop_token_ids", "item 0 is not a token id"),
    (CHAT, _chat(stop_token_ids=5), 400, "stop_token_ids", "a list of token ids"),
    (CHAT, _chat(stop_token_ids=[1] * 5), 400, "stop_token_ids", "the limit is 4"),
    # streams
    (CHAT, _chat(stream_options={"include_usage": True}), 400, "stream_options", "only where stream is true"),
    (
        CHAT,
        _chat(stream=True, stream_options={"continuous_usage_stats": True}),
        400,
        "stream_options.continuous_usage_stats",
        "only where include_usage is true",
    ),
    (CHAT, _chat(stream=True, stream_options={"x": 1}), 400, "stream_options.x", "unsupported field"),
    (CHAT, _chat(stream=True, stream_options=[]), 400, "stream_options", "is a list"),
    (CHAT, _chat(stream=True, model="gpt-4"), 404, "model", "not served"),
    (CHAT, _chat(stream=True, max_tokens=999), 400, "max_tokens", "999"),
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


@pytest.mark.parametrize("key", ["191222", "AI", "-1", "1.5", "", "9" * 5000])
async def test_c21_a_bias_of_what_is_no_token_is_refused(client: httpx.AsyncClient, key: str) -> None:
    _check_envelope(await client.post(CHAT, json=_chat(logit_bias={key: 1})), 400, "logit_bias", key[:60])


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("token_id", [-1, VOCABULARY_SIZE, 10**30])
async def test_c22_a_token_id_outside_the_vocabulary_is_refused(
    client: httpx.AsyncClient, field: str, token_id: int
) -> None:
    reply = await client.post(CHAT, json=_chat(**{field: [token_id]}))
    _check_envelope(reply, 400, field, f"token id {token_id}; it must be between 0 and {VOCABULARY_SIZE - 1}")


async def test_a_body_that_is_wrong_in_thousands_of_places_is_refused_at_once(client: httpx.AsyncClient) -> None:
    body = _chat(**{f"field-{index}": index for index in range(5000)})
    _check_envelope(await client.post(CHAT, json=body), 400, None, "wrong in 5000 places")
    _check_envelope(await client.post(CHAT, json=_chat(messages=[1] * 50_000)), 400, "messages[0]", "an object")


async def test_neighbours_are_unaffected_by_bad_requests(client: httpx.AsyncClient) -> None:
    good = _chat(max_tokens=30, ignore_eos=True)
    alone = (await client.post(CHAT, json=good)).json()["choices"]

    async def bad(path: str, body: Fields) -> int:
        return (await client.post(path, content=json.dumps(body))).status_code

    neighbours = [client.post(CHAT, json=good) for _ in range(4)]
    replies, statuses = await asyncio.gather(
        asyncio.gather(*neighbours), asyncio.gather(*(bad(path, body) for path, body, *_ in BODIES))
    )
    assert statuses == [status for _, _, status, *_ in BODIES]
    assert [reply.json()["choices"] for reply in replies] == [alone] * 4
