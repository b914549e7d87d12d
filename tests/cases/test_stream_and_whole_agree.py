"""Streaming and not streaming agree for random requests: text, finish reason, ids, log-probabilities and usage.

One script with a reply for each request: random pieces (some of them halves of characters, some special), near
ties at temperature 1, stops, tool calls, several choices, echo, limits. Seeds and all are fixed.
"""

import asyncio
from dataclasses import dataclass
from random import Random

import pytest
from answers import Answer, Choice, Json, ask
from scripted import Piece, saying, scripted_server, vocabulary

STREAM: Json = {"stream": True, "stream_options": {"include_usage": True}}
N_REQUESTS = 500
N_AT_ONCE = 16
CALL: list[Piece] = ["<tool_call>", '{"name": "look", ', '"arguments": {"x": ', '"ě"', "}}", "</tool_call>"]
PIECES: list[Piece] = [
    *("a", "b", " the", "END", "EN", "D", "XY", "Z", "\n", "ě", "😀", "</s2>", "<tool", '"', "{", " "),
    *CALL,
    {"bytes": "f09f"},
    {"bytes": "9880"},
    {"bytes": "c4"},
    {"bytes": "8f"},
    {"special": "<|turn|>"},
]
TOOL: Json = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
STOPS = ["END", "XYZ", "a b", "</s2>", "ě😀", "\n\n", "D", "theEND"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request and what the model has to say to it."""

    reply: Json
    body: Json


def random_case(index: int, random: Random) -> Case:
    pieces = random.choices(PIECES, k=random.randrange(30))
    if random.random() < 0.3:
        pieces[5:5] = CALL * random.choice([1, 2])
    body: Json = {
        "temperature": random.choice([0, 1]),
        "seed": index,
        "max_tokens": random.choice([1, 2, 5, 40]),
        "n": random.choice([1, 1, 1, 2, 3]),
        "return_token_ids": random.random() < 0.5,
        "include_stop_str_in_output": random.random() < 0.2,
    }
    if random.random() < 0.5:
        body["stop"] = random.sample(STOPS, random.randrange(1, 4))
    if random.random() < 0.2:
        body["stop_token_ids"] = [random.randrange(1, 20)]
    if random.random() < 0.2:
        body["min_tokens"] = 1
    if random.random() < 0.2:
        body["frequency_penalty"] = 1.5
    body |= _chat(index, random) if random.random() < 0.5 else _completion(index, random)
    return Case(reply={"when": f"case {index};", "pieces": pieces}, body=body)


def _chat(index: int, random: Random) -> Json:
    body: Json = {"messages": [{"role": "user", "content": f"case {index};"}]}
    if random.random() < 0.5:
        body |= {"tools": [TOOL], "temperature": 0, "max_tokens": random.choice([10, 60])}
        body["parallel_tool_calls"] = random.random() < 0.7
    return body | random.choice([{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}])


def _completion(index: int, random: Random) -> Json:
    body: Json = {"prompt": f"case {index};", "echo": random.random() < 0.3}
    return body | random.choice([{}, {"logprobs": 0}, {"logprobs": 2}])


def gist(choice: Choice) -> tuple[object, ...]:
    told = (choice.text, choice.finish, choice.calls)
    return (*told, choice.token_ids, choice.logprobs, choice.prompt_logprobs)


def counts(answer: Answer) -> Json:
    """Without the cached tokens: the second of two equal prompts finds the first's blocks."""
    return {name: count for name, count in answer.usage.items() if name != "prompt_tokens_details"}


async def test_i2_five_hundred_random_requests_agree_streamed_and_whole() -> None:
    random = Random(20261130)
    cases = [random_case(index, random) for index in range(N_REQUESTS)]
    tree: Json = {
        "pieces": vocabulary(*PIECES),
        "eos": 0,
        "replies": [case.reply for case in cases],
        "default": {"ids": []},
        "prefer": [[1, 3, 5], [2], [], [10, 17, 18], [7, 12]],
        "tokens_per_step": 2,
    }
    turns = asyncio.Semaphore(N_AT_ONCE)
    async with scripted_server(tree) as server:

        async def compare(case: Case) -> Answer:
            async with turns:
                whole = await ask(server.http, case.body)
                streamed = await ask(server.http, case.body | STREAM)
            assert (whole.status, streamed.status) == (200, 200), (case, whole.error, streamed.error)
            assert streamed.is_done
            assert sorted(whole.choices) == sorted(streamed.choices) == list(range(int(str(case.body["n"]))))
            for index, choice in whole.choices.items():
                assert gist(choice) == gist(streamed.choices[index]), case
                assert choice.finish in ("stop", "length", "tool_calls"), case
            assert counts(whole) == counts(streamed), case
            return whole

        found = await asyncio.gather(*map(compare, cases))
    # The workload is worth something: all of these happen often.
    finishes = [choice.finish for answer in found for choice in answer.choices.values()]
    assert min(finishes.count("stop"), finishes.count("length")) > 100
    assert finishes.count("tool_calls") > 20
    assert sum("\N{REPLACEMENT CHARACTER}" in choice.text for one in found for choice in one.choices.values()) > 50


@pytest.mark.parametrize("tokens_per_step", [1, 4, 16])
@pytest.mark.parametrize("way", [{}, STREAM], ids=["whole", "streamed"])
async def test_tokens_after_the_only_call_allowed_do_not_count_however_they_arrive(
    tokens_per_step: int, way: Json
) -> None:
    body: Json = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [TOOL],
        "parallel_tool_calls": False,
        "return_token_ids": True,
        "temperature": 0,
    }
    tree = saying("a", *CALL, "b", *CALL, " the", "END", tokens_per_step=tokens_per_step)
    async with scripted_server(tree) as server:
        found = await ask(server.http, body | way)
    assert found.choice.calls == [("look", '{"x": "ě"}')]
    assert found.choice.finish == "tool_calls"
    # One before the call, and those of it up to the brace that closes it.
    assert (found.count("completion_tokens"), len(found.choice.token_ids)) == (6, 6)
