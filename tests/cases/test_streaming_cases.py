"""Cases of streaming, stop strings and decoding that other servers got wrong, over HTTP on a scripted model."""

import asyncio
from itertools import accumulate

import pytest
from answers import Answer, Json, ask, opened
from engines import Gate
from scripted import EOS, Piece, saying, scripted_server, vocabulary

STREAM: Json = {"stream": True, "stream_options": {"include_usage": True}}
BOTH_WAYS = pytest.mark.parametrize("way", [{}, STREAM], ids=["whole", "streamed"])
TOOL: Json = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def completion(**fields: object) -> Json:
    return {"prompt": "hi", "temperature": 0, **fields}


def chat(**fields: object) -> Json:
    return {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, **fields}


async def answer(body: Json, *reply: Piece, **changes: object) -> Answer:
    """The answer of a server that says `reply`."""
    async with scripted_server(saying(*reply, **changes)) as server:
        return await ask(server.http, body)


@BOTH_WAYS
async def test_c01_no_part_of_a_stop_made_of_several_tokens_leaks(way: Json) -> None:
    found = await answer(completion(stop="<|im_end|>", **way), "Hi", "<|im", "_end|>")
    assert (found.choice.text, found.choice.finish) == ("Hi", "stop")


async def test_c02_only_a_tail_that_may_become_a_stop_is_held_back() -> None:
    gate = Gate(1)  # the status waits for the first token
    tree = saying("a", "b", "c", "E", "x")
    async with (
        scripted_server(tree, before_step=gate.before_step) as server,
        opened(server.http, completion(stop="END")) as stream,
    ):
        for text, n_next_steps in (("a", 1), ("b", 1), ("c", 2), ("Ex", 1)):
            await stream.advance()
            assert stream.answer.choice.pieces[-1] == text
            gate.allow(n_next_steps)
        found = await stream.rest()
    assert found.choice.pieces == ["a", "b", "c", "Ex"]


async def test_c03_reported_ids_are_those_of_the_text_so_far_and_nothing_is_lost_at_the_end() -> None:
    body = completion(stop="XYZ", max_tokens=3, return_token_ids=True, **STREAM)
    tree = saying("ab", "X", "Y")
    async with scripted_server(tree) as server:
        found = await ask(server.http, body)
        bytes_of = server.text.tokenizer.vocabulary.bytes_of
    choice = found.choice
    assert (choice.text, choice.finish) == ("abXY", "length")
    assert choice.token_ids == [1, 2, 3]
    by_ids = [b"".join(map(bytes_of, ids)).decode() for ids in accumulate(choice.chunk_ids)]
    assert by_ids[-1] == "abXY"
    assert set(by_ids) <= set(accumulate(choice.pieces))


@BOTH_WAYS
@pytest.mark.parametrize("tokens_per_step", [1, 2, 4])
async def test_c04_tokens_and_logprobs_end_with_the_token_that_completes_a_stop(
    way: Json, tokens_per_step: int
) -> None:
    body = completion(stop="</s2>", logprobs=0, return_token_ids=True, **way)
    found = await answer(body, "a", "</s2>", "b", "c", tokens_per_step=tokens_per_step)
    assert (found.choice.text, found.choice.finish) == ("a", "stop")
    assert found.choice.token_ids == [1, 2]
    assert len(found.choice.logprobs) == 2
    if found.usages:
        assert found.count("completion_tokens") == 2


async def test_c05_ten_thousand_broken_bytes_harm_nobody() -> None:
    tree = {
        "pieces": vocabulary("fine"),
        "default": {"pieces": [{"bytes": "f0"}]},
        "replies": [{"when": "good", "pieces": ["fine"]}],
        "max_model_len": 16_384,
        "tokens_per_step": 64,
    }
    async with scripted_server(tree) as server:
        broken, *others = await asyncio.gather(
            ask(server.http, completion(max_tokens=10_000)),
            *(ask(server.http, completion(prompt=f"good {index}", max_tokens=1)) for index in range(5)),
        )
    assert broken.choice.text == "\N{REPLACEMENT CHARACTER}" * 10_000
    assert (broken.choice.finish, broken.count("completion_tokens")) == ("length", 10_000)
    assert [other.choice.text for other in others] == ["fine"] * 5


@BOTH_WAYS
async def test_c06_a_character_split_over_tokens_arrives_whole(way: Json) -> None:
    found = await answer(completion(**way), {"bytes": "c4"}, {"bytes": "8f"}, "ábel")
    assert found.choice.text == "ďábel"


