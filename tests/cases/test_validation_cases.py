"""Cases of bad input and limits, over HTTP on a scripted model: a clear 4xx, and nobody else notices."""

import json
import re
from pathlib import Path

import pytest
from answers import Json, ask, opened, read
from bakehouse_replica.build import build_engine
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.core.types import ModelSource
from bakehouse_replica.executors.token_cache import SLOT_BYTES
from bakehouse_replica.settings import ReplicaSettings
from engines import Gate
from jsonschema import validate
from scripted import saying, scripted_server, vocabulary

ENDLESS: Json = {"pieces": ["x", "p "], "default": {"pieces": ["x"]}}


def completion(**fields: object) -> Json:
    return {"prompt": "hi", "temperature": 0, **fields}


@pytest.mark.parametrize("key", ["191222", "-1", "AI", "1.5", ""])
async def test_c21_a_logit_bias_of_no_token_is_refused_and_a_running_stream_goes_on(key: str) -> None:
    gate = Gate(1)
    async with (
        scripted_server(saying("a", "b", "c"), before_step=gate.before_step) as server,
        opened(server.http, completion()) as stream,
    ):
        refused = await ask(server.http, completion(logit_bias={key: 1}))
        gate.open()
        running = await stream.rest()
    assert refused.status == 400
    assert refused.error is not None
    assert refused.error["param"] == "logit_bias"
    assert key in refused.complaint()
    assert (running.choice.text, running.choice.finish) == ("abc", "stop")


# Of the 258 tokens of that script (two pieces and the bytes), 257 is the last one.
@pytest.mark.parametrize("token_id", [-1, 258, 151_645, 2**70])
@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "prompt"])
async def test_c22_token_ids_that_the_model_lacks_are_refused(field: str, token_id: int) -> None:
    async with scripted_server(saying("a")) as server:
        assert (await ask(server.http, completion() | {field: [1, 257]})).status == 200
        found = await ask(server.http, completion() | {field: [1, token_id]})
        after = await ask(server.http, completion())
    assert found.status == 400
    assert found.error is not None
    assert found.error["param"] == field
    assert after.choice.text == "a"


async def test_c23_a_length_error_names_limit_prompt_and_request() -> None:
    async with scripted_server(ENDLESS | {"max_model_len": 2048}) as server:
        found = await ask(server.http, completion(prompt="p " * 8, max_tokens=2045))
    assert found.status == 400
    assert {"2048", "8", "2045"} <= set(re.findall(r"\d+", found.complaint()))
    assert found.error is not None
    assert found.error["code"] == "context_length_exceeded"


async def test_c24_the_context_is_used_to_its_last_token_and_not_beyond() -> None:
    tree = ENDLESS | {"max_model_len": 4096, "tokens_per_step": 16}
    async with scripted_server(tree) as server:
        full = await ask(server.http, completion(prompt="p " * 4095, max_tokens=1))
        over = [
            await ask(server.http, completion(prompt="p " * n_prompt, max_tokens=n_output))
            for n_prompt, n_output in ((4096, 1), (4095, 2), (4000, 97))
        ]
        rest = await ask(server.http, completion(prompt="p " * 4000))
        last = await ask(server.http, completion(prompt="p " * 4095))
        none_left = await ask(server.http, completion(prompt="p " * 4096))
    assert full.count("total_tokens") == 4096
    assert (rest.choice.finish, rest.count("completion_tokens")) == ("length", 96)
    assert (last.choice.finish, last.count("completion_tokens")) == ("length", 1)
    # The gateway's own refusal, before anything is queued: the replica has a guard of the same width behind it.
    for refused, param in zip((*over, none_left), ("prompt", "max_tokens", "max_tokens", "prompt"), strict=True):
        assert refused.status == 400
        assert refused.error is not None
        assert (refused.error["code"], refused.error["param"]) == ("context_length_exceeded", param)
        assert "4096" in refused.complaint()


@pytest.mark.parametrize("way", [{}, {"stream": True, "stream_options": {"include_usage": True}}])
async def test_c25_echo_without_new_tokens_returns_the_prompt(way: Json) -> None:
    async with scripted_server(ENDLESS) as server:
        found = await ask(server.http, completion(prompt="p p p ", echo=True, max_tokens=0, **way))
    assert found.choice.text == "p p p "
    assert (found.count("prompt_tokens"), found.count("completion_tokens")) == (3, 0)


def nested(depth: int) -> Json:
    schema: Json = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


