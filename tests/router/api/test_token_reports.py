"""Log-probabilities, token ids and token counts over HTTP: their shapes; a stream adds up to the whole reply."""

import json
from collections.abc import Sequence
from itertools import product
from typing import cast

import httpx
import pytest
from bakehouse_replica.core.types import FinishReason
from bakehouse_router.text.model_text import ModelText
from gateways import MODEL, ScriptedDispatcher, Step, delta, ids_of, served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH

Json = dict[str, object]


def _chat(**fields: object) -> Json:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def _completion(**fields: object) -> Json:
    return {"model": MODEL, "prompt": "hi", **fields}


async def _whole(text: ModelText, script: Sequence[Step], path: str, body: Json) -> Json:
    async with served(text, ScriptedDispatcher(script)) as url, httpx.AsyncClient(base_url=url) as client:
        reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()  # type: ignore[no-any-return]


async def _events(text: ModelText, script: Sequence[Step], path: str, body: Json) -> list[Json]:
    streaming = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with served(text, ScriptedDispatcher(script)) as url, httpx.AsyncClient(base_url=url) as client:
        reply = await client.post(path, json=streaming | body)
    assert reply.status_code == 200, reply.text
    frames = reply.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def _choice(reply: Json, index: int = 0) -> Json:
    return reply["choices"][index]  # type: ignore[index, no-any-return]


def _joined(name: str, parts: Sequence[Json]) -> object:
    """What the parts of a stream's choice amount to under one name."""
    values = [part[name] for part in parts if part.get(name) is not None]
    match values:
        case [{}, *_] if name == "logprobs":
            told = cast("list[Json]", values)
            return {key: _joined(key, told) for key in told[0]}
        case [[*_], *_]:
            return [entry for value in cast("list[list[object]]", values) for entry in value]
        case [str(), *_]:
            return "".join(cast("list[str]", values))
    return values[0] if values else None


REPORTS = ("stop", "return_token_ids", "logprobs", "echo", "prompt_logprobs")
OPTIONS = [
    {name: value for name, value in zip(REPORTS, values, strict=True) if value is not None}
    for values in product((None, "cX"), (None, True), (None, 0, 2), (None, True), (None, 1))
]
SCRIPTS: list[list[Step]] = [
    ["ab", "c", "Xd"],
    [(delta(0, "a"), delta(1, "ďé")), (delta(0, "cX", STOP),), (delta(1, "cXx", LENGTH),)],
]


@pytest.mark.parametrize("script", SCRIPTS, ids=["one", "two"])
async def test_a_streamed_completion_adds_up_to_the_whole_one(text: ModelText, script: list[Step]) -> None:
    n = 2 if isinstance(script[0], tuple) else 1
    names = ("text", "logprobs", "token_ids", "prompt_token_ids", "prompt_logprobs", "finish_reason")
    async with served(text, ScriptedDispatcher(script)) as url, httpx.AsyncClient(base_url=url) as client:
        for options in OPTIONS:
            body = _completion(n=n, **options)
            whole = (await client.post(COMPLETIONS, json=body)).json()
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            frames = (await client.post(COMPLETIONS, json=body)).text.split("\n\n")[:-2]
            events = [json.loads(frame.removeprefix("data: ")) for frame in frames]
            told = [event["choices"][0] for event in events[:-1]]
            for index in range(n):
                parts = [choice for choice in told if choice["index"] == index]
                for name in names:
                    assert _joined(name, parts) == _choice(whole, index).get(name), (options, name)
            assert events[-1]["usage"] == whole["usage"], options


