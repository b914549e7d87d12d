"""The description of the HTTP face: it covers every route, and its schemas fit what is sent and received."""

from collections.abc import AsyncGenerator

import httpx
import jsonschema
import pytest
import pytest_asyncio
from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_router.api.http import build_api
from bakehouse_router.api.openapi import openapi_document
from bakehouse_router.api.parse import parse_body
from bakehouse_router.api.schema import ChatBody
from bakehouse_router.console.pages import CONSOLE_PATHS
from bakehouse_router.gateway import Gateway
from bakehouse_router.text.model_text import ModelText
from gateways import MODEL, ScriptedDispatcher, served, settings

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]

Fields = dict[str, object]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(text: ModelText) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with (
        served(text, ScriptedDispatcher(["Hi"])) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        yield http


def _chat(**fields: object) -> Fields:
    return {"model": MODEL, "messages": MESSAGES, **fields}


def _completion(**fields: object) -> Fields:
    return {"model": MODEL, "prompt": "hi", **fields}


async def test_the_description_covers_every_route(client: httpx.AsyncClient, text: ModelText) -> None:
    document = (await client.get("/openapi.json")).json()
    app = build_api(Gateway(settings(), ScriptedDispatcher(), text))
    mounted = {
        (method.lower(), route.path.replace(":path", ""))  # type: ignore[attr-defined]
        for route in app.routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }
    described = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert mounted - described == {("get", path) for path in ("/openapi.json", *CONSOLE_PATHS)}
    assert described <= mounted


def _schema(name: str) -> Fields:
    document = openapi_document((MODEL,))
    return {"$ref": f"#/components/schemas/{name}", "components": document["components"]}


async def test_the_described_schemas_fit_what_is_sent_and_received(client: httpx.AsyncClient) -> None:
    bodies = [("ChatBody", CHAT, _chat(stop="x", logit_bias={"5": 1}, store=False), "ChatCompletion")]
    bodies += [("CompletionBody", COMPLETIONS, _completion(prompt=["a", "b"], echo=True), "Completion")]
    bodies += [("TokenizeChatBody", "/tokenize", {"messages": MESSAGES}, "Tokens")]
    bodies += [("DetokenizeBody", "/detokenize", {"tokens": [5]}, "Text")]
    for body_schema, path, body, reply_schema in bodies:
        jsonschema.validate(body, _schema(body_schema))
        jsonschema.validate((await client.post(path, json=body)).json(), _schema(reply_schema))
    for path, reply_schema in (
        ("/v1/models", "ModelList"),
        ("/v1/replicas", "Fleet"),
        ("/health", "Health"),
        ("/ready", "Readiness"),
    ):
        jsonschema.validate((await client.get(path)).json(), _schema(reply_schema))
    jsonschema.validate((await client.get("/v1/nothing")).json(), _schema("Error"))


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "is_right"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "a"}]}, True),
        ({"role": "user", "content": None}, False),
        ({"role": "user", "content": []}, False),
        ({"role": "user", "content": "a", "tool_call_id": "c"}, False),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, True),
        ({"role": "assistant"}, False),
        ({"role": "tool", "content": "a", "tool_call_id": "c"}, True),
        ({"role": "tool", "content": "a"}, False),
    ],
)
async def test_messages_are_described_as_they_are_checked(message: Fields, is_right: bool) -> None:
    body = _chat(messages=[message])
    assert jsonschema.Draft202012Validator(_schema("ChatBody")).is_valid(body) == is_right
    try:
        parse_body(ChatBody, body)
    except InvalidRequest:
        assert not is_right
    else:
        assert is_right


@pytest.mark.parametrize("wrong", [{"temperature": "x"}, {"stop": [5]}, {"x": 1}, {"store": True}, {"n": 0}])
async def test_the_described_schemas_refuse_what_the_server_refuses(wrong: Fields) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(_chat(**wrong), _schema("ChatBody"))
