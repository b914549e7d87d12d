"""What each tenant has used of a gateway: over HTTP, each its own, and as series; nothing gets lost on the way."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from bakehouse_replica.core.errors import EngineDead
from bakehouse_replica.core.metric_table import (
    KV_BLOCK_SECONDS,
    MAX_TENANT_SERIES,
    OTHER_TENANTS,
    OUTCOMES,
    TENANT_BLOCK_SECONDS,
    TENANT_REQUESTS,
)
from bakehouse_replica.core.story import ToldStory
from bakehouse_replica.core.types import Cost, Delivery, FinishReason, ReplicaStatus, Request, TokenDelta
from bakehouse_replica.engine import Engine
from bakehouse_router.api.http import build_api
from bakehouse_router.attempts import Attempts
from bakehouse_router.dispatch import Dispatcher
from bakehouse_router.gateway import Gateway
from bakehouse_router.generation import RequestDispatcher
from bakehouse_router.keys import KeyRing
from bakehouse_router.metrics import GatewayMetrics
from bakehouse_router.settings import GatewaySettings
from bakehouse_router.subscription_client import SubscriptionClient
from bakehouse_router.tenants import Tenants
from bakehouse_router.text.model_text import ModelText
from engines import WAIT_S, Gate, request
from gateways import MODEL, completion, fake_engine, status, tiny_card
from local_calls import LocalCalls, LocalReplica
from prometheus_client.parser import text_string_to_metric_families

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789ab"
ODD = 'Zoë "the \\ baker" 🥖'
COMPLETIONS = "/v1/completions"
COST = Cost(block_seconds=2.5, computed_tokens=3, cached_tokens=4, recomputed_tokens=1, generated_tokens=6)
Samples = dict[tuple[str, ...], float]


@pytest.fixture(autouse=True)
async def _in_time() -> AsyncIterator[None]:
    async with asyncio.timeout(WAIT_S):
        yield


def keys_file(folder: Path, **tenants: str) -> Path:
    path = folder / "keys.yaml"
    path.write_text(
        json.dumps({"tenants": {name: {"keys": [key]} for name, key in tenants.items()}}, ensure_ascii=False)
    )
    return path


@asynccontextmanager
async def serving(
    text: ModelText, dispatcher: RequestDispatcher, keys: Path | None, *, opens_metrics: bool = False
) -> AsyncGenerator[httpx.AsyncClient, None]:
    settings = GatewaySettings(served_name=MODEL, keys_path=keys, opens_metrics=opens_metrics)
    app = build_api(Gateway(settings, dispatcher, text), keys=None if keys is None else KeyRing(keys))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        yield client


async def get(client: httpx.AsyncClient, path: str, key: str | None = None) -> httpx.Response:
    reply = await client.get(path, headers={} if key is None else {"authorization": f"Bearer {key}"})
    assert reply.status_code == 200, reply.text
    return reply


async def complete(client: httpx.AsyncClient, key: str | None = None, **fields: Any) -> None:
    reply = await client.post(
        COMPLETIONS,
        json={"model": MODEL, "prompt": "x" * 40, "max_tokens": 5, **fields},
        headers={} if key is None else {"authorization": f"Bearer {key}"},
    )
    assert reply.status_code == 200, reply.text


def by_tenant(exposition: str) -> Samples:
    """The series by tenant: name, tenant, and the other label's value."""
    return {
        (
            sample.name.removeprefix("bakehouse_tenant_"),
            sample.labels["tenant"],
            *(value for name, value in sample.labels.items() if name != "tenant"),
        ): sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if "tenant" in sample.labels
    }


def held(engine: Engine) -> float:
    """Block-seconds that the replica's blocks have been held, by its own account."""
    (found,) = (
        series.value
        for series in engine.series
        if (series.name, series.labels) == (KV_BLOCK_SECONDS.name, ("held",))
    )
    assert isinstance(found, float)
    return found


