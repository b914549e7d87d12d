"""Cases of log-probabilities, several choices, token counts and seeds, over HTTP on a scripted model."""

import asyncio
import json
import math
from typing import cast

import pytest
from answers import Answer, Json, ask
from bakehouse_replica.settings import ReplicaSettings
from scripted import saying, scripted_server, vocabulary

STREAM: Json = {"stream": True, "stream_options": {"include_usage": True}}
COUNTED: Json = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
BOTH_WAYS = pytest.mark.parametrize("way", [{}, STREAM], ids=["whole", "streamed"])
# Six tokens that are nearly equally likely wherever a token is drawn.
TIES = {"pieces": ["a", "b", "c", "d", "e", "f"], "default": {"ids": [0]}, "prefer": [[1, 2, 3, 4, 5]]}


def completion(**fields: object) -> Json:
    return {"prompt": "hi", "temperature": 0, **fields}


@BOTH_WAYS
async def test_c14_text_offsets_count_from_the_start_of_the_returned_text(way: Json) -> None:
    async with scripted_server(saying("c", "d", "é", "e")) as server:
        found = await ask(server.http, completion(prompt="ab", echo=True, logprobs=1, max_tokens=4, **way))
    assert found.choice.text == "abcdée"
    assert [row["text_offset"] for row in found.choice.logprobs] == [0, 1, 2, 3, 4, 5]
    assert [row["tokens"] for row in found.choice.logprobs] == ["a", "b", "c", "d", "é", "e"]
    assert found.choice.logprobs[0]["token_logprobs"] is None
    assert all(row["token_logprobs"] is not None for row in found.choice.logprobs[1:])


@BOTH_WAYS
async def test_c14_each_choice_of_each_prompt_counts_from_a_start_of_its_own(way: Json) -> None:
    async with scripted_server(saying("c", "d")) as server:
        body = completion(prompt=["ab", "xyz"], n=2, echo=True, logprobs=0, max_tokens=2, **way)
        found = await ask(server.http, body)
    assert [found.choices[index].text for index in range(4)] == ["abcd", "abcd", "xyzcd", "xyzcd"]
    offsets = [[row["text_offset"] for row in found.choices[index].logprobs] for index in range(4)]
    assert offsets == [[0, 1, 2, 3]] * 2 + [[0, 1, 2, 3, 4]] * 2


async def test_c15_prompt_logprobs_of_a_warm_prompt_are_its_own() -> None:
    prompt = "a prompt that fills more than a block of sixteen tokens"
    async with scripted_server(saying("c")) as server:
        found = [
            await ask(server.http, completion(prompt=prompt, max_tokens=1, prompt_logprobs=k))
            for k in (0, 2, 5, 2)
        ]
    assert found[1].choice.prompt_logprobs == found[3].choice.prompt_logprobs
    for answer, k in zip(found, (0, 2, 5, 2), strict=True):
        rows = answer.choice.prompt_logprobs
        assert rows is not None
        assert len(rows) == len(prompt)
        assert rows[0] is None
        assert all(row is not None and k <= len(row) <= k + 1 for row in rows[1:])


async def test_logprobs_are_those_of_the_script_whatever_the_sampling_does() -> None:
    given = [[[1, math.log(0.5)], [2, math.log(0.25)]]]
    tree = saying("a", "b") | {"default": {"ids": [1], "logprobs": given}}
    async with scripted_server(tree) as server:
        for changes in (
            {},
            {"temperature": 3.0, "seed": 1},
            {"logit_bias": {"2": 50}},
            {"allowed_token_ids": [2]},
        ):
            found = await ask(server.http, completion(max_tokens=1, logprobs=2, **changes))
            (row,) = found.choice.logprobs
            top = cast("dict[str, float]", row["top_logprobs"])
            assert top["a"] == pytest.approx(math.log(0.5), abs=1e-5)
            assert top["b"] == pytest.approx(math.log(0.25), abs=1e-5)


@BOTH_WAYS
async def test_c16_usage_sums_all_choices_and_counts_the_prompt_once(way: Json) -> None:
    tree = saying("a") | {
        "replies": [{"when": "h", "ids": [1] * 2}, {"when": "h", "ids": [1] * 4}],  # and the end of sequence
    }
    async with scripted_server(tree) as server:
        found = await ask(server.http, completion(prompt="hi there", n=2, **way))
    assert {index: choice.text for index, choice in found.choices.items()} == {0: "aa", 1: "aaaa"}
    assert (found.count("prompt_tokens"), found.count("completion_tokens")) == (8, 8)
    assert found.count("total_tokens") == 16


