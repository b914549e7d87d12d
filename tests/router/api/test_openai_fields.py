"""What the official `openai` package sends and reads: each field by its own parameter or by `extra_body`."""

from collections.abc import AsyncGenerator

import openai
import pytest
import pytest_asyncio
from bakehouse_replica.core.types import Request
from bakehouse_router.text.model_text import ModelText
from gateways import MODEL, ScriptedDispatcher, ids_of, served
from openai.types.chat import ChatCompletionMessageParam

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def dispatcher() -> ScriptedDispatcher:
    return ScriptedDispatcher(["Hi"])


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(text: ModelText, dispatcher: ScriptedDispatcher) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with (
        served(text, dispatcher) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as connected,
    ):
        yield connected


# keyword arguments of the package, what the replica is asked for
FIELDS: list[tuple[dict[str, object], str, object]] = [
    ({"max_tokens": 5}, "max_tokens", 5),
    ({"temperature": 0.5}, "temperature", 0.5),
    ({"top_p": 0.5}, "top_p", 0.5),
    ({"presence_penalty": 1.0}, "presence_penalty", 1.0),
    ({"frequency_penalty": -1.0}, "frequency_penalty", -1.0),
    ({"seed": 7}, "seed", 7),
    ({"logit_bias": {"5": -100}}, "logit_bias", ((5, -100.0),)),
    ({"extra_body": {"top_k": 3}}, "top_k", 3),
    ({"extra_body": {"min_p": 0.25}}, "min_p", 0.25),
    ({"extra_body": {"repetition_penalty": 1.5}}, "repetition_penalty", 1.5),
    ({"extra_body": {"min_tokens": 2}}, "min_tokens", 2),
    ({"extra_body": {"allowed_token_ids": [7, 8]}}, "allowed_token_ids", (7, 8)),
    ({"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs", 1),
    ({"extra_body": {"ignore_eos": True, "stop_token_ids": [9]}}, "stop_token_ids", (9,)),
]
CHAT_FIELDS: list[tuple[dict[str, object], str, object]] = [
    ({"max_completion_tokens": 5}, "max_tokens", 5),
    ({"logprobs": True, "top_logprobs": 2}, "logprobs", 2),
    ({"logprobs": True}, "logprobs", 0),
    ({"store": False, "service_tier": "auto", "modalities": ["text"]}, "n", 1),
]
COMPLETION_FIELDS: list[tuple[dict[str, object], str, object]] = [
    ({"logprobs": 2}, "logprobs", 2),
    ({"echo": True, "logprobs": 2}, "prompt_logprobs", 2),
    ({"best_of": 1}, "n", 1),
]


def _param(request: Request, name: str) -> object:
    return getattr(request.params, name)


@pytest.mark.parametrize(("fields", "name", "expected"), [*FIELDS, *CHAT_FIELDS])
async def test_a_field_of_a_chat_reaches_the_replica(
    client: openai.AsyncOpenAI,
    dispatcher: ScriptedDispatcher,
    fields: dict[str, object],
    name: str,
    expected: object,
) -> None:
    await client.chat.completions.create(model=MODEL, messages=MESSAGES, **fields)  # type: ignore[call-overload]
    assert _param(dispatcher.requests[-1], name) == expected


@pytest.mark.parametrize(("fields", "name", "expected"), [*FIELDS, *COMPLETION_FIELDS])
async def test_a_field_of_a_completion_reaches_the_replica(
    client: openai.AsyncOpenAI,
    dispatcher: ScriptedDispatcher,
    fields: dict[str, object],
    name: str,
    expected: object,
) -> None:
    await client.completions.create(model=MODEL, prompt="hi", **fields)  # type: ignore[call-overload]
    assert _param(dispatcher.requests[-1], name) == expected


async def test_bad_words_reach_the_replica_as_ids(
    client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    await client.completions.create(model=MODEL, prompt="hi", extra_body={"bad_words": ["no"]})
    assert ids_of("no") in dispatcher.requests[-1].params.bad_words_ids


async def test_priority_salt_and_time_limit_reach_the_replica(
    client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    body = {"priority": -2, "cache_salt": "mine", "timeout_s": 30}
    await client.completions.create(model=MODEL, prompt="hi", extra_body=body)
    request = dispatcher.requests[-1]
    assert (request.priority, request.timeout_s is not None) == (-2, True)
    assert "mine" in request.cache_salt


async def test_log_probabilities_of_a_chat_are_read_by_the_package(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [token.token for token in logprobs.content] == ["H", "i"]
    assert [len(token.top_logprobs) for token in logprobs.content] == [2, 2]
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2, stream=True
    )
    told = [chunk.choices[0].logprobs async for chunk in stream]
    streamed = [token for one in told if one is not None for token in one.content or []]
    assert streamed == logprobs.content


async def test_an_echo_with_log_probabilities_scores_the_prompt(client: openai.AsyncOpenAI) -> None:
    reply = await client.completions.create(model=MODEL, prompt="ab", echo=True, logprobs=1, max_tokens=5)
    choice = reply.choices[0]
    assert choice.text == "abHi"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["<|bos|>", "a", "b", "H", "i"]
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert None not in choice.logprobs.token_logprobs[1:]
    assert choice.logprobs.text_offset == [0, 0, 1, 2, 3]


async def test_counts_come_along_with_a_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        stream=True,
        extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )
    counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage is not None]
    assert counts[-1] == 2
    assert counts == sorted(counts)
    assert len(counts) > 2


async def test_the_context_length_is_listed_with_the_model(client: openai.AsyncOpenAI) -> None:
    model = (await client.models.retrieve(MODEL)).to_dict()
    assert (model["max_model_len"], model["context_length"]) == (512, 512)