async def test_each_of_two_tenants_sees_its_own_use_over_http_and_together_they_pay_for_all(
    text: ModelText, tmp_path: Path
) -> None:
    async with (
        fake_engine() as engine,
        serving(text, Dispatcher(engine), keys_file(tmp_path, alice=ALICE, bob=BOB)) as client,
    ):
        await complete(client, ALICE)
        await complete(client, ALICE, n=3, stream=True)
        await complete(client, BOB, prompt=["y" * 40, "z" * 40])
        used = {key: (await get(client, "/v1/usage", key)).json() for key in (ALICE, BOB)}
        shown = {key: by_tenant((await get(client, "/metrics", key)).text) for key in (ALICE, BOB)}
        await engine.drain(WAIT_S)
        all_held = held(engine)

    alice, bob = used[ALICE], used[BOB]
    assert (alice["object"], alice["tenant"], bob["tenant"]) == ("usage", "alice", "bob")
    assert (alice["gateway"], alice["since"]) == (bob["gateway"], bob["since"])
    assert (alice["requests"], bob["requests"]) == ({"complete": 2}, {"complete": 1})
    assert (alice["generated_tokens"], bob["generated_tokens"]) == (20, 10)
    # 41 tokens, of which the two full blocks of 16 are found the second time.
    assert alice["prompt_tokens"] == {"computed": 41 + 9, "cached": 32, "recomputed": 0}
    assert bob["prompt_tokens"] == {"computed": 82, "cached": 0, "recomputed": 0}
    assert alice["block_seconds"] > 0 < bob["block_seconds"]
    assert alice["block_seconds"] + bob["block_seconds"] == pytest.approx(all_held)

    for key, name in ((ALICE, "alice"), (BOB, "bob")):
        assert {labels[1] for labels in shown[key]} == {name}, "nothing of another tenant's, its name neither"
        assert shown[key]["block_seconds_total", name] == used[key]["block_seconds"]
        assert shown[key]["generated_tokens_total", name] == used[key]["generated_tokens"]
        assert shown[key]["requests_total", name, "complete"] == used[key]["requests"]["complete"]
        assert shown[key]["prompt_tokens_total", name, "computed"] == used[key]["prompt_tokens"]["computed"]


async def test_metrics_that_need_no_key_show_all_tenants_and_odd_names_come_back_as_they_are(
    text: ModelText, tmp_path: Path
) -> None:
    keys = keys_file(tmp_path, **{ODD: ALICE, "bob": BOB})
    async with (
        fake_engine() as engine,
        serving(text, Dispatcher(engine), keys, opens_metrics=True) as client,
    ):
        await complete(client, ALICE)
        await complete(client, BOB)
        shown = by_tenant((await get(client, "/metrics")).text)
        used = (await get(client, "/v1/usage", ALICE)).json()
    assert {labels[1] for labels in shown} == {ODD, "bob"}
    assert used["tenant"] == ODD
    assert shown["requests_total", ODD, "complete"] == 1


async def test_without_keys_there_is_one_tenant_without_a_name(text: ModelText) -> None:
    async with fake_engine() as engine, serving(text, Dispatcher(engine), None) as client:
        before = (await get(client, "/v1/usage")).json()
        await complete(client)
        after, shown = (await get(client, "/v1/usage")).json(), by_tenant((await get(client, "/metrics")).text)
    assert (before["requests"], before["block_seconds"]) == ({}, 0)
    assert (after["tenant"], after["requests"]) == ("", {"complete": 1})
    assert shown["generated_tokens_total", ""] == 5
    assert len(shown) == 1 + 3 + 1 + len(OUTCOMES), "all series of a tenant stand from its first request on"


async def test_usage_asks_for_a_key(text: ModelText, tmp_path: Path) -> None:
    keys = keys_file(tmp_path, alice=ALICE)
    async with fake_engine() as engine, serving(text, Dispatcher(engine), keys, opens_metrics=True) as client:
        assert (await client.get("/v1/usage")).status_code == 401


async def test_a_tenant_that_leaves_the_file_keeps_its_series(text: ModelText, tmp_path: Path) -> None:
    async with (
        fake_engine() as engine,
        serving(text, Dispatcher(engine), keys_file(tmp_path, alice=ALICE), opens_metrics=True) as client,
    ):
        await complete(client, ALICE)
        keys_file(tmp_path, robert=BOB)
        assert (await get(client, "/v1/usage", BOB)).json()["requests"] == {}
        shown = by_tenant((await get(client, "/metrics")).text)
    assert shown["requests_total", "alice", "complete"] == 1


def test_tenants_beyond_the_limit_share_series_but_not_their_totals() -> None:
    tenants = Tenants()
    n_beyond = 5
    for index in range(MAX_TENANT_SERIES + n_beyond):
        tenants.used_by(f"t{index}").pay(COST)
        tenants.used_by(f"t{index}").outcomes["complete"] += 1
    costs = {
        series.labels: series.value for series in tenants.series() if series.name == TENANT_BLOCK_SECONDS.name
    }
    assert len(costs) == MAX_TENANT_SERIES + 1
    assert (costs["t0",], costs[OTHER_TENANTS,]) == (2.5, n_beyond * 2.5)
    requests = {series.labels: series.value for series in tenants.series() if series.name == TENANT_REQUESTS.name}
    assert requests[OTHER_TENANTS, "complete"] == n_beyond

    beyond = f"t{MAX_TENANT_SERIES}"
    assert tenants.told(beyond).block_seconds == 2.5
    assert tenants.series(beyond) == () == tenants.series(OTHER_TENANTS), "others' sums are nobody's to see"
    assert {series.labels[0] for series in tenants.series("t0")} == {"t0"}


def test_a_tenant_called_as_the_shared_series_are_is_counted_among_them() -> None:
    tenants = Tenants()
    tenants.used_by(OTHER_TENANTS).pay(COST)
    for index in range(MAX_TENANT_SERIES):
        tenants.used_by(f"t{index}").pay(COST)
    costs = {
        series.labels: series.value for series in tenants.series() if series.name == TENANT_BLOCK_SECONDS.name
    }
    assert costs[OTHER_TENANTS,] == 2 * 2.5
    assert tenants.series(OTHER_TENANTS) == ()


