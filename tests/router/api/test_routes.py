"""The routes beside generation, and what holds for all: methods, content types, headers, CORS, keys."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from bakehouse_router.api.http import build_api
from bakehouse_router.api.reading import IGNORED_FIELDS_HEADER, TIMEOUT_HEADER
from bakehouse_router.console.pages import CONSOLE_PATHS
from bakehouse_router.gateway import Gateway
from bakehouse_router.keys import KeyRing
from bakehouse_router.settings import GatewaySettings
from bakehouse_router.text.model_text import ModelText
from gateways import END, END_ID, MODEL, VOCABULARY_SIZE, ScriptedDispatcher, ids_of, served, settings
from starlette.types import Message
from virtual_time import let_pass

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ORIGIN = "https://page.example"
KEY = "sk-alice-0123456789abcdef"
MESSAGES = [{"role": "user", "content": "hi"}]

Fields = dict[str, object]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def dispatcher() -> ScriptedDispatcher:
    return ScriptedDispatcher(["Hi"])


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(text: ModelText, dispatcher: ScriptedDispatcher) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with served(text, dispatcher) as url, httpx.AsyncClient(base_url=url, timeout=30) as http:
        yield http


def _in_process(text: ModelText, gateway_settings: GatewaySettings) -> httpx.AsyncClient:
    app = build_api(Gateway(gateway_settings, ScriptedDispatcher(["Hi"]), text))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


def _chat(**fields: object) -> Fields:
    return {"model": MODEL, "messages": MESSAGES, **fields}


def _completion(**fields: object) -> Fields:
    return {"model": MODEL, "prompt": "hi", **fields}


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_a_text_is_tokenized_as_a_prompt_is(client: httpx.AsyncClient, prefix: str) -> None:
    reply = await client.post(f"{prefix}/tokenize", json={"model": MODEL, "prompt": "hi" + END})
    token_ids = [0, *ids_of("hi"), END_ID]
    assert reply.json() == {
        "count": len(token_ids),
        "max_model_len": 512,
        "tokens": token_ids,
        "token_strs": None,
    }


async def test_special_tokens_can_be_left_out_and_tokens_shown(client: httpx.AsyncClient) -> None:
    body = {"prompt": "ď", "add_special_tokens": False, "return_token_strs": True}
    reply = (await client.post("/tokenize", json=body)).json()
    assert reply["tokens"] == list(ids_of("ď"))
    assert reply["token_strs"] == ["\ufffd", "\ufffd"]


async def test_a_conversation_is_tokenized_as_the_template_writes_it(
    client: httpx.AsyncClient, text: ModelText
) -> None:
    reply = (await client.post("/tokenize", json={"messages": MESSAGES})).json()
    ended = (await client.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False})).json()
    usage = (await client.post(CHAT, json=_chat())).json()["usage"]
    assert reply["count"] == len(reply["tokens"]) == usage["prompt_tokens"]
    assert reply["tokens"][: ended["count"]] == ended["tokens"]
    assert ended["count"] < reply["count"]


async def test_ids_are_detokenized_without_special_tokens(client: httpx.AsyncClient) -> None:
    reply = await client.post("/detokenize", json={"tokens": [0, *ids_of("grüß"), END_ID]})
    assert reply.json() == {"prompt": "grüß"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "gpt-4"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "a" * 10_000}, 400, "prompt"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [VOCABULARY_SIZE]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "gpt-4"}, 404, "model"),
    ],
)
async def test_what_cannot_be_tokenized_is_refused_by_name(
    client: httpx.AsyncClient, path: str, body: Fields, status: int, param: str
) -> None:
    reply = await client.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", f"/v1/models/{MODEL}", "/openapi.json"])
async def test_what_can_be_read_can_be_asked_for_without_its_body(client: httpx.AsyncClient, path: str) -> None:
    reply = await client.head(path)
    assert (reply.status_code, reply.content) == (200, b"")


async def test_a_wrong_method_is_told_the_right_ones(client: httpx.AsyncClient) -> None:
    reply = await client.get(CHAT)
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
    assert reply.json()["error"]["code"] == "method_not_allowed"
    assert (await client.head("/v1/nothing")).status_code == 404


@pytest.mark.parametrize(
    "told", [None, "application/json", "Application/JSON; charset=utf-8", "application/x+json"]
)
async def test_json_is_taken_under_its_names_and_without_one(client: httpx.AsyncClient, told: str | None) -> None:
    headers = {} if told is None else {"content-type": told}
    reply = await client.post(COMPLETIONS, content=b'{"model": "tiny", "prompt": "hi"}', headers=headers)
    assert reply.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-encoding": "gzip"},
        {"origin": "https://evil.example"},  # bytes without a type, which a page may send to any address
    ],
)
async def test_anything_else_is_415(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    reply = await client.post(COMPLETIONS, content=b'{"model": "tiny", "prompt": "hi"}', headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_media_type")


async def test_a_time_limit_in_a_header_reaches_the_replica(
    client: httpx.AsyncClient, dispatcher: ScriptedDispatcher
) -> None:
    await client.post(COMPLETIONS, json=_completion(timeout_s=50), headers={TIMEOUT_HEADER: "20.5"})
    timeout_s = dispatcher.requests[-1].timeout_s
    assert timeout_s is not None
    assert 10 < timeout_s <= 20.5


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "1e3", "1_0", "", "x", "86401", "1,2", "9" * 99])
async def test_a_time_limit_that_is_none_is_refused(client: httpx.AsyncClient, given: str) -> None:
    reply = await client.post(COMPLETIONS, json=_completion(), headers={TIMEOUT_HEADER: given})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, TIMEOUT_HEADER)


async def test_two_time_limits_in_headers_are_refused(client: httpx.AsyncClient) -> None:
    reply = await client.post(
        COMPLETIONS, json=_completion(), headers=[(TIMEOUT_HEADER, "5"), (TIMEOUT_HEADER, "6")]
    )
    assert reply.status_code == 400


async def test_a_time_limit_in_a_header_covers_the_arrival_of_the_body(text: ModelText) -> None:
    async with served(text, ScriptedDispatcher()) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n{TIMEOUT_HEADER}: 0.05\r\n\r\n{{"
        writer.write(head.encode())
        status = await asyncio.wait_for(reader.readline(), 60)
        writer.close()
    assert status.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_deadline_before_the_first_token_is_408(text: ModelText, is_streamed: bool) -> None:
    dispatcher = ScriptedDispatcher([asyncio.Event()])
    async with served(text, dispatcher) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        asking = asyncio.create_task(http.post(CHAT, json=_chat(timeout_s=30, stream=is_streamed)))
        while not dispatcher.n_open:
            await asyncio.sleep(0)
        let_pass(30)
        reply = await asking
        await asyncio.wait_for(dispatcher.closed.wait(), 60)
    assert (reply.status_code, reply.json()["error"]["code"]) == (408, "deadline_exceeded")


async def test_a_deadline_after_the_first_token_is_an_event(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher(["Hi", asyncio.Event()])
    frames = []
    async with (
        served(text, dispatcher) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
        http.stream("POST", CHAT, json=_chat(timeout_s=30, stream=True)) as reply,
    ):
        async for line in reply.aiter_lines():
            frames += [line] if line else []
            if '"Hi"' in line:
                let_pass(30)
    assert reply.status_code == 200
    assert '"deadline_exceeded"' in frames[-2]
    assert frames[-1] == "data: [DONE]"


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_ignored_fields_are_listed_where_that_is_configured(text: ModelText, is_streamed: bool) -> None:
    tolerant = settings(ignores_unknown_fields=True)
    body = _chat(stream=is_streamed, mood="good", **{"a, b\r\nx: é": 1}, messages=[{**MESSAGES[0], "x": 1}])
    async with _in_process(text, tolerant) as client:
        told = await client.post(CHAT, json=body)
        many = await client.post(CHAT, json=_chat(**{f"field{index}": 1 for index in range(40)}))
        none = await client.post(CHAT, json=_chat())
    assert told.status_code == 200
    names = told.headers[IGNORED_FIELDS_HEADER].split(", ")
    assert sorted(names) == ["a%2C%20b%0D%0Ax%3A%20%C3%A9", "messages[0].x", "mood"]
    assert many.headers[IGNORED_FIELDS_HEADER].endswith(", and 8 more")
    assert IGNORED_FIELDS_HEADER not in none.headers


async def test_web_pages_of_the_configured_origins_may_call(text: ModelText) -> None:
    asked = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    async with _in_process(text, GatewaySettings(served_name=MODEL, cors_origins=(ORIGIN,))) as client:
        allowed = await client.options(CHAT, headers=asked)
        answer = await client.post(CHAT, json=_chat(), headers={"origin": ORIGIN})
        refusal = await client.post(CHAT, json=_chat(n=0), headers={"origin": ORIGIN})
        other = await client.options(CHAT, headers={**asked, "origin": "https://evil.example"})
    assert allowed.status_code == 200
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    for reply in (allowed, answer, refusal):
        assert reply.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in other.headers


async def test_no_web_page_may_call_unless_configured(client: httpx.AsyncClient) -> None:
    asked = {"origin": ORIGIN, "access-control-request-method": "POST"}
    reply = await client.options(CHAT, headers=asked)
    assert reply.status_code == 405
    answer = await client.post(CHAT, json=_chat(), headers={"origin": ORIGIN})
    assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.fixture
def keys_path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(f"tenants:\n  alice:\n    keys: ['{KEY}']\n")
    path.chmod(0o600)
    return path


async def test_c29_every_route_but_health_readiness_and_the_static_page_asks_for_a_key(
    text: ModelText, keys_path: Path
) -> None:
    app = build_api(Gateway(settings(), ScriptedDispatcher(), text), keys=KeyRing(keys_path))
    mounted = {
        (method, route.path.replace("{name:path}", MODEL))  # type: ignore[attr-defined]
        for route in app.routes
        for method in route.methods  # type: ignore[attr-defined]
    }
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        for method, path in {*mounted, ("GET", "/nothing"), ("POST", "/health/"), ("OPTIONS", CHAT)}:
            reply = await client.request(method, path)
            assert (reply.status_code == 401) == (path not in {"/health", "/ready", *CONSOLE_PATHS}), (
                method,
                path,
            )
        refusal = await client.get("/v1/models")
    assert refusal.json()["error"]["code"] == "invalid_api_key"
    assert refusal.headers["www-authenticate"] == "Bearer"
    assert refusal.headers["x-request-id"]


@pytest.mark.parametrize("is_open", [False, True])
async def test_c29_metrics_ask_for_a_key_unless_they_are_opened(
    text: ModelText, keys_path: Path, is_open: bool
) -> None:
    gateway = Gateway(GatewaySettings(served_name=MODEL, opens_metrics=is_open), ScriptedDispatcher(), text)
    app = build_api(gateway, keys=KeyRing(keys_path))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        assert (await client.get("/metrics")).status_code == (200 if is_open else 401)
        assert (await client.get("/v1/models")).status_code == 401


async def test_the_key_names_the_tenant_of_a_call(text: ModelText, keys_path: Path) -> None:
    dispatcher = ScriptedDispatcher(["Hi"])
    app = build_api(Gateway(settings(), dispatcher, text), keys=KeyRing(keys_path))
    headers = {"authorization": f"Bearer {KEY}"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as client:
        assert (await client.post(CHAT, json=_chat())).status_code == 200
    assert dispatcher.requests[0].tenant == "alice"


async def test_a_websocket_without_a_key_is_closed(text: ModelText, keys_path: Path) -> None:
    app = build_api(Gateway(settings(), ScriptedDispatcher(), text), keys=KeyRing(keys_path))
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    await app({"type": "websocket", "path": CHAT, "headers": []}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]