async def test_c16_the_last_chunk_alone_has_the_usage_and_no_choices() -> None:
    async with scripted_server(saying("a", "b")) as server:
        body = {"model": "scripted", **completion(n=2, **STREAM)}
        frames = (await server.http.post("/v1/completions", json=body)).text.split("\n\n")
    *chunks, last = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)


async def test_c17_continuous_usage_has_the_whole_prompt_from_the_first_chunk_on() -> None:
    tree = saying("x") | {"pieces": vocabulary("x", "test "), "max_model_len": 1100}
    replica = ReplicaSettings(max_step_tokens=128, max_prefill_tokens=128, hash_key=b"key")
    async with scripted_server(tree, replica=replica) as server:
        found = await ask(server.http, completion(prompt="test " * 1000, max_tokens=1, **COUNTED))
        assert len(server.plans) >= 8
    assert [usage["prompt_tokens"] for usage in found.usages] == [1000] * len(found.usages)
    assert [usage["completion_tokens"] for usage in found.usages] == [1] * len(found.usages)
    assert len(found.usages) >= 2


async def test_c17_continuous_usage_grows_with_the_answer() -> None:
    async with scripted_server(saying("a", "b", "c", "d")) as server:
        found = await ask(server.http, completion(n=3, **COUNTED))
    counts = [cast("int", usage["completion_tokens"]) for usage in found.usages]
    assert counts == sorted(counts)
    assert counts[-1] == 15
    assert {usage["prompt_tokens"] for usage in found.usages} == {2}


async def test_c18_every_choice_ends_with_a_reason_of_its_own() -> None:
    tree = saying("a") | {"replies": [{"when": ".", "ids": [1] * length} for length in (1, 4, 2)]}
    async with scripted_server(tree) as server:
        found = await ask(server.http, completion(n=3, **STREAM))
    assert {index: choice.text for index, choice in found.choices.items()} == {0: "a", 1: "aaaa", 2: "aa"}
    assert {index: choice.finish for index, choice in found.choices.items()} == dict.fromkeys(range(3), "stop")


async def test_c18_choices_of_one_seed_differ_and_a_rerun_is_identical() -> None:
    body = completion(n=3, temperature=1.0, seed=5, max_tokens=12)
    async with scripted_server(TIES) as server:
        runs = [await ask(server.http, body | way) for way in ({}, {}, STREAM)]
    texts = [[run.choices[index].text for index in range(3)] for run in runs]
    assert texts[0] == texts[1] == texts[2]
    assert len(set(texts[0])) == 3


async def test_c19_cached_tokens_of_a_prompt_count_once_whatever_n_is() -> None:
    tree = saying("x") | {"pieces": vocabulary("x", *(f"w{index} " for index in range(64)))}
    prompt = "".join(f"w{index} " for index in range(64))
    async with scripted_server(tree) as server:
        cold = await ask(server.http, completion(prompt=prompt, max_tokens=1))
        warm = await ask(server.http, completion(prompt=prompt, max_tokens=1, n=4))
    assert [_cached(answer) for answer in (cold, warm)] == [0, 48]  # the last block is computed again
    assert warm.count("prompt_tokens") == 64


def _cached(answer: Answer) -> int:
    return cast("dict[str, int]", answer.usage["prompt_tokens_details"])["cached_tokens"]


async def test_c20_unseeded_requests_differ_and_a_seeded_one_is_the_same_in_a_crowd() -> None:
    body = completion(temperature=1.0, max_tokens=12)
    async with scripted_server(TIES) as server:
        alone = await ask(server.http, body | {"seed": 9})
        crowd = await asyncio.gather(
            *(ask(server.http, body) for _ in range(8)), ask(server.http, body | {"seed": 9})
        )
    *unseeded, seeded = [answer.choice.text for answer in crowd]
    # Two answers of 12 tokens out of 6 are equal once in two billion.
    assert len(set(unseeded)) == 8
    assert seeded == alone.choice.text
