"""The events of a response as a machine: whatever the pieces, they add up to the response at their end."""

import asyncio
from collections.abc import Sequence
from random import Random

import pytest
from bakehouse_replica.core.types import FinishReason, TokenLogprob
from bakehouse_router.api.responses.events import ResponseWriter
from bakehouse_router.api.responses.reply import ResponseHead
from bakehouse_router.api.token_json import Json, TokenReport
from bakehouse_router.generation import CallUsage
from bakehouse_router.prompt_run import TextPiece
from bakehouse_router.text.stream import OutputToken
from bakehouse_router.text.tools.hermes import HermesParser
from grammars import small_vocabulary
from responses import RESPONSES, checked, final, read_events, without_names
from scripted import MODEL, Piece, scripted_server, vocabulary

CALL: list[Piece] = ["<tool_call>", '{"name": "look", ', '"arguments": {"x": ', '"ě"', "}}", "</tool_call>"]
PIECES: list[Piece] = ["a", "b", " the", "END", "XY", "Z", "\n", "😀", "<tool", *CALL, {"bytes": "f09f"}]
NAMES = frozenset({"look", "wait"})
FRAGMENTS = [
    *(
        "a",
        " ",
        "b c",
        "\n",
        "ě",
        "<tool_call>",
        "</tool_call>",
        "<tool",
        '{"name": "look", "arguments": {"x": 1}}',
    ),
    *('<tool_call>{"name": "wait"}', '<tool_call>{"name": "look", "arguments": {"y": "ě"}}</tool_call>'),
    *('{"name": "wait"}', '{"name": "fly", "arguments": {}}', '{"name": "look", "arguments": {"x": [', "{", '"'),
]
USAGE = CallUsage(prompt_tokens=5, cached_tokens=0, completion_tokens=7)
HEAD = ResponseHead(response_id="resp_1", created_at=1, model="m", temperature=1.0, top_p=1.0, echo={})
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def _tokens(texts: Sequence[str]) -> list[TextPiece]:
    """A piece for each token, whose id and log-probability are its number."""
    pieces, n_chars = [], 0
    for number, text in enumerate(texts):
        logprob = TokenLogprob(logprob=-float(number), rank=1)
        token = OutputToken(token_id=number, text_offset=n_chars, logprob=logprob)
        pieces.append(TextPiece(choice=0, text=text, tokens=(token,)))
        n_chars += len(text)
    return pieces


def _joined(pieces: Sequence[TextPiece], random: Random) -> list[TextPiece]:
    """The same, some neighbours delivered together."""
    joined: list[TextPiece] = []
    for piece in pieces:
        if joined and random.random() < 0.6:
            last = joined.pop()
            piece = TextPiece(choice=0, text=last.text + piece.text, tokens=last.tokens + piece.tokens)
        joined.append(piece)
    return joined


def _events(pieces: Sequence[TextPiece], finish: FinishReason, *, has_tools: bool, shows: bool) -> list[Json]:
    report = TokenReport(names=small_vocabulary(), n_top=0 if shows else None)
    writer = ResponseWriter(HEAD, report, HermesParser(NAMES) if has_tools else None)
    events = writer.begin()
    for piece in pieces:
        events += writer.write(piece if shows else TextPiece(choice=0, text=piece.text))
    events += writer.write(TextPiece(choice=0, text="", finish=finish))
    return [*events, writer.end(USAGE, 2)]


def _built(events: Sequence[Json]) -> list[Json]:
    """The output that a client builds from the items' beginnings and deltas; what ends them must agree."""
    items: list[dict] = []  # type: ignore[type-arg]
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(items)
                items.append(dict(event["item"]))  # type: ignore[call-overload]
            case "response.content_part.added":
                items[-1]["content"] = [dict(event["part"])]  # type: ignore[call-overload]
            case "response.output_text.delta":
                (part,) = items[-1]["content"]
                part["text"] += event["delta"]
                part["logprobs"] = [*part["logprobs"], *event["logprobs"]]  # type: ignore[misc]
            case "response.output_text.done":
                (part,) = items[-1]["content"]
                assert (part["text"], part["logprobs"]) == (event["text"], event["logprobs"])
            case "response.content_part.done":
                assert items[-1]["content"] == [event["part"]]
            case "response.function_call_arguments.delta":
                items[-1]["arguments"] += event["delta"]
            case "response.function_call_arguments.done":
                assert items[-1]["arguments"] == event["arguments"]
            case "response.output_item.done":
                items[-1]["status"] = event["item"]["status"]  # type: ignore[index]
                assert items[-1] == event["item"]
        if "item_id" in event:
            assert (event["item_id"], event["output_index"]) == (items[-1]["id"], len(items) - 1)
    return items


