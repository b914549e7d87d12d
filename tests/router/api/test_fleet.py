"""What is told of replicas and gateway, for the console page and whoever else watches."""

import asyncio

import httpx
import jsonschema
from bakehouse_replica.core.types import StepPlan
from bakehouse_replica.engine import Engine
from bakehouse_router.api.http import build_api
from bakehouse_router.api.openapi import openapi_document
from bakehouse_router.gateway import Gateway
from bakehouse_router.text.model_text import ModelText
from gateways import MODEL, ScriptedDispatcher, fake_engine, served, settings, status, tiny_card
from scripted import until

REPLICAS, COMPLETIONS = "/v1/replicas", "/v1/completions"


async def test_every_replica_is_shown_also_one_that_is_silent(text: ModelText) -> None:
    replicas = (status(tiny_card("a")), status(tiny_card("b"), "silent for 3.0 s"))
    app = build_api(Gateway(settings(), ScriptedDispatcher(replicas=replicas), text), gateway_id="g1")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        answer = await client.get(REPLICAS)
    fleet = answer.json()
    assert [(told["id"], told["serves"], told["problem"]) for told in fleet["data"]] == [
        ("a", True, None),
        ("b", False, "silent for 3.0 s"),
    ]
    assert [told["counted"] for told in fleet["data"]] == [None, None]
    assert answer.headers["cache-control"] == "no-store"
    assert (fleet["gateway"]["id"], fleet["gateway"]["model"]) == ("g1", MODEL)


async def _fleet(http: httpx.AsyncClient) -> dict[str, dict[str, object]]:
    """The only replica's part and the gateway's."""
    reply = (await http.get(REPLICAS)).json()
    document = openapi_document((MODEL,))
    jsonschema.validate(reply, {"$ref": "#/components/schemas/Fleet", "components": document["components"]})
    (replica,) = reply["data"]
    return {"replica": replica, "load": replica["load"], "gateway": reply["gateway"]}


async def test_the_numbers_are_those_of_the_engine_while_it_runs_and_after(text: ModelText) -> None:
    steps: asyncio.Queue[StepPlan] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    may_go_on = asyncio.Event()

    def hold(plan: StepPlan) -> None:
        loop.call_soon_threadsafe(steps.put_nowait, plan)
        asyncio.run_coroutine_threadsafe(may_go_on.wait(), loop).result()

    async with (
        fake_engine(before_step=hold) as engine,
        served(text, engine) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        body = {"model": MODEL, "prompt": [5] * 20, "max_tokens": 3, "ignore_eos": True}
        answering = asyncio.create_task(http.post(COMPLETIONS, json=body))
        await asyncio.wait_for(steps.get(), 20)
        waiting = await _fleet(http)
        may_go_on.set()
        assert (await answering).status_code == 200
        await until(lambda: _has_counted(engine, 3))
        after = await _fleet(http)
    assert (waiting["gateway"]["n_open"], waiting["gateway"]["n_waiting"]) == (1, 1)
    assert waiting["gateway"]["waiting_tokens"] == 20
    assert (after["gateway"]["n_open"], after["gateway"]["n_waiting"]) == (0, 0)
    assert after["gateway"]["generated_tokens"] == 3
    blocks = [after["load"][f"n_{kind}_blocks"] for kind in ("held", "cached", "free")]
    assert blocks == [0, 1, tiny_card().n_blocks - 1]
    # 20 of the prompt; of the answer all but the last are computed on.
    assert after["replica"]["counted"] == {
        "steps": 3,
        "computed_tokens": 22,
        "preemptions": 0,
        "prefix_queried_tokens": 20,
        "prefix_hit_tokens": 0,
    }
    assert after["replica"]["max_sequences"] == tiny_card().max_sequences
    assert after["replica"]["age_s"] == 0


def _has_counted(engine: Engine, n_steps: int) -> bool:
    told = {
        series.name: series.value for series in engine._meter.status_series(engine._clock()) if not series.labels
    }
    filled = told.get("bakehouse_batch_fill_ratio")
    return filled is not None and filled.at_most[-1] == n_steps  # type: ignore[union-attr]
