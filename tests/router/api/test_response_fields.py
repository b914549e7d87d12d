"""The fields of `/v1/responses`: each that is accepted has its effect, each other is a 400 that names it."""

import json
from collections.abc import AsyncGenerator

import httpx
import pytest
import pytest_asyncio
from bakehouse_replica.core.sampling import GrammarKind
from bakehouse_router.text.model_text import ModelText
from gateways import MODEL, ScriptedDispatcher, served, settings
from responses import RESPONSES, Fields, asking

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one server for the whole table


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def dispatcher() -> ScriptedDispatcher:
    return ScriptedDispatcher(["Hi"])


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def http(text: ModelText, dispatcher: ScriptedDispatcher) -> AsyncGenerator[httpx.AsyncClient, None]:
    chosen = settings(max_tools=2, max_schema_bytes=1000, max_schema_depth=8)
    async with served(text, dispatcher, chosen) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        yield client


def _item(**fields: object) -> Fields:
    return {"input": [fields]}


def _tool(**fields: object) -> Fields:
    return {"type": "function", "name": "f", **fields}


def _format(**fields: object) -> Fields:
    return {"text": {"format": fields}}


CALL: Fields = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
DEEP: Fields = {}
for _ in range(9):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
HALF = "\ud800"

# fields besides model and input, the field that is named, part of the message
REFUSED: list[tuple[Fields, str, str]] = [
    # what does not exist here
    ({"store": True}, "store", "answers are not stored here"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send the earlier items as input"),
    ({"conversation": "conv_1"}, "conversation", "send the earlier items as input"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "prompts are not stored here"),
    ({"background": True}, "background", "answers are not stored here"),
    ({"reasoning": {"effort": "low"}}, "reasoning", "chat_template_kwargs"),
    ({"truncation": "auto"}, "truncation", "never cut"),
    ({"context_management": [{"type": "compaction"}]}, "context_management", "must be null"),
    ({"moderation": {"model": "m"}}, "moderation", "must be null"),
    ({"max_tool_calls": 1}, "max_tool_calls", "no built-in tools"),
    ({"service_tier": "flex"}, "service_tier", "one tier"),
    ({"prompt_cache_key": "k"}, "prompt_cache_key", "cache_salt"),
    ({"prompt_cache_retention": "24h"}, "prompt_cache_retention", "must be null"),
    ({"safety_identifier": "s"}, "safety_identifier", "use user"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "padded",
    ),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage", "unsupported"),
    ({"stream_options": {}}, "stream_options", "only where stream is true"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "medium"),
    ({"n": 2}, "n", "unsupported field"),
    ({"messages": []}, "messages", "unsupported field"),
    ({"max_tokens": 5}, "max_tokens", "unsupported field"),
    ({"response_format": {"type": "text"}}, "response_format", "unsupported field"),
    ({"logprobs": True}, "logprobs", "unsupported field"),
    # input
    ({"input": None}, "input", "a string or a list of items"),
    ({"input": []}, "input", "a string or a list of items"),
    ({"input": 5}, "input", "a string or a list of items"),
    ({"input": ["hi"]}, "input[0]", "must be an object"),
    (_item(content="hi"), "input[0].role", "given where the type is message"),
    (_item(role="user"), "input[0].content", "given where the type is message"),
    (_item(role="tool", content="hi"), "input[0].role", "'tool'"),
    (_item(role="user", content=[]), "input[0].content", "string or a list of text parts"),
    (_item(role="user", content="a", output="b"), "input[0].output", "left out where the type is message"),
    (_item(role="user", content="a", mood="b"), "input[0].mood", "unsupported field"),
    (_item(role="assistant", content="a", phase="commentary"), "input[0].phase", "must be null"),
    (
        _item(role="user", content=[{"type": "input_image", "image_url": "data:"}]),
        "input[0].content[0].type",
        "only text is read here",
    ),
    (_item(role="user", content=[{"type": "input_file"}]), "input[0].content[0].type", "only text is read here"),
    (_item(role="user", content=[{"type": []}]), "input[0].content[0].type", "only text is read here"),
    (_item(role="user", content=[{"text": "a"}]), "input[0].content[0].type", "required"),
    (_item(role="user", content=[{"type": "input_text"}]), "input[0].content[0].text", "required"),
    (_item(type="reasoning", summary=[]), "input[0].type", "reasoning is not kept apart"),
    (_item(type="item_reference", id="msg_1"), "input[0].type", "nothing is stored"),
    (_item(type="web_search_call", id="ws_1"), "input[0].type", "no built-in tool"),
    (_item(type=["message"]), "input[0].type", "must be 'message'"),
    ({"input": [CALL | {"arguments": "["}]}, "input[0].arguments", "JSON object as text"),
    ({"input": [CALL | {"name": "a b"}]}, "input[0].name", "pattern"),
    ({"input": [CALL | {"call_id": None}]}, "input[0].call_id", "given where the type is function_call"),
    ({"input": [CALL | {"role": "user"}]}, "input[0].role", "left out where the type is function_call"),
    ({"input": [CALL]}, "input[0]", "cannot show calls of tools"),
    (
        {
            "input": [
                {"role": "user", "content": "a"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ]
        },
        "input[1].call_id",
        "that of a function_call before it",
    ),
    (
        {"instructions": "a", "input": [{"role": "system", "content": "b"}]},
        "input",
        "a system message must be first",
    ),
    ({"input": "x" * 1000}, "input", "context"),
    # answers
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    ({"max_output_tokens": 9999}, "max_output_tokens", "context is 512 tokens"),
    ({"temperature": "hot"}, "temperature", "'hot'"),
    ({"temperature": -1}, "temperature", "temperature is -1"),
    ({"top_p": 2}, "top_p", "top_p is 2"),
    ({"top_logprobs": 1}, "top_logprobs", "include has 'message.output_text.logprobs'"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs", "at most 20"),
    ({"include": ["reasoning.encrypted_content"]}, "include[0]", "message.output_text.logprobs"),
    ({"include": "message.output_text.logprobs"}, "include", "list"),
    # tools
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "no built-in tools here"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name", "required"),
    ({"tools": [_tool(name="a b")]}, "tools[0].name", "pattern"),
    ({"tools": [_tool(parameters=[])]}, "tools[0].parameters", "must be an object"),
    ({"tools": [_tool(parameters={"type": "array"})]}, "tools[0].parameters", "'array'"),
    ({"tools": [_tool(parameters={"x-guidance": {}})]}, "tools[0].parameters.x-guidance", "set here"),
    ({"tools": [_tool(parameters=DEEP)]}, "tools[0].parameters", "the limit is 8"),
    ({"tools": [_tool(), _tool()]}, "tools", "names must differ"),
    ({"tools": [_tool(name=name) for name in "abc"]}, "tools", "the limit is 2"),
    ({"tools": [_tool()]}, "tools", "chat template has no tools"),
    ({"tools": [_tool()], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "'g'"),
    ({"tools": [_tool()], "tool_choice": {"type": "web_search"}}, "tool_choice", "must be"),
    ({"tool_choice": "required"}, "tool_choice", "tools must be given"),
    ({"tools": [_tool()], **_format(type="json_object")}, "text.format", "cannot call tools"),
    # formats
    ({"text": "plain"}, "text", "object"),
    (_format(type="xml"), "text.format.type", "'xml'"),
    (_format(type="json_schema", schema={}), "text.format.name", "given where the type is json_schema"),
    (_format(type="json_schema", name="n"), "text.format.schema", "given where the type is json_schema"),
    (_format(type="json_schema", name="a b", schema={}), "text.format.name", "pattern"),
    (_format(type="json_object", schema={}), "text.format.schema", "left out where the type is json_object"),
    (_format(type="json_schema", name="n", schema=DEEP), "text.format.schema", "the limit is 8"),
    (_format(type="json_schema", name="n", schema={"a": "x" * 1000}), "text.format.schema", "the limit is 1000"),
    (_format(type="json_schema", json_schema={}), "text.format.json_schema", "unsupported field"),
    # what the reply repeats
    ({"metadata": {"k": 1}}, "metadata.k", "string"),
    ({"metadata": {"k": "v" * 513}}, "metadata.k", "at most 512"),
    ({"metadata": {str(key): "v" for key in range(17)}}, "metadata", "at most 16"),
    ({"metadata": {"k" * 65: "v"}}, f"metadata.{'k' * 65}.[key]", "at most 64"),
    ({"metadata": {"k": HALF}}, "metadata", "surrogate"),
    ({"instructions": HALF}, "instructions", "surrogate"),
    ({"input": HALF}, "input", "surrogate"),
    ({"tools": [_tool(description=HALF)], "tool_choice": "none"}, "tools", "surrogate"),
    (_format(type="json_schema", name="n", schema={"title": HALF}), "text", "surrogate"),
]


@pytest.mark.parametrize(("fields", "param", "said"), REFUSED, ids=lambda value: str(value)[:60])
async def test_what_is_not_understood_is_refused_by_its_name(
    http: httpx.AsyncClient, dispatcher: ScriptedDispatcher, fields: Fields, param: str, said: str
) -> None:
    n_before = len(dispatcher.requests)
    content = json.dumps(asking(**fields))  # in ASCII, which can say what UTF-8 cannot
    reply = await http.post(RESPONSES, content=content, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param, error
    assert said in error["message"]
    assert len(dispatcher.requests) == n_before


async def test_input_and_model_are_required(http: httpx.AsyncClient) -> None:
    for name in ("input", "model"):
        reply = await http.post(RESPONSES, json={key: value for key, value in asking().items() if key != name})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
    unknown = await http.post(RESPONSES, json=asking(model="gpt-4"))
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


# fields, what the replica is asked for, its value
HONOURED: list[tuple[Fields, str, object]] = [
    ({"max_output_tokens": 7}, "max_tokens", 7),
    ({"temperature": 0.5}, "temperature", 0.5),
    ({"top_p": 0.5}, "top_p", 0.5),
    ({"top_k": 3}, "top_k", 3),
    ({"min_p": 0.25}, "min_p", 0.25),
    ({"seed": 7}, "seed", 7),
    ({"presence_penalty": 1.0}, "presence_penalty", 1.0),
    ({"frequency_penalty": 1.0}, "frequency_penalty", 1.0),
    ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
    ({"logit_bias": {"5": 1}}, "logit_bias", ((5, 1.0),)),
    ({"allowed_token_ids": [5]}, "allowed_token_ids", (5,)),
    ({"min_tokens": 2}, "min_tokens", 2),
    ({"ignore_eos": True, "stop_token_ids": [9]}, "stop_token_ids", (9,)),
    ({"include": ["message.output_text.logprobs"]}, "logprobs", 0),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, "logprobs", 3),
    ({"include": [], "top_logprobs": 0}, "logprobs", None),
]


@pytest.mark.parametrize(("fields", "name", "expected"), HONOURED, ids=lambda value: str(value)[:60])
async def test_a_field_reaches_the_replica(
    http: httpx.AsyncClient, dispatcher: ScriptedDispatcher, fields: Fields, name: str, expected: object
) -> None:
    assert (await http.post(RESPONSES, json=asking(**fields))).status_code == 200
    assert getattr(dispatcher.requests[-1].params, name) == expected


async def test_priority_and_cache_salt_reach_the_replica(
    http: httpx.AsyncClient, dispatcher: ScriptedDispatcher
) -> None:
    await http.post(RESPONSES, json=asking(priority=-3, cache_salt="s", timeout_s=60))
    request = dispatcher.requests[-1]
    assert request.priority == -3
    assert "s" in request.cache_salt
    assert request.timeout_s is not None


@pytest.mark.parametrize(
    ("text_format", "schema"),
    [
        ({"type": "json_object"}, '{"type": "object"}'),
        ({"type": "json_schema", "name": "n", "schema": {"type": "array"}, "strict": True}, '{"type": "array"}'),
    ],
)
async def test_a_format_reaches_the_replica_as_a_grammar_and_is_repeated(
    http: httpx.AsyncClient, dispatcher: ScriptedDispatcher, text_format: Fields, schema: str
) -> None:
    reply = await http.post(RESPONSES, json=asking(text={"format": text_format}))
    assert reply.json()["text"]["format"] == text_format
    grammar = dispatcher.requests[-1].params.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.text) == (GrammarKind.JSON_SCHEMA, schema)


async def test_fields_that_ask_for_what_happens_anyway_are_accepted(http: httpx.AsyncClient) -> None:
    nothing = dict.fromkeys(
        ("previous_response_id", "conversation", "prompt", "reasoning", "max_tool_calls", "safety_identifier")
    )
    fields: Fields = {"store": False, "background": False, "truncation": "disabled", "service_tier": "auto"}
    fields |= {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "tools": [], "tool_choice": "auto"}
    fields |= {"stream": True, "stream_options": {"include_obfuscation": False}}
    assert (await http.post(RESPONSES, json=asking(**fields, **nothing))).status_code == 200


async def test_unknown_fields_are_listed_in_a_header_where_they_are_ignored(text: ModelText) -> None:
    chosen = settings(ignores_unknown_fields=True)
    async with served(text, ScriptedDispatcher(["Hi"]), chosen) as url, httpx.AsyncClient(base_url=url) as client:
        part = {"type": "input_text", "text": "hi", "detail": "low"}
        fields = _item(role="user", content=[part], mood=1)
        fields |= {"n": 1, **_format(type="json_schema", name="n", schema={}, shape=1)}
        reply = await client.post(RESPONSES, json={"model": MODEL, **fields})
    assert reply.status_code == 200
    assert set(reply.headers["x-bakehouse-ignored-fields"].split(", ")) == {
        "input[0].mood",
        "input[0].content[0].detail",
        "n",
        "text.format.shape",
    }
