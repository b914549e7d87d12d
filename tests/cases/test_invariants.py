"""Invariants over HTTP on a scripted model, on random scripts, bodies and workloads."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from random import Random
from typing import cast

import pytest
from answers import CHAT, COMPLETIONS, Answer, Json, ask, opened
from bakehouse_replica.core.types import StepPlan
from bakehouse_replica.settings import ReplicaSettings
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Piece, ScriptedServer, scripted_server, vocabulary

STREAM: Json = {"stream": True, "stream_options": {"include_usage": True}}
BYTES = st.binary(min_size=1, max_size=3) | st.text("aEND é😀\n", min_size=1, max_size=3).map(str.encode)
STOPS = st.lists(st.sampled_from(["END", "D", "a", "é😀", "aa E", "\n", "EN"]), max_size=3, unique=True)


def trimmed(text: str, stops: list[str]) -> tuple[str, str]:
    """What is shown of a text that ends by itself, and why it ends."""
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    end, length = min(ends, default=(len(text), 0))
    return text[: end + length], "stop"


# Several texts for one server: it takes longer to start than to answer.
@settings(max_examples=15)
@given(
    cases=st.lists(st.tuples(st.lists(BYTES, max_size=14), STOPS), min_size=8, max_size=8),
    tokens_per_step=st.sampled_from([1, 2, 5]),
)
def test_i1_deltas_join_to_the_decoded_text_up_to_the_first_stop(
    cases: list[tuple[list[bytes], list[str]]], tokens_per_step: int
) -> None:
    replies: list[list[Piece]] = [[{"bytes": piece.hex()} for piece in pieces] for pieces, _ in cases]
    tree: Json = {
        "pieces": vocabulary(*(piece for reply in replies for piece in reply)),
        "eos": 0,
        "replies": [{"when": f"case {index};", "pieces": reply} for index, reply in enumerate(replies)],
        "tokens_per_step": tokens_per_step,
    }
    bodies: list[Json] = [
        {"prompt": f"case {index};", "temperature": 0, "stop": stops} for index, (_, stops) in enumerate(cases)
    ]

    async def run(way: Json) -> list[Answer]:
        async with scripted_server(tree) as server:
            return await asyncio.gather(*(ask(server.http, body | way) for body in bodies))

    for (pieces, stops), streamed, whole in zip(
        cases, asyncio.run(run(STREAM)), asyncio.run(run({})), strict=True
    ):
        expected = trimmed(b"".join(pieces).decode(errors="replace"), stops)
        assert (streamed.choice.text, streamed.choice.finish) == expected
        assert (whole.choice.text, whole.choice.finish) == expected
        assert whole.count("completion_tokens") == streamed.count("completion_tokens")
        assert all(streamed.choice.pieces)


@contextmanager
def server_for_many_examples(tree: Json) -> Iterator[tuple[asyncio.Runner, ScriptedServer]]:
    """A server that lives while its runner runs: between examples it stands still."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        server = runner.run(stack.enter_async_context(scripted_server(tree)))
        try:
            yield runner, server
        finally:
            runner.run(stack.aclose())


