"""Cases of tool calls and chat templates, over HTTP: calls cut anywhere, truncated, one BOS, contents of parts."""

import asyncio
import json
from pathlib import Path
from typing import Literal

import httpx
import pytest
from answers import CHAT, Answer, Json, ask
from bakehouse_router.settings import GatewaySettings
from gateways import BOS, MODEL, SPECIALS, ScriptedDispatcher, served, tiny_text
from scripted import MODEL as SCRIPTED
from scripted import saying, scripted_server, vocabulary
from two_replicas import two_replicas

STREAM: Json = {"stream": True, "stream_options": {"include_usage": True}}
TOOL: Json = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ARGUMENTS = '{"a":"x\\"y","b":[1,2]}'
FORMATS = {
    "hermes": '<tool_call>{"name": "f", "arguments": ' + ARGUMENTS + "}</tool_call>",
    "llama3_json": '{"name": "f", "parameters": ' + ARGUMENTS + "}",
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": ' + ARGUMENTS + "}]",
}
FormatName = Literal["hermes", "llama3_json", "mistral"]
EACH_FORMAT = pytest.mark.parametrize("name", list(FORMATS))


def chat(content: object, **fields: object) -> Json:
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "tools": [TOOL], **fields}


def settings_of(name: FormatName) -> GatewaySettings:
    return GatewaySettings(served_name=SCRIPTED, tool_format=name)


@EACH_FORMAT
@pytest.mark.parametrize("tokens_per_step", [1, 3])
async def test_c32_arguments_are_the_same_at_every_border_where_tokens_cut_them(
    name: FormatName, tokens_per_step: int
) -> None:
    text = FORMATS[name]
    cuts = [[text[:border], text[border:]] for border in range(1, len(text))] + [list(text), [text]]
    tree: Json = {
        "pieces": vocabulary(*(piece for cut in cuts for piece in cut)),
        "eos": 0,
        "replies": [{"when": f"case {index};", "pieces": cut} for index, cut in enumerate(cuts)],
        "tokens_per_step": tokens_per_step,
    }
    async with scripted_server(tree, gateway=settings_of(name)) as server:
        found = await asyncio.gather(
            *(
                ask(server.http, chat(f"case {index};", **way))
                for index in range(len(cuts))
                for way in ({}, STREAM)
            )
        )
    assert json.loads(ARGUMENTS) == {"a": 'x"y', "b": [1, 2]}
    for answer in found:
        assert (answer.choice.calls, answer.choice.finish) == ([("f", ARGUMENTS)], "tool_calls")
        assert answer.choice.text == ""


@EACH_FORMAT
async def test_c33_wherever_max_tokens_cuts_a_call_its_finish_is_length_both_ways(name: FormatName) -> None:
    text = FORMATS[name]
    n_until_whole = text.rindex("}") + 1 if name != "hermes" else text.index("</tool_call>")
    async with scripted_server(saying(*text), gateway=settings_of(name)) as server:

        async def both(n_tokens: int) -> list[Answer]:
            return [await ask(server.http, chat("hi", max_tokens=n_tokens, **way)) for way in ({}, STREAM)]

        found = await asyncio.gather(*map(both, range(1, n_until_whole)))
        whole = await ask(server.http, chat("hi"))
    for n_tokens, (plain, streamed) in enumerate(found, start=1):
        assert plain.choice.finish == streamed.choice.finish == "length", n_tokens
        assert (plain.choice.text, plain.choice.calls) == (streamed.choice.text, streamed.choice.calls)
        assert plain.count("completion_tokens") == streamed.count("completion_tokens") == n_tokens
        # Nothing is lost: what is no call yet is content, and arguments come as far as they were written.
        said = plain.choice.text or "".join(arguments for _, arguments in plain.choice.calls)
        assert said in text
    assert whole.choice.finish == "tool_calls"


async def test_c34_the_ids_of_a_chat_begin_with_exactly_one_bos(tmp_path: Path) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "return_token_ids": True}
    with_typed_bos = body | {"messages": [{"role": "user", "content": f"{BOS}hi"}]}
    async with (
        served(tiny_text(tmp_path), ScriptedDispatcher(["ok"])) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        for fields in (body, with_typed_bos):
            ids = (await http.post(CHAT, json=fields)).json()["prompt_token_ids"]
            told = (await http.post("/tokenize", json={"messages": fields["messages"]})).json()["tokens"]
            assert ids == told
            assert ids[0] == SPECIALS.index(BOS)
            assert ids.count(SPECIALS.index(BOS)) == 1


@pytest.mark.parametrize("way", [{}, STREAM], ids=["whole", "streamed"])
async def test_c35_contents_of_parts_survive_a_second_turn_and_a_retry(way: Json) -> None:
    messages = [
        {"role": role, "content": [{"type": "text", "text": f"{role} "}, {"type": "text", "text": f"turn {turn}"}]}
        for turn in range(2)
        for role in ("user", "assistant")
    ] + [{"role": "user", "content": [{"type": "text", "text": "and now?"}]}]
    expected = "user: user turn 0\nassistant: assistant turn 0\nuser: user turn 1\nassistant: assistant turn 1\n"
    tree = saying("lost") | {
        "pieces": vocabulary("lost", "understood"),
        "replies": [{"when": f"^{expected}user: and now[?]\nassistant: $", "pieces": ["understood"]}],
    }
    async with two_replicas(tree, raise_at=0) as http:
        found = await ask(http, {"messages": messages, "temperature": 0, **way})
    assert (found.status, found.choice.text, found.choice.finish) == (200, "understood", "stop")