@BOTH_WAYS
async def test_c06_an_unfinished_character_at_the_end_becomes_one_replacement_character(way: Json) -> None:
    found = await answer(completion(**way), "x", {"bytes": "f0"}, {"bytes": "9f"}, {"bytes": "98"})
    assert found.choice.text == "x\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("tokens_per_step", [1, 2, 8])
async def test_c07_spaces_survive_any_flush_interval(tokens_per_step: int) -> None:
    pieces = [" logs", " and", " more", " of", " the", " same", " old", " logs", " and", " so", " on"]
    found = await answer(completion(**STREAM), *pieces, tokens_per_step=tokens_per_step)
    assert found.choice.text == " logs and more of the same old logs and so on"


@BOTH_WAYS
@pytest.mark.parametrize("make", [chat, completion])
async def test_c08_no_first_space_is_dropped_or_doubled(way: Json, make: type[Json]) -> None:
    found = await answer(make(**way), " ", "leading", " x")
    assert found.choice.text == " leading x"


@BOTH_WAYS
@pytest.mark.parametrize("pieces", [("A END B END",), ("A ", "END B EN", "D"), tuple("A END B END")])
async def test_c09_the_earliest_stop_that_completes_ends_the_answer(way: Json, pieces: tuple[str, ...]) -> None:
    found = await answer(completion(stop="END", **way), *pieces)
    assert (found.choice.text, found.choice.finish) == ("A ", "stop")


@BOTH_WAYS
async def test_c09_stops_apply_to_reasoning_as_to_all_output(way: Json) -> None:
    found = await answer(chat(stop="END", **way), "<think>A ", "END", "</think>", " B END")
    assert (found.choice.text, found.choice.finish) == ("<think>A ", "stop")


async def test_c10_a_grammar_that_breaks_ends_its_stream_with_an_error_and_done() -> None:
    # Nothing but `a` may be drawn, and the third token must not be one.
    body = completion(structured_outputs={"regex": "aab"}, allowed_token_ids=[1])
    gate = Gate(1)
    async with scripted_server(saying("a", "a", "a"), before_step=gate.before_step) as server:
        async with opened(server.http, body) as stream:
            await stream.advance()
            gate.allow(1)
            await stream.advance()
            gate.open()
            found = await stream.rest()
        after = await ask(server.http, completion(max_tokens=2))
    assert (found.choice.pieces, found.choice.finish) == (["a", "a"], None)
    assert found.error is not None
    assert found.is_done
    assert after.choice.text == "aa"


@BOTH_WAYS
@pytest.mark.parametrize(
    "field",
    [
        {"structured_outputs": {"regex": "(a"}},
        {"structured_outputs": {"grammar": "start: nonsense"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "zebra"}}}},
    ],
)
async def test_c11_a_wrong_grammar_is_refused_before_anything_is_sent(way: Json, field: Json) -> None:
    found = await answer(completion(**field, **way), "a")
    assert found.status == 400
    assert found.error is not None
    assert str(found.error["param"]).split(".")[0] == next(iter(field))


@BOTH_WAYS
async def test_c12_a_stop_in_the_middle_of_a_tool_call_loses_no_text(way: Json) -> None:
    found = await answer(chat(tools=[TOOL], stop="STOP", **way), "text ", "<tool_call>", '{"na', "STOP")
    assert found.choice.text == 'text <tool_call>{"na'
    assert (found.choice.finish, found.choice.tool_calls) == ("stop", [])


@BOTH_WAYS
async def test_c13_prompts_of_text_and_of_ids_are_trimmed_alike(way: Json) -> None:
    async with scripted_server(saying("ab", "ST", "OP", "c")) as server:
        found = [
            await ask(server.http, completion(prompt=prompt, stop="STOP", return_token_ids=True, **way))
            for prompt in ("ab", [1])
        ]
    assert [one.choice.token_ids for one in found] == [[1, 2, 3]] * 2
    assert [one.choice.text for one in found] == ["ab"] * 2


@BOTH_WAYS
async def test_an_end_of_sequence_has_no_text_but_counts(way: Json) -> None:
    found = await answer(completion(return_token_ids=True, **way), "a", "b")
    assert (found.choice.text, found.choice.token_ids, found.choice.finish) == ("ab", [1, 2, 0], "stop")
    assert EOS not in found.choice.text