@dataclass
class TwoReplicas:
    """A client whose first replica is lost after a token, and whose others end what is asked of them."""

    n_calls: int = 0

    async def generate(self, request: Request) -> AsyncGenerator[Delivery, None]:
        self.n_calls += 1
        start = len(request.prior_output)
        if self.n_calls == 1:
            deltas = tuple(_delta(request, choice, 0) for choice in range(request.params.n))
            yield Delivery(replica_id="first", deltas=deltas)
            raise EngineDead("lost")
        yield Delivery(replica_id="second", deltas=(_delta(request, 0, start, FinishReason.LENGTH, COST),))

    async def statuses(self) -> tuple[ReplicaStatus, ...]:
        return (status(tiny_card()),)

    async def explain(self, request_ids: Sequence[str]) -> tuple[ToldStory, ...]:
        return ()

    async def close(self) -> None: ...


def _delta(
    request: Request, choice: int, start: int, finish: FinishReason | None = None, cost: Cost | None = None
) -> TokenDelta:
    return TokenDelta(
        request_id=request.request_id, choice=choice, start=start, token_ids=(70,), finish=finish, cost=cost
    )


@pytest.mark.parametrize("n_choices", [1, 3])
async def test_what_further_attempts_and_their_parts_cost_is_added_up(n_choices: int) -> None:
    attempts, dispatcher = Attempts(), Dispatcher(TwoReplicas())
    async with aclosing(dispatcher.stream(request("a", n=n_choices), attempts)) as deliveries:
        async for _ in deliveries:
            pass
    lost, last = attempts.made
    assert lost.cost is None, "what it cost the lost replica, nobody tells"
    assert last.cost is not None
    assert (last.cost.block_seconds, last.cost.recomputed_tokens) == (n_choices * 2.5, n_choices)


@asynccontextmanager
async def subscribed(engine: Engine, pay: Callable[[str, Cost], None]) -> AsyncGenerator[SubscriptionClient, None]:
    replica = LocalReplica(engine)
    client = SubscriptionClient(LocalCalls(replica), status_period_s=0.01, pay=pay)
    client.start()
    while not replica.subscriptions:
        await asyncio.sleep(0.01)
    try:
        yield client
    finally:
        await client.close()


@pytest.mark.parametrize("n_steps", [1, 3])
async def test_a_request_whose_reader_leaves_is_paid_for_all_the_same(n_steps: int) -> None:
    gate, paid = Gate(n_steps), asyncio.Queue[tuple[str, Cost]]()
    async with (
        fake_engine(before_step=gate.before_step) as engine,
        subscribed(engine, lambda tenant, cost: paid.put_nowait((tenant, cost))) as client,
    ):
        wanted = request("a", n=2, max_tokens=100)
        async with aclosing(client.generate(wanted)) as deliveries:
            n_tokens = 0
            while n_tokens < 2 * n_steps:
                n_tokens += sum(len(delta.token_ids) for delta in (await anext(deliveries)).deltas)
        gate.open()
        tenant, cost = await paid.get()
        await engine.drain(WAIT_S)
        assert cost.block_seconds == pytest.approx(held(engine))
        assert not client._subscriptions._left or paid.empty(), "once"
    assert (tenant, cost.computed_tokens) == ("", 5)
    assert cost.generated_tokens >= 2 * n_steps


async def test_who_leaves_with_the_end_at_hand_pays_once() -> None:
    paid: list[Cost] = []
    async with (
        fake_engine() as engine,
        subscribed(engine, lambda tenant, cost: paid.append(cost)) as client,
    ):
        async with aclosing(client.generate(request("a", max_tokens=1))) as deliveries:
            await anext(deliveries)
        await engine.drain(WAIT_S)
    assert paid == [], "the reader had it"


async def test_an_answer_that_a_stop_string_ends_is_paid_for_by_its_tenant(
    text: ModelText, tmp_path: Path
) -> None:
    metrics = GatewayMetrics()
    async with fake_engine() as engine, subscribed(engine, metrics.pay) as client:
        gateway = Gateway(GatewaySettings(served_name=MODEL), Dispatcher(client), text, metrics=metrics)
        call = completion(max_tokens=400, stops=tuple("aeiouAEIOU012345"), tenant="alice")
        generation = await gateway.start(call, "call-1")
        assert [pieces async for pieces in generation.pieces()]
        assert generation.finishes == (FinishReason.STOP,)
        while not metrics.tenants.told("alice").block_seconds:
            await asyncio.sleep(0.01)
        await engine.drain(WAIT_S)
        assert metrics.tenants.told("alice").block_seconds == pytest.approx(held(engine))
    assert metrics.tenants.told("alice").outcomes["complete"] == 1
    assert metrics.tenants.told("alice").computed_tokens == 3