def _gist(output: Sequence[Json]) -> list[Json]:
    return [{name: value for name, value in item.items() if name != "call_id"} for item in output]


@pytest.mark.parametrize("shows", [False, True])
@pytest.mark.parametrize("has_tools", [False, True])
def test_i2_a_stream_adds_up_to_the_whole_response_however_its_tokens_arrive(has_tools: bool, shows: bool) -> None:
    random = Random(31)
    n_items = []
    for _ in range(300):
        pieces = _tokens(random.choices(FRAGMENTS, k=random.randrange(12)))
        finish = random.choice([STOP, LENGTH])
        events = _events(pieces, finish, has_tools=has_tools, shows=shows)
        response = events[-1]["response"]
        assert isinstance(response, dict)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert _built(events) == response["output"]
        again = _events(_joined(pieces, random), finish, has_tools=has_tools, shows=shows)[-1]["response"]
        assert isinstance(again, dict)
        assert _gist(again["output"]) == _gist(response["output"])
        assert response["status"] == ("completed" if finish is STOP else "incomplete")
        statuses = [item["status"] for item in response["output"]]
        assert statuses == ["completed"] * (len(statuses) - 1) + [response["status"]]
        n_items.append(len(statuses))
    assert min(n_items) == 1
    assert max(n_items) == 1 or (has_tools and max(n_items) > 3)


def test_without_tools_every_token_has_its_log_probability() -> None:
    events = _events(_tokens(["a", "", "b", ""]), STOP, has_tools=False, shows=True)
    (item,) = events[-1]["response"]["output"]  # type: ignore[index]
    assert [one["logprob"] for one in item["content"][0]["logprobs"]] == [0.0, -1.0, -2.0, -3.0]


def test_tokens_of_calls_are_not_told_with_the_text_around_them() -> None:
    call = ["<tool_call>", '{"name": "look", ', '"arguments": {}}', "</tool_call>"]
    events = _events(_tokens(["a", " b", *call, "c"]), STOP, has_tools=True, shows=True)
    before, called, after = events[-1]["response"]["output"]  # type: ignore[index]
    assert [one["logprob"] for one in before["content"][0]["logprobs"]] == [0.0, -1.0]
    assert called["arguments"] == "{}"
    assert after["content"][0]["text"] == "c"


def _random_body(index: int, random: Random) -> Json:
    body: Json = {"model": MODEL, "input": f"case {index};", "max_output_tokens": random.choice([1, 3, 8, 60])}
    if random.random() < 0.5:
        body["tools"] = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    if random.random() < 0.5:
        body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    if random.random() < 0.5:
        body["stop"] = random.sample(["END", "XYZ", "a b", "\n\n"], 2)
    return body | {"cache_salt": str(random.randrange(3))}


async def test_i2_random_requests_agree_streamed_and_whole() -> None:
    random = Random(20261130)
    replies, bodies = [], []
    for index in range(100):
        pieces = random.choices(PIECES, k=random.randrange(25))
        if random.random() < 0.5:
            pieces[5:5] = CALL * random.choice([1, 2])
        replies.append({"when": f"case {index};", "pieces": pieces})
        bodies.append(_random_body(index, random))
    tree: Json = {"pieces": vocabulary(*PIECES), "eos": 0, "replies": replies, "default": {"ids": []}}
    turns = asyncio.Semaphore(8)
    async with scripted_server(tree | {"tokens_per_step": 2}) as server:

        async def compare(body: Json) -> str:
            async with turns:
                whole = await server.http.post(RESPONSES, json=body)
                streamed = await server.http.post(RESPONSES, json=body | {"stream": True})
            assert (whole.status_code, streamed.status_code) == (200, 200), (whole.text, streamed.text)
            response, last = checked(whole.json()), final(read_events(streamed.text))
            assert response.usage is not None
            assert last.usage is not None
            # The second of two equal prompts finds the first's blocks.
            last.usage.input_tokens_details = response.usage.input_tokens_details
            assert without_names(last) == without_names(response), body
            return str(response.status)

        statuses = await asyncio.gather(*map(compare, bodies))
    assert min(statuses.count("completed"), statuses.count("incomplete")) > 20
