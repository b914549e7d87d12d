"""E-13 seen from outside: what is accepted changes the answer as it says, on both routes, streamed or not.

The scripted model all but ties its own token with the preferred ones, so whatever rules one out shows at once.
"""

import asyncio
import math
from typing import cast

import pytest
from answers import Answer, Json, ask
from bakehouse_router.api.responses.body import ResponseBody
from responses import checked, final, read_events
from scripted import saying, scripted_server, vocabulary

STREAM: Json = {"stream": True, "stream_options": {"include_usage": True}}
BOTH_WAYS = pytest.mark.parametrize("way", [{}, STREAM], ids=["whole", "streamed"])
ROUTES = ["completion", "chat"]
BOTH_ROUTES = pytest.mark.parametrize("route", ROUTES)
A, B, C, D = 1, 2, 3, 4  # ids; the end of sequence is 0
ABC = saying("a", "b", "c", pieces=vocabulary("a", "b", "c", "d"), prefer=[[D]])


def body(route: str, **fields: object) -> Json:
    asked: Json = {"prompt": "hi"} if route == "completion" else {"messages": [{"role": "user", "content": "hi"}]}
    return asked | {"temperature": 0} | fields


# Fields, the text and the finish that they make of "abc", and how many tokens count, the end of sequence included.
EFFECTS: list[tuple[Json, str, str, int]] = [
    ({}, "abc", "stop", 4),
    ({"max_tokens": 2}, "ab", "length", 2),
    ({"max_tokens": 3}, "abc", "length", 3),
    ({"min_tokens": 5}, "abcdd", "stop", 6),
    ({"ignore_eos": True, "max_tokens": 6}, "abc", "length", 6),
    ({"stop": "b"}, "a", "stop", 2),
    ({"stop": ["zebra", "bc"]}, "a", "stop", 3),
    ({"stop": ["bc", "b"]}, "a", "stop", 2),
    ({"stop": "b", "include_stop_str_in_output": True}, "ab", "stop", 2),
    ({"stop": "bc", "include_stop_str_in_output": True}, "abc", "stop", 3),
    ({"stop": "a", "min_tokens": 2}, "abc", "stop", 4),
    ({"stop_token_ids": [B]}, "a", "stop", 2),
    ({"stop_token_ids": [B], "include_stop_str_in_output": True}, "ab", "stop", 2),
    ({"stop_token_ids": [C, B], "min_tokens": 3}, "add", "stop", 4),
    ({"logit_bias": {str(A): -100}}, "dbc", "stop", 4),
    ({"logit_bias": {str(D): 100}, "max_tokens": 3}, "ddd", "length", 3),
    ({"allowed_token_ids": [C, D]}, "ddc", "stop", 4),
    ({"bad_words": ["b"]}, "adc", "stop", 4),
    ({"bad_words": ["ab", "dc"]}, "add", "stop", 4),
    ({"structured_outputs": {"choice": ["ad", "x"]}}, "ad", "stop", 2),
    ({"structured_outputs": {"regex": "a{3}"}}, "aaa", "stop", 3),
]


@BOTH_WAYS
@BOTH_ROUTES
async def test_each_field_changes_the_answer_as_it_says(route: str, way: Json) -> None:
    async with scripted_server(ABC) as server:
        found = await asyncio.gather(*(ask(server.http, body(route, **fields, **way)) for fields, *_ in EFFECTS))
    for answer, (fields, text, finish, n_tokens) in zip(found, EFFECTS, strict=True):
        assert answer.status == 200, (fields, answer.error)
        assert (answer.choice.text, answer.choice.finish) == (text, finish), fields
        assert answer.count("completion_tokens") == n_tokens, fields


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_each_field_changes_a_response_as_it_says(is_streamed: bool) -> None:
    async with scripted_server(ABC) as server:
        n_tried = 0
        for fields, text, finish, n_tokens in EFFECTS:
            given = {
                "max_output_tokens" if name == "max_tokens" else name: value for name, value in fields.items()
            }
            if not given.keys() <= ResponseBody.model_fields.keys():
                continue
            n_tried += 1
            asked = {"model": "scripted", "input": "hi", "temperature": 0, "stream": is_streamed, **given}
            reply = await server.http.post("/v1/responses", json=asked)
            assert reply.status_code == 200, (given, reply.text)
            told = final(read_events(reply.text)) if is_streamed else checked(reply.json())
            assert told.output_text == text, given
            assert told.status == ("completed" if finish == "stop" else "incomplete"), given
            assert told.usage is not None
            assert told.usage.output_tokens == n_tokens, given
    assert n_tried == len(EFFECTS) - 2, "a response is constrained by text.format instead"


