"""Routes around generation (health, readiness, models), request ids, and clients that go away."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest
from bakehouse_replica.core.errors import EngineDead
from bakehouse_replica.core.types import StepPlan
from bakehouse_replica.engine import Engine
from bakehouse_router.api.http import build_api
from bakehouse_router.gateway import Gateway
from bakehouse_router.text.model_text import ModelText
from engines import WAIT_S, Gate
from gateways import MODEL, ScriptedDispatcher, fake_engine, served, settings, status, tiny_card

CHAT = "/v1/chat/completions"
WITHIN_S = 0.5
STEP_S = 0.01

Fields = dict[str, object]


def _chat(**fields: object) -> Fields:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


@asynccontextmanager
async def _client(
    text: ModelText, dispatcher: ScriptedDispatcher | Engine
) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with (
        served(text, dispatcher, settings()) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        yield http


async def test_health_is_200_while_one_replica_serves_and_names_the_others(text: ModelText) -> None:
    replicas = (status(tiny_card("a")), status(tiny_card("b"), "its engine has died"))
    async with _client(text, ScriptedDispatcher(replicas=replicas)) as client:
        reply = await client.get("/health")
    assert reply.status_code == 200
    assert reply.json()["status"] == "ok"
    replicas_told = [(told["id"], told["serves"], told["problem"]) for told in reply.json()["replicas"]]
    assert replicas_told == [("a", True, None), ("b", False, "its engine has died")]
    assert reply.json()["replicas"][0]["load"]["n_free_blocks"] == tiny_card().n_blocks


@pytest.mark.parametrize("replicas", [(), (status(tiny_card("b"), "its engine has died"),)])
async def test_health_is_503_when_none_serves(text: ModelText, replicas: tuple[()]) -> None:
    async with _client(text, ScriptedDispatcher(replicas=replicas)) as client:
        reply = await client.get("/health")
    assert (reply.status_code, reply.json()["status"]) == (503, "unavailable")


async def test_a_request_while_none_serves_is_503_with_retry_after(text: ModelText) -> None:
    replicas = (status(tiny_card("b"), "its engine has died"),)
    async with _client(text, ScriptedDispatcher(replicas=replicas)) as client:
        reply = await client.post(CHAT, json=_chat())
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert "its engine has died" in reply.json()["error"]["message"]


async def test_ready_asks_the_model_once(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher(["x"])
    async with _client(text, dispatcher) as client:
        replies = await asyncio.gather(*(client.get("/ready") for _ in range(4)))
        assert [reply.status_code for reply in replies] == [200] * 4
        assert len(dispatcher.requests) == 1
        assert dispatcher.requests[0].params.max_tokens == 1
        dispatcher.replicas = ()
        assert (await client.get("/ready")).status_code == 503


async def test_ready_is_503_until_the_model_answers(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher([EngineDead("no weights")])
    async with _client(text, dispatcher) as client:
        assert (await client.get("/ready")).status_code == 503
        dispatcher.script = ["x"]
        assert (await client.get("/ready")).status_code == 200


async def test_models_lists_the_served_name_with_its_context(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher()
    async with _client(text, dispatcher) as client:
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert (await client.get(f"/v1/models/{MODEL}")).json() == model
        dispatcher.replicas = ()
        (waiting,) = (await client.get("/v1/models")).json()["data"]
    assert model["id"] == MODEL
    assert (model["object"], model["owned_by"], model["max_model_len"]) == ("model", "bakehouse", 512)
    assert waiting["max_model_len"] is None


async def test_the_model_answers_to_its_served_name_and_to_its_source(text: ModelText) -> None:
    async with _client(text, ScriptedDispatcher(["x"])) as client:
        statuses = [
            (await client.post(CHAT, json=_chat(model=name))).status_code for name in (MODEL, "smollm2", "x")
        ]
    assert statuses == [200, 200, 404]


@pytest.mark.parametrize("given", ["abc-123", "x" * 128])
async def test_a_sane_request_id_is_kept(text: ModelText, given: str) -> None:
    async with _client(text, ScriptedDispatcher(["x"])) as client:
        replies = [
            await client.post(CHAT, json=_chat(), headers={"x-request-id": given}),
            await client.get("/nothing", headers={"x-request-id": given}),
        ]
    assert [reply.headers["x-request-id"] for reply in replies] == [given] * 2


@pytest.mark.parametrize("given", [None, "", "x" * 129, "caf\u00e9", "tab\there"])
async def test_any_other_request_id_is_replaced(text: ModelText, given: str | None) -> None:
    async with _client(text, ScriptedDispatcher(["x"])) as client:
        headers = [] if given is None else [(b"x-request-id", given.encode())]
        replies = [await client.post(CHAT, json=_chat(), headers=headers) for _ in range(2)]
    ids = {reply.headers["x-request-id"] for reply in replies}
    assert len(ids) == 2
    assert all(request_id.startswith("req-") for request_id in ids)


async def test_behind_a_server_that_tells_the_request_id_it_is_not_told_twice(text: ModelText) -> None:
    app = build_api(Gateway(settings(), ScriptedDispatcher(), text), tells_request_id=False)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        assert "x-request-id" not in (await client.get("/health")).headers


async def test_equal_request_ids_at_once_are_separate_calls(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher(["x"])
    async with _client(text, dispatcher) as client:
        await asyncio.gather(
            *(client.post(CHAT, json=_chat(), headers={"x-request-id": "same"}) for _ in range(3))
        )
    assert len({request.request_id for request in dispatcher.requests}) == 3


async def _n_held(engine: Engine) -> int:
    ((replica),) = await engine.statuses()
    return replica.load.n_held_blocks


async def _steps_until(engine: Engine, gate: Gate, *, is_held: bool) -> int:
    """How many steps it takes until the engine tells that it holds blocks, or none. It makes one every 10 ms.

    So 50 of them are 500 ms, and more where a machine is too busy for that: then this loop is, too, which hears of
    clients that go.
    """
    n_before = gate.n_steps
    async with asyncio.timeout(WAIT_S):
        while (await _n_held(engine) > 0) != is_held:
            gate.allow(1)
            await asyncio.sleep(STEP_S)
    return gate.n_steps - n_before


async def test_c45_blocks_are_free_within_500_ms_of_a_stream_being_dropped(text: ModelText) -> None:
    gate = Gate(1)
    async with fake_engine(before_step=gate.before_step) as engine, _client(text, engine) as client:
        body = _chat(stream=True, max_tokens=400, ignore_eos=True)
        async with client.stream("POST", CHAT, json=body) as reply:
            lines = reply.aiter_lines()  # dropping this iterator would drop the connection
            async for line in lines:
                if "content" in line:
                    break
            await _steps_until(engine, gate, is_held=True)
        assert await _steps_until(engine, gate, is_held=False) * STEP_S <= WITHIN_S
        gate.open()


async def test_c45_blocks_are_free_within_500_ms_of_a_waiting_client_being_gone(text: ModelText) -> None:
    gate = Gate()
    async with fake_engine(before_step=gate.before_step) as engine, _client(text, engine) as client:
        request = asyncio.create_task(client.post(CHAT, json=_chat(max_tokens=400, ignore_eos=True)))
        await _steps_until(engine, gate, is_held=True)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        assert await _steps_until(engine, gate, is_held=False) * STEP_S <= WITHIN_S
        gate.open()


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_client_that_goes_before_the_first_token_cancels_its_request(
    text: ModelText, is_streamed: bool
) -> None:
    never, dispatcher = asyncio.Event(), ScriptedDispatcher()
    dispatcher.script = [never]
    async with _client(text, dispatcher) as client:
        request = asyncio.create_task(client.post(CHAT, json=_chat(stream=is_streamed)))
        async with asyncio.timeout(WAIT_S):
            while not dispatcher.n_open:
                await asyncio.sleep(STEP_S)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            await dispatcher.closed.wait()
    assert dispatcher.n_open == 0


async def test_c48_an_engine_that_dies_turns_health_503_and_ends_open_streams(text: ModelText) -> None:
    is_broken = threading.Event()

    def break_when_told(plan: StepPlan) -> None:
        if is_broken.wait(STEP_S):
            raise RuntimeError("the device is gone")

    async with (
        fake_engine(before_step=break_when_told) as engine,
        _client(text, engine) as client,
        AsyncExitStack() as streams,
    ):
        assert (await client.get("/health")).status_code == 200
        body = _chat(stream=True, max_tokens=400, ignore_eos=True)
        begun = [await streams.enter_async_context(client.stream("POST", CHAT, json=body)) for _ in range(3)]
        is_broken.set()
        for reply in begun:
            assert reply.status_code == 200
            frames = [line async for line in reply.aiter_lines() if line]
            assert '"engine_dead"' in frames[-2]
            assert frames[-1] == "data: [DONE]"
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/ready")).status_code == 503
        assert (await client.post(CHAT, json=_chat())).status_code == 503