FIELDS = [
    *("model", "prompt", "messages", "max_tokens", "min_tokens", "n", "best_of", "temperature", "top_k", "top_p"),
    *("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "seed"),
    *(
        "allowed_token_ids",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "prompt_logprobs",
    ),
    *("return_token_ids", "response_format", "structured_outputs", "stream", "stream_options", "user", "priority"),
    *("cache_salt", "timeout_s", "logprobs", "top_logprobs", "echo", "suffix", "tools", "tool_choice", "metadata"),
    *("parallel_tool_calls", "max_completion_tokens", "continue_final_message", "add_generation_prompt", "zebra"),
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 30)
    | st.sampled_from(
        [2**31, 2**63, -(2**70), 10**400, 0.0, -0.0, 0.5, 1e300, -1e308, "scripted", "", "auto", "json_object"]
    )
    | st.text(max_size=5)
)
NAMES = st.text(max_size=3) | st.sampled_from([*FIELDS, "type", "role", "content", "function", "json_schema"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=3) | st.sampled_from([*FIELDS, "type", "role", "content"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
USER: Json = {"role": "user", "content": "hi"}
BODIES = st.tuples(
    st.sampled_from([(COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": [USER]})]),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3),
)


def test_i3_any_body_gets_an_answer_or_a_clear_refusal_and_neighbours_never_notice() -> None:
    tree: Json = {"pieces": vocabulary("a", "b"), "eos": 0, "default": {"ids": [1, 2]}, "max_model_len": 64}
    with server_for_many_examples(tree) as (runner, server):

        async def ask_beside_a_stream(path: str, body: str) -> tuple[int, str, Answer]:
            async with opened(server.http, {"prompt": "neighbour", "temperature": 0}) as stream:
                reply = await server.http.post(path, content=body)
                return reply.status_code, reply.text, await stream.rest()

        @settings(max_examples=150)
        @given(BODIES)
        def check(drawn: tuple[tuple[str, Json], Json]) -> None:
            (path, valid), changes = drawn
            body: Json = {"model": "scripted", "max_tokens": 4, **valid, **changes}
            status, text, neighbour = runner.run(ask_beside_a_stream(path, json.dumps(body)))
            assert neighbour.choice.text == "ab"
            assert status == 200 or 400 <= status < 500, (status, text)
            if status != 200:
                error = cast("Json", json.loads(text)["error"])
                assert set(error) == {"message", "type", "param", "code"}
                assert error["message"]

        check()


@settings(max_examples=12)
@given(st.integers(0, 2**32), st.sampled_from([None, 3]))
def test_i5_every_choice_ends_exactly_once_whatever_ends_it(seed: int, raise_at: int | None) -> None:
    random = Random(seed)
    replies: list[Json] = [{"when": ".", "ids": [1] * random.randrange(8)} for _ in range(4)]
    tree: Json = {
        "pieces": vocabulary("a"),
        "eos": 0,
        "replies": replies,
        "default": {"ids": []},
        "raise_at": raise_at,
    }
    bodies: list[Json] = [
        {
            "prompt": "hi" * random.randrange(1, 40),
            "temperature": 0,
            "n": random.randrange(1, 5),
            "max_tokens": random.randrange(1, 10),
            "stop": random.choice([["aaa"], []]),
            "timeout_s": random.choice([60, 60, 0.002]),
            **random.choice([{}, STREAM]),
        }
        for _ in range(12)
    ]

    async def run() -> list[Answer]:
        async with scripted_server(tree) as server:
            return await asyncio.gather(*(ask(server.http, body) for body in bodies))

    for body, answer in zip(bodies, asyncio.run(run()), strict=True):
        assert answer.is_done == (answer.status == 200 and "stream" in body)
        if answer.error is None:
            finishes = {index: choice.finishes for index, choice in answer.choices.items()}
            assert sorted(finishes) == list(range(cast("int", body["n"])))
            assert all(len(reasons) == 1 for reasons in finishes.values())
        else:
            assert answer.error["code"] in ("deadline_exceeded", "engine_dead", "unavailable")
            assert all(len(choice.finishes) <= 1 for choice in answer.choices.values())


# Ten tokens that are nearly equally likely: a changed draw would show within a few tokens.
TIES: Json = {
    "pieces": [*"abcdefghij"],
    "default": {"ids": [0]},
    "prefer": [[*range(1, 10)]],
    "max_model_len": 200,
}
N_PROMPTS = 12
CHUNKED = ReplicaSettings(max_step_tokens=17, max_prefill_tokens=7, hash_key=b"key")


def workload() -> list[Json]:
    random = Random(7)
    prompts = ["".join(random.choices("abcdefghij", k=random.randrange(1, 90))) for _ in range(N_PROMPTS)]
    return [
        {
            "prompt": prompt,
            "temperature": 1.0,
            "seed": index,
            "n": 1 + index % 3,
            "max_tokens": 40,
            "return_token_ids": True,
            "frequency_penalty": 0.5 if index % 4 == 0 else 0.0,
        }
        for index, prompt in enumerate(prompts)
    ]


def ids_of(answer: Answer) -> list[list[int]]:
    return [answer.choices[index].token_ids for index in sorted(answer.choices)]


async def ids_together(server: ScriptedServer) -> list[list[list[int]]]:
    return [ids_of(answer) for answer in await asyncio.gather(*(ask(server.http, body) for body in workload()))]


async def ids_alone() -> list[list[list[int]]]:
    """Each request by itself, on a server that has served nothing before."""
    alone = []
    for body in workload():
        async with scripted_server(TIES) as server:
            alone.append(ids_of(await ask(server.http, body)))
    return alone


def n_replayed(plans: list[StepPlan]) -> int:
    """Chunks that compute a sequence from its beginning although it has drawn before."""
    seen: set[int] = set()
    count = 0
    for plan in plans:
        for chunk in plan.chunks:
            count += chunk.sequence_id in seen and len(chunk.token_ids) > 1
            if chunk.sample is not None:
                seen.add(chunk.sequence_id)
    return count


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    return asyncio.run(ids_alone())


async def test_i6_ids_are_the_same_in_a_crowd_and_on_a_warm_cache(expected: list[list[list[int]]]) -> None:
    async with scripted_server(TIES) as server:
        assert await ids_together(server) == expected
        n_cold = sum(len(chunk.token_ids) for plan in server.plans for chunk in plan.chunks)
        assert await ids_together(server) == expected
        n_warm = sum(len(chunk.token_ids) for plan in server.plans for chunk in plan.chunks) - n_cold
    assert n_warm < n_cold


async def test_i6_ids_are_the_same_in_small_chunks(expected: list[list[list[int]]]) -> None:
    async with scripted_server(TIES, replica=CHUNKED) as server:
        assert await ids_together(server) == expected
        assert max(len(chunk.token_ids) for plan in server.plans for chunk in plan.chunks) <= 17


async def test_i6_ids_are_the_same_under_preemption(expected: list[list[list[int]]]) -> None:
    async with scripted_server(TIES, n_blocks=30) as server:
        assert await ids_together(server) == expected
        assert n_replayed(server.plans) > 5


@pytest.mark.parametrize("tokens_per_step", [2, 7])
async def test_i6_ids_are_the_same_with_several_tokens_in_a_step(
    expected: list[list[list[int]]], tokens_per_step: int
) -> None:
    async with scripted_server(TIES | {"tokens_per_step": tokens_per_step}, n_blocks=40) as server:
        assert await ids_together(server) == expected