# At the first position a, b, c, d have these probabilities; the fields, and which of them may then be drawn.
ROW = [[A, math.log(0.4)], [B, math.log(0.3)], [C, math.log(0.2)], [D, math.log(0.1)]]
SAMPLED: list[tuple[Json, str]] = [
    ({}, "abcd"),
    ({"temperature": 0}, "a"),
    ({"temperature": 0.01}, "a"),
    ({"temperature": 2}, "abcd"),
    ({"top_k": 2}, "ab"),
    ({"top_k": 0}, "abcd"),
    ({"top_p": 0.65}, "ab"),
    ({"top_p": 0.75}, "abc"),
    ({"min_p": 0.7}, "ab"),
    ({"min_p": 0.45}, "abc"),
    ({"top_k": 3, "min_p": 0.7}, "ab"),
    ({"logit_bias": {str(A): -100}, "top_k": 2}, "bc"),
]


@BOTH_ROUTES
async def test_each_filter_leaves_the_tokens_that_it_says(route: str) -> None:
    tree = ABC | {"default": {"ids": [A], "logprobs": [ROW]}}
    # 160 draws miss a token of one in ten once in 20 million; the seeds are fixed besides.
    async with scripted_server(tree) as server:

        async def drawn(fields: Json) -> set[str]:
            bodies = [
                body(route, n=16, max_tokens=1, **({"temperature": 1, "seed": seed} | fields))
                for seed in range(10)
            ]
            answers = await asyncio.gather(*(ask(server.http, one) for one in bodies))
            return {choice.text for answer in answers for choice in answer.choices.values()}

        for fields, expected in SAMPLED:
            assert await drawn(fields) == set(expected), fields


@BOTH_ROUTES
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "aaaa"),
        ({"presence_penalty": 1}, "adaa"),  # both have been said then, so neither is worse off
        ({"frequency_penalty": 1}, "adad"),
        ({"presence_penalty": -1}, "aaaa"),
    ],
)
async def test_penalties_count_what_was_said(route: str, fields: Json, expected: str) -> None:
    tree = ABC | {"default": {"ids": [A] * 4}}
    async with scripted_server(tree) as server:
        found = await ask(server.http, body(route, max_tokens=4, **fields))
    assert found.choice.text == expected


async def test_of_the_penalties_only_that_of_repetition_counts_the_prompt() -> None:
    async with scripted_server(ABC | {"default": {"ids": [A]}}) as server:
        texts = [
            (await ask(server.http, {"prompt": "a", "temperature": 0, "max_tokens": 1} | fields)).choice.text
            for fields in ({"repetition_penalty": 1.5}, {"presence_penalty": 1}, {"frequency_penalty": 1})
        ]
    assert texts == ["d", "a", "a"]


@BOTH_ROUTES
async def test_a_salt_keeps_cached_prompts_apart(route: str) -> None:
    async with scripted_server(ABC) as server:
        long = (
            {"prompt": "x" * 64}
            if route == "completion"
            else {"messages": [{"role": "user", "content": "x" * 64}]}
        )
        cached = [
            _cached(await ask(server.http, body(route, **long, max_tokens=1, cache_salt=salt)))
            for salt in ("one", "two", "one", "", "two", "")
        ]
    assert [count > 0 for count in cached] == [False, False, True, False, True, True]


def _cached(answer: Answer) -> int:
    return cast("dict[str, int]", answer.usage["prompt_tokens_details"])["cached_tokens"]


@pytest.mark.parametrize("route", ROUTES)
@BOTH_WAYS
async def test_a_time_limit_before_the_first_token_is_408(route: str, way: Json) -> None:
    async with scripted_server(ABC | {"stall_at": 0}) as server:
        by_field = await ask(server.http, body(route, timeout_s=0.05, **way))
        by_header = await ask(
            server.http, body(route, timeout_s=50, **way), headers={"x-bakehouse-timeout-seconds": "0.05"}
        )
    assert [by_field.status, by_header.status] == [408, 408]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "user: hi\nassistant: "),
        ({"add_generation_prompt": False}, "user: hi\n"),
        ({"chat_template_kwargs": {"mood": "glad "}}, "glad user: hi\nassistant: "),
        (
            {
                "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}],
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
            "user: hi\nassistant: so",
        ),
    ],
)
async def test_fields_of_a_chat_change_its_prompt(fields: Json, expected: str) -> None:
    template = (
        "{{ mood }}{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    async with scripted_server(ABC | {"chat_template": template}) as server:
        reply = await server.http.post(
            "/v1/chat/completions", json={"model": "scripted", **body("chat", return_token_ids=True, **fields)}
        )
        ids = reply.json()["prompt_token_ids"]
        told = (await server.http.post("/detokenize", json={"tokens": ids})).json()["prompt"]
    assert told == expected