# The deepest is nested deeper than Python's own parser of JSON goes.
SCHEMAS = {
    "large number": json.dumps({"type": "integer", "maximum": 20e9}),
    "unknown type": json.dumps({"type": "zebra"}),
    "type is a number": json.dumps({"type": 7}),
    "nested 30": json.dumps(nested(30)),
    "nested 300": json.dumps(nested(300)),
    "nested 10000": '{"type": "array", "items": ' * 10_000 + "{}" + "}" * 10_000,
    "refers to itself": json.dumps({"$ref": "#"}),
    "refers elsewhere": json.dumps({"$ref": "https://example.com/x.json"}),
    "huge": json.dumps({"enum": [f"value {index}" for index in range(100_000)]}),
    "explosive": json.dumps({"type": "string", "pattern": "(a{1,1000}){1,1000}"}),
    "broken pattern": json.dumps({"type": "string", "pattern": "("}),
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
async def test_c26_a_bad_or_huge_schema_is_refused_or_obeyed_and_the_next_request_is_served(schema: str) -> None:
    body = '{"model": "scripted", "prompt": "hi", "max_tokens": 20, "response_format": {"type": "json_schema", '
    body += '"json_schema": {"name": "x", "schema": ' + schema + "}}}"
    async with scripted_server(saying("1")) as server:
        reply = await server.http.post("/v1/completions", content=body)
        after = await ask(server.http, completion())
    answer = read(reply.status_code, reply.text)
    assert answer.status in (200, 400, 413)
    if answer.status != 200:
        assert answer.complaint()
    elif answer.choice.finish == "stop":
        validate(json.loads(answer.choice.text), json.loads(schema))
    assert after.choice.text == "1"


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
async def test_c26_parameters_of_tools_are_no_less_harmless(schema: str, choice: str) -> None:
    properties = '{"type": "object", "properties": {"x": ' + schema + "}}"
    body = '{"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "tools": '
    body += '[{"type": "function", "function": {"name": "f", "parameters": ' + properties + "}}], "
    body += '"tool_choice": "' + choice + '"}'
    async with scripted_server(saying("1")) as server:
        reply = await server.http.post("/v1/chat/completions", content=body)
        after = await ask(server.http, completion())
    answer = read(reply.status_code, reply.text)
    assert answer.status in (200, 400, 413)
    if answer.status != 200:
        assert answer.complaint()
    assert after.choice.text == "1"


async def test_c27_a_taste_for_spaces_does_not_keep_a_constrained_answer_from_its_end() -> None:
    schema = {
        "type": "object",
        "patternProperties": {"^x[0-9]$": {"type": "integer"}},
        "additionalProperties": False,
        "minProperties": 1,
    }
    likings = [" ", "\n", "\t", "}", "x", "1", '"', ":", ",", "{"]
    tree: Json = {
        "pieces": vocabulary(*likings),
        "eos": 0,
        "default": {"ids": [1] * 200},
        "prefer": [list(range(2, len(likings) + 1))],
    }
    body = completion(
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    async with scripted_server(tree) as server:
        found = await ask(server.http, body)
    assert found.choice.finish == "stop"
    assert found.count("completion_tokens") < 100
    validate(json.loads(found.choice.text), schema)


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
async def test_c30_an_unknown_model_is_told_in_the_usual_envelope(path: str, content: Json) -> None:
    async with scripted_server(saying("a")) as server:
        reply = await server.http.post(path, json={"model": "gpt-9", **content})
    error = reply.json()["error"]
    assert reply.status_code == 404
    assert (error["code"], error["param"], error["type"]) == ("model_not_found", "model", "invalid_request_error")
    assert "gpt-9" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", "/v1/completions", "{", 400),
        ("POST", "/v1/completions", "[]", 400),
        ("POST", "/v1/completions", '{"model": "scripted"}', 400),
        (
            "POST",
            "/v1/chat/completions",
            '{"model": "scripted", "messages": [{"role": "user", "content": 7}]}',
            400,
        ),
        ("POST", "/v1/responses", "{", 400),
        ("POST", "/v1/responses", '{"model": "scripted"}', 400),
        ("POST", "/tokenize", "null", 400),
        ("POST", "/detokenize", '{"tokens": [-1]}', 400),
        ("GET", "/v1/completions", "", 405),
        ("GET", "/v1/nothing", "", 404),
        ("GET", "/v1/models/gpt-9", "", 404),
        ("POST", "/v1/completions", '{"prompt": "' + "x" * 9_000_000 + '"}', 413),
    ],
)
async def test_c30_every_error_has_the_envelope(method: str, path: str, content: str, status: int) -> None:
    async with scripted_server(saying("a")) as server:
        reply = await server.http.request(method, path, content=content)
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def settings_of(path: Path, kv_tokens: int) -> ReplicaSettings:
    return ReplicaSettings(
        source=ModelSource(model=f"scripted:{path}"), kv_memory_bytes=kv_tokens * SLOT_BYTES, hash_key=b"key"
    )


async def test_c31_a_cache_smaller_than_the_context_is_refused_with_what_would_fit(
    tmp_path: Path,
) -> None:
    path = tmp_path / "bun.json"
    path.write_text(json.dumps(ENDLESS | {"max_model_len": 4096}))
    with pytest.raises(StartupError) as refusal:
        build_engine(settings_of(path, 3664), replica_id="r")
    assert all(number in refusal.value.message for number in ("4096", "3664", "--max-model-len to 3664"))
    engine = build_engine(settings_of(path, 4096), replica_id="r")
    assert engine.card.n_blocks * engine.card.block_size == engine.card.max_model_len == 4096
    await engine.close()


@pytest.mark.parametrize("tokens_per_step", [1, 3, 8])
async def test_each_choice_keeps_to_its_grammar_however_many_tokens_a_step_has(tokens_per_step: int) -> None:
    pieces = ["red", "gre", "en", "blu", "e", "x"]
    tree: Json = {
        "pieces": vocabulary(*pieces),
        "eos": 0,
        "replies": [{"when": ".", "pieces": [first, *pieces[::-1]]} for first in ("red", "gre", "blu", "x")],
        "prefer": [[4, 1, 2, 3, 5]],
        "tokens_per_step": tokens_per_step,
    }
    body = completion(n=4, structured_outputs={"choice": ["red", "green", "blue"]})
    async with scripted_server(tree) as server:
        found = await ask(server.http, body)
    texts = [found.choices[index].text for index in range(4)]
    assert texts == ["red", "green", "blue", "blue"]
    assert {choice.finish for choice in found.choices.values()} == {"stop"}