async def test_a_chat_shows_log_probabilities_of_its_tokens(text: ModelText) -> None:
    body = _chat(logprobs=True, top_logprobs=2)
    whole = await _whole(text, ["ď"], CHAT, body)
    first, second = ids_of("ď")
    content = _choice(whole)["logprobs"]["content"]  # type: ignore[index]
    assert [(token["token"], token["bytes"], token["logprob"]) for token in content] == [
        ("\ufffd", [0xC4], -first),
        ("\ufffd", [0x8F], -second),
    ]
    assert [len(token["top_logprobs"]) for token in content] == [2, 2]
    events = await _events(text, ["ď"], CHAT, body)
    assert _choice(events[1])["logprobs"] == _choice(whole)["logprobs"]


async def test_c14_offsets_of_a_streamed_echo_count_from_its_start(text: ModelText) -> None:
    body = _completion(prompt="ab", echo=True, logprobs=0)
    events = await _events(text, ["c", "d"], COMPLETIONS, body)
    told = [_choice(event)["logprobs"] for event in events if event["choices"]]
    offsets = [offset for logprobs in told if logprobs for offset in logprobs["text_offset"]]  # type: ignore[index]
    assert offsets == [0, 0, 1, 2, 3]  # the first is the beginning of sequence, which no text shows
    assert "".join(str(_choice(event)["text"]) for event in events if event["choices"]) == "abcd"


async def test_c25_an_echo_without_output_shows_the_prompt(text: ModelText) -> None:
    script: list[Step] = [(delta(0, "", LENGTH),)]
    whole = await _whole(text, script, COMPLETIONS, _completion(prompt="abc", echo=True, max_tokens=0, logprobs=1))
    assert (_choice(whole)["text"], _choice(whole)["finish_reason"]) == ("abc", "length")
    assert len(_choice(whole)["logprobs"]["tokens"]) == 4  # type: ignore[index]
    assert _choice(whole)["logprobs"]["token_logprobs"][0] is None  # type: ignore[index]
    assert whole["usage"]["completion_tokens"] == 0  # type: ignore[index]


async def test_token_ids_of_prompt_and_answer_are_shown_where_asked_for(text: ModelText) -> None:
    whole = await _whole(text, ["Hi"], CHAT, _chat(return_token_ids=True, prompt_logprobs=0))
    assert _choice(whole)["token_ids"] == list(ids_of("Hi"))
    prompt_ids = whole["prompt_token_ids"]
    assert isinstance(prompt_ids, list)
    assert len(prompt_ids) == whole["usage"]["prompt_tokens"]  # type: ignore[index]
    rows = whole["prompt_logprobs"]
    assert [row and list(row) for row in rows] == [None, *([str(token_id)] for token_id in prompt_ids[1:])]  # type: ignore[attr-defined]
    events = await _events(text, ["Hi"], CHAT, _chat(return_token_ids=True, prompt_logprobs=0))
    assert (events[0]["prompt_token_ids"], events[0]["prompt_logprobs"]) == (prompt_ids, rows)
    assert not any("prompt_token_ids" in event for event in events[1:])
    assert _joined("token_ids", [_choice(event) for event in events[:-1]]) == list(ids_of("Hi"))


async def test_a_whole_reply_without_reports_has_no_fields_for_them(text: ModelText) -> None:
    whole = await _whole(text, ["Hi"], CHAT, _chat())
    assert whole.keys() == {"id", "object", "created", "model", "choices", "usage"}
    assert _choice(whole).keys() == {"index", "message", "logprobs", "finish_reason"}


async def test_c17_counts_along_the_stream_hold_the_whole_prompt_and_grow(text: ModelText) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = _completion(stream_options=options, stream=True)
    events = await _events(text, ["a", "bc", "d"], COMPLETIONS, body)
    counts = [(event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]) for event in events]  # type: ignore[index]
    assert counts == [(3, 1), (3, 3), (3, 4), (3, 4), (3, 4)]


async def test_a_kept_stop_string_stays_in_the_text(text: ModelText) -> None:
    whole = await _whole(text, ["aENDb"], COMPLETIONS, _completion(stop="END", include_stop_str_in_output=True))
    assert (_choice(whole)["text"], _choice(whole)["finish_reason"]) == ("aEND", "stop")
