"""The official `openai` package against a real server: what it returns is what the engine generated."""

import asyncio
from collections.abc import AsyncGenerator

import openai
import pytest
import pytest_asyncio
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Request
from bakehouse_replica.engine import Engine
from bakehouse_router.text.messages import ChatMessage
from bakehouse_router.text.model_text import ModelText
from bakehouse_router.text.stream import TextStream
from gateways import END_ID, MODEL, fake_engine, served
from openai.types.chat import ChatCompletionMessageParam

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "wörld"}]},
]
PROMPT = "Once upon a time"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncGenerator[Engine, None]:
    async with fake_engine() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(engine: Engine, text: ModelText) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with (
        served(text, engine) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as connected,
    ):
        yield connected


async def _generated(engine: Engine, prompt_ids: tuple[int, ...], **params: int) -> list[tuple[int, ...]]:
    """What the engine generates for each choice, asked directly."""
    chosen = {"temperature": 0.0, "seed": 1, "stop_token_ids": (END_ID,), **params}
    request = Request(request_id="direct", prompt_ids=prompt_ids, params=SamplingParams(**chosen))  # type: ignore[arg-type]
    outputs: dict[int, tuple[int, ...]] = {}
    async for delivery in engine.generate(request):
        for delta in delivery.deltas:
            outputs[delta.choice] = outputs.get(delta.choice, ()) + delta.token_ids
    return [outputs[choice] for choice in sorted(outputs)]


def _text_of(text: ModelText, token_ids: tuple[int, ...]) -> str:
    stream = TextStream(text.tokenizer.vocabulary)
    return stream.feed(token_ids) + stream.finish()


def _chat_ids(text: ModelText) -> tuple[int, ...]:
    return text.chat_template.encode(
        [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hello, wörld")]
    )


async def test_a_chat_is_answered_with_what_the_engine_generates(
    client: openai.AsyncOpenAI, engine: Engine, text: ModelText
) -> None:
    prompt_ids = _chat_ids(text)
    (expected,) = await _generated(engine, prompt_ids, max_tokens=40)
    reply = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=40)
    assert reply.object == "chat.completion"
    assert reply.model == MODEL
    (choice,) = reply.choices
    assert (choice.index, choice.message.role) == (0, "assistant")
    assert choice.message.content == _text_of(text, expected)
    assert choice.finish_reason == ("stop" if expected[-1] == END_ID else "length")
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt_ids), len(expected))
    assert reply.usage.total_tokens == len(prompt_ids) + len(expected)


async def test_a_streamed_chat_says_the_same_as_the_whole_one(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=40)
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].choices[0].delta.role == "assistant"
    told = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in told) == whole.choices[0].message.content
    assert [choice.finish_reason for choice in told if choice.finish_reason] == [whole.choices[0].finish_reason]
    last = chunks[-1]
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_a_completion_is_what_the_engine_generates(
    client: openai.AsyncOpenAI, engine: Engine, text: ModelText
) -> None:
    prompt_ids = text.tokenizer.encode_raw(PROMPT)
    (expected,) = await _generated(engine, prompt_ids, max_tokens=30)
    for prompt in (PROMPT, list(prompt_ids)):
        reply = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=30)
        assert reply.object == "text_completion"
        assert reply.choices[0].text == _text_of(text, expected)


async def test_a_streamed_completion_says_the_same_as_the_whole_one(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=30)
    stream = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=30, stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert choices[-1].finish_reason == whole.choices[0].finish_reason


async def test_several_prompts_and_choices_are_indexed_prompt_by_prompt(
    client: openai.AsyncOpenAI, engine: Engine, text: ModelText
) -> None:
    prompts = ["first", "second one"]
    reply = await client.completions.create(
        model=MODEL, prompt=prompts, n=2, max_tokens=20, temperature=1.0, seed=5
    )
    expected = []
    for prompt in prompts:
        prompt_ids = text.tokenizer.encode_raw(prompt)
        expected += await _generated(engine, prompt_ids, n=2, max_tokens=20, temperature=1, seed=5)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in reply.choices] == [_text_of(text, token_ids) for token_ids in expected]
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == sum(len(text.tokenizer.encode_raw(prompt)) for prompt in prompts)
    assert reply.usage.completion_tokens == sum(map(len, expected))


async def test_c16_a_stream_of_several_choices_has_one_total_at_its_end(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        n=3,
        temperature=1.0,
        max_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = [chunk async for chunk in stream]
    told = [choice for chunk in chunks for choice in chunk.choices]
    finishes = [(choice.index, choice.finish_reason) for choice in told if choice.finish_reason]
    assert sorted(finishes) == [(0, "length"), (1, "length"), (2, "length")]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 27


async def test_c18_choices_differ_and_a_seed_repeats_them(client: openai.AsyncOpenAI) -> None:
    async def texts(seed: int) -> list[str | None]:
        reply = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, n=3, temperature=1.0, seed=seed, max_tokens=20
        )
        return [choice.message.content for choice in reply.choices]

    first, again, other = await texts(1), await texts(1), await texts(2)
    assert first == again
    assert first != other
    assert len(set(first)) == 3


async def test_c20_requests_without_a_seed_differ(client: openai.AsyncOpenAI) -> None:
    # Eight texts of twenty tokens from 259: equal by chance with probability 10**-48.
    replies = await asyncio.gather(
        *(
            client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=1.0, max_tokens=20)
            for _ in range(8)
        )
    )
    assert len({reply.choices[0].message.content for reply in replies}) == 8


async def test_a_repeated_prompt_reports_its_cached_tokens_once(client: openai.AsyncOpenAI) -> None:
    prompt = "a prompt of its own that is long enough for several blocks of sixteen tokens"
    n_tokens = len(prompt) + 1
    await client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
    reply = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, n=4)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == (n_tokens - 1) // 16 * 16


async def test_the_model_is_listed_by_its_name(client: openai.AsyncOpenAI) -> None:
    models = await client.models.list()
    assert [model.id for model in models.data] == [MODEL]
    assert (await client.models.retrieve(MODEL)).owned_by == "bakehouse"


async def test_errors_reach_the_package_as_its_own(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, top_logprobs=5)
    assert refused.value.param == "top_logprobs"
