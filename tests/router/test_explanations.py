"""The explanations of requests: while they run and after, for their own tenant alone, within their bounds."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import jsonschema
import pytest
from bakehouse_replica.core.errors import UnknownRequest
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.story import StoryLog, ToldStory
from bakehouse_replica.core.types import Request, StepPlan
from bakehouse_replica.engine import Engine
from bakehouse_router.api.explained import (
    FIRST_ATTEMPTS,
    LAST_ATTEMPTS,
    MAX_PARTS,
    MAX_PROMPTS,
    explanation,
    ids_without_story,
)
from bakehouse_router.api.generating import ROUTE_HEADER
from bakehouse_router.api.http import build_api
from bakehouse_router.api.openapi import openapi_document
from bakehouse_router.attempts import Attempt
from bakehouse_router.dispatch import Dispatcher
from bakehouse_router.explanations import MAX_BYTES_EACH, Explanations
from bakehouse_router.gateway import Gateway
from bakehouse_router.keys import KeyRing
from bakehouse_router.policy.pick import choose
from bakehouse_router.policy.views import OwnLoad, ReplicaView
from bakehouse_router.request_report import PromptAttempts, RequestReport
from bakehouse_router.routing import MAX_CANDIDATES, MAX_ROUTINGS, Routing, Routings
from bakehouse_router.settings import GatewaySettings
from bakehouse_router.text.model_text import ModelText
from engines import WAIT_S, Gate
from gateways import MODEL, ScriptedDispatcher, fake_engine, served, settings, tiny_card
from recording import Lines, kept_lines
from scripted import SETTINGS, saying, until
from two_replicas import two_replicas

COMPLETIONS = "/v1/completions"
KEYS = {"alice": "sk-alice-0123456789abcdef", "bob": "sk-bob-0123456789abcdef00"}
SLOTS = 32  # of the fake engine
T = TypeVar("T")


def body(**changes: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": "secret words", "max_tokens": 3, **changes}


def explain_path(request_id: str) -> str:
    return f"/v1/requests/{quote(request_id, safe='')}/explain"


async def explained(http: httpx.AsyncClient, request_id: str, **headers: str) -> dict[str, Any]:
    """The explanation, after checking that it is as it is described."""
    reply = await http.get(explain_path(request_id), headers=headers)
    assert reply.status_code == 200, reply.text
    document = openapi_document((MODEL,))
    jsonschema.validate(
        reply.json(), {"$ref": "#/components/schemas/Explanation", "components": document["components"]}
    )
    told: dict[str, Any] = reply.json()
    return told


def only_part(told: dict[str, Any]) -> dict[str, Any]:
    ((part,),) = [
        [part for attempt in prompt["attempts"] for part in attempt["parts"]] for prompt in told["prompts"]
    ]
    assert isinstance(part, dict)
    return part


@asynccontextmanager
async def asking(url: str) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        yield http


class Steps(Gate):
    """Holds each step until somebody waits for what comes after it."""

    def __init__(self) -> None:
        super().__init__()
        self.n_planned = 0

    def before_step(self, plan: StepPlan) -> None:
        self.n_planned += 1
        super().before_step(plan)

    async def planned(self, n_plans: int) -> None:
        """So many plans have been made; the step of the last one is held."""
        await until(lambda: self.n_planned >= n_plans)

    async def let_in(self, engine: Engine, task: "asyncio.Task[T]") -> "asyncio.Task[T]":
        """What the task asks of the engine has been taken, and the plan after that been made."""
        await until(lambda: not engine._commands.empty())
        n_planned = self.n_planned
        self.allow(1)
        await self.planned(n_planned + 1)
        return task


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    return kept_lines(caplog)


# --- Over HTTP ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [False, True])
async def test_a_request_that_is_over_is_explained_by_its_own_id_and_its_reply_s(
    text: ModelText, streams: bool
) -> None:
    async with fake_engine() as engine, served(text, engine) as url, asking(url) as http:
        reply = await http.post(COMPLETIONS, json=body(stream=streams), headers={"x-request-id": "mine"})
        told = await explained(http, "mine")
        assert told["reply_id"] in reply.text
        assert await explained(http, told["reply_id"]) == told
    assert (told["request_id"], told["state"], told["outcome"]) == ("mine", "ended", "complete")
    assert (told["face"], told["kind"], told["version"]) == ("http", "completion", 1)
    assert told["admission"]["decision"] == "queued"
    assert 0 <= told["admission"]["at_s"] <= told["first_token_s"] <= told["seconds"]
    part = only_part(told)
    assert (part["id"], part["routing"]) == (told["reply_id"], None)
    story = part["story"]
    assert [entry["event"] for entry in story["entries"]][-1] == "admitted"
    assert (story["replica"], story["n_prefill_chunks"], story["n_preemptions"]) == ("replica-1", 1, 0)
    assert story["ended_at_s"] <= told["seconds"]
    assert "secret" not in json.dumps(told)


async def test_a_request_that_waits_is_explained_while_it_does_and_its_sums_are_its_queue_time(
    text: ModelText, lines: Lines
) -> None:
    steps = Steps()
    chosen = GatewaySettings(served_name=MODEL, request_log="json")
    async with (
        fake_engine(before_step=steps.before_step) as engine,
        served(text, engine, chosen) as url,
        asking(url) as http,
    ):

        def post(request_id: str, **changes: object) -> "asyncio.Task[httpx.Response]":
            asked = http.post(COMPLETIONS, json=body(**changes), headers={"x-request-id": request_id})
            return asyncio.create_task(asked)

        first = post("first", n=SLOTS // 2, max_tokens=9)
        await steps.planned(1)
        second = await steps.let_in(engine, post("second", n=SLOTS // 2, max_tokens=9))
        late = await steps.let_in(engine, post("late", max_tokens=1))
        told = await (await steps.let_in(engine, asyncio.create_task(explained(http, "late"))))
        steps.open()
        await asyncio.gather(first, second, late)
        after = await explained(http, "late")
    assert (told["state"], told["outcome"], told["first_token_s"]) == ("running", None, None)
    (prompt,) = told["prompts"]
    assert prompt["attempts"][0]["state"] == "running"
    waited = only_part(told)["story"]["waited"]
    assert "no_slot" in {total["reason"] for total in waited}
    assert only_part(told)["story"]["ended_at_s"] is None

    story = only_part(after)["story"]
    line = lines.of("late")
    assert sum(total["seconds"] for total in story["waited"]) == pytest.approx(line["queue_s"], abs=2e-4)
    reasons = dict(word.split(":") for word in line["waited"])
    assert float(reasons["no_slot"]) == pytest.approx(
        next(total["seconds"] for total in story["waited"] if total["reason"] == "no_slot"), abs=1e-3
    )


async def test_of_an_answer_cut_by_a_stop_string_the_replica_is_asked_for_the_story(text: ModelText) -> None:
    async with fake_engine() as engine, served(text, engine) as url, asking(url) as http:
        whole = (await http.post(COMPLETIONS, json=body(max_tokens=40))).json()["choices"][0]["text"]
        stop = whole[2:4]
        await http.post(
            COMPLETIONS, json=body(max_tokens=400, stop=stop, ignore_eos=True), headers={"x-request-id": "cut"}
        )
        async with asyncio.timeout(WAIT_S):
            while only_part(told := await explained(http, "cut"))["story"] is None:
                await asyncio.sleep(0.01)  # the abort is on its way
    assert told["outcome"] == "complete"
    assert only_part(told)["story"]["entries"][-1]["event"] == "admitted"


async def test_a_client_that_leaves_finds_its_story_later(text: ModelText, lines: Lines) -> None:
    gate = Gate(3)
    async with (
        fake_engine(before_step=gate.before_step) as engine,
        served(text, engine) as url,
        asking(url) as http,
    ):
        asked = body(max_tokens=50, stream=True)
        async with http.stream("POST", COMPLETIONS, json=asked, headers={"x-request-id": "left"}) as reply:
            await anext(reply.aiter_lines())
        async with asyncio.timeout(WAIT_S):
            await lines.arrived()
        gate.open()
        async with asyncio.timeout(WAIT_S):
            while only_part(told := await explained(http, "left"))["story"] is None:
                await asyncio.sleep(0.01)
    assert (told["outcome"], told["state"]) == ("cancelled", "ended")


async def test_who_is_shed_and_who_is_refused_are_explained(text: ModelText) -> None:
    hold = asyncio.Event()
    chosen = settings(max_queued_requests=1)
    async with served(text, ScriptedDispatcher([hold, "ab"]), chosen) as url, asking(url) as http:
        first = asyncio.create_task(http.post(COMPLETIONS, json=body(), headers={"x-request-id": "first"}))
        while (await http.get(explain_path("first"))).status_code != 200:
            await asyncio.sleep(0.01)
        while (await explained(http, "first"))["admission"]["decision"] == "pending":
            await asyncio.sleep(0.01)
        shed = await http.post(COMPLETIONS, json=body(), headers={"x-request-id": "shed"})
        refused = await http.post(COMPLETIONS, json=body(model="other"), headers={"x-request-id": "refused"})
        assert (shed.status_code, refused.status_code) == (429, 404)
        told = await explained(http, "shed")
        assert (told["admission"]["decision"], told["outcome"]) == ("shed", "overloaded")
        told = await explained(http, "refused")
        assert (told["admission"]["decision"], told["outcome"]) == ("refused", "model_not_found")
        hold.set()
        await first


@pytest.mark.parametrize("after_tokens", [0, 1])
async def test_retries_and_resumes_are_told_with_what_was_lost(after_tokens: int) -> None:
    gate = Gate(1)
    asked = {"model": SETTINGS.served_name, "prompt": "x", "temperature": 0, "stream": True}
    async with two_replicas(saying("a", "b", "c"), raise_at=after_tokens, before_step=gate.before_step) as http:
        async with http.stream("POST", COMPLETIONS, json=asked, headers={"x-request-id": "mine"}) as reply:
            frames = reply.aiter_lines()
            await anext(frames)
            gate.open()
            assert [frame async for frame in frames][-2] == "data: [DONE]"
        told = await explained(http, "mine")
    ((lost, second),) = [prompt["attempts"] for prompt in told["prompts"]]
    assert (lost["state"], lost["loss"]) == ("lost", "the engine of this replica has failed")
    assert (second["state"], second["loss"], second["after_tokens"]) == ("ended", None, after_tokens)
    assert second["at_s"] >= lost["ended_at_s"]
    (part,) = second["parts"]
    assert part["id"] == f"{told['reply_id']}-retry1"
    assert part["story"]["entries"]


async def test_each_prompt_of_a_call_is_told_apart_and_the_first_so_many(text: ModelText) -> None:
    async with fake_engine() as engine, served(text, engine) as url, asking(url) as http:
        prompts = [f"prompt {index}" for index in range(MAX_PROMPTS + 2)]
        await http.post(COMPLETIONS, json=body(prompt=prompts), headers={"x-request-id": "many"})
        told = await explained(http, "many")
    assert [prompt["prompt"] for prompt in told["prompts"]] == list(range(MAX_PROMPTS))
    assert told["n_prompts_left_out"] == 2
    ids = [part["id"] for prompt in told["prompts"] for attempt in prompt["attempts"] for part in attempt["parts"]]
    assert ids == [f"{told['reply_id']}-{index}" for index in range(MAX_PROMPTS)]


@pytest.mark.parametrize(
    "odd", ["a/b", "a b", "a%2Fb", "?x=1", "#1", "..", "../explain", "/explain", "x" * 128, '"\\', "a/explain"]
)
async def test_odd_ids_that_a_header_can_carry_are_found(text: ModelText, odd: str) -> None:
    async with served(text, ScriptedDispatcher(["ab"])) as url, asking(url) as http:
        await http.post(COMPLETIONS, json=body(), headers={"x-request-id": odd})
        path = f"{url}/v1/requests/{quote(odd, safe='').replace('.', '%2E')}/explain"
        reply = await http.get(path)
    assert (reply.status_code, reply.json()["request_id"]) == (200, odd)


@pytest.mark.parametrize("unknown", ["nobody", "é", "\u202e", "💥", "x" * 20_000, "%00", "\x00", "", "x" * 129])
async def test_unknown_ids_are_404_in_the_envelope_and_not_quoted(text: ModelText, unknown: str) -> None:
    async with served(text, ScriptedDispatcher(["ab"])) as url, asking(url) as http:
        reply = await http.get(explain_path(unknown))
    assert reply.status_code == 404
    error = reply.json()["error"]
    assert (error["code"], error["type"]) == ("request_not_found", "invalid_request_error")
    assert "another one may know it" in error["message"]
    assert len(reply.text) < 500


async def test_bytes_that_are_no_text_are_404(text: ModelText) -> None:
    async with served(text, ScriptedDispatcher(["ab"])) as url, asking(url) as http:
        reply = await http.get(f"{url}/v1/requests/%FF%FE/explain")
        posted = await http.post(f"{url}/v1/requests/a/explain", json={})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "request_not_found")
    assert posted.status_code == 405


async def test_behind_keys_only_the_tenant_s_own_requests_are_known(text: ModelText, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(json.dumps({"tenants": {name: {"keys": [key]} for name, key in KEYS.items()}}))
    steps = Steps()
    async with fake_engine(before_step=steps.before_step) as engine:
        gateway = Gateway(settings(), Dispatcher(engine), text)
        api = build_api(gateway, keys=KeyRing(path))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=api), base_url="http://x") as http:
            alice, bob = ({"authorization": f"Bearer {KEYS[name]}"} for name in ("alice", "bob"))
            running = asyncio.create_task(
                http.post(COMPLETIONS, json=body(), headers={"x-request-id": "one", **alice})
            )
            await steps.planned(1)
            foreign = await http.get(explain_path("one"), headers=bob)
            live = await (await steps.let_in(engine, asyncio.create_task(explained(http, "one", **alice))))
            steps.open()
            reply_id = (await running).json()["id"]
            unknown = await http.get(explain_path("nobody"), headers=bob)
            assert (foreign.status_code, foreign.content) == (404, unknown.content), "as if there were none"
            for request_id in ("one", reply_id):
                assert (await explained(http, request_id, **alice))["reply_id"] == reply_id
                other = await http.get(explain_path(request_id), headers=bob)
                assert (other.status_code, other.content) == (404, unknown.content)
                assert (await http.get(explain_path(request_id))).status_code == 401
            # The same id, of another tenant, is another request, and changes nothing for the first.
            await http.post(COMPLETIONS, json=body(), headers={"x-request-id": "one", **bob})
            assert (await explained(http, "one", **alice))["reply_id"] == reply_id == live["reply_id"]
            assert (await explained(http, "one", **bob))["reply_id"] != reply_id


async def test_neighbours_are_named_by_neither_id_nor_tenant(text: ModelText, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(json.dumps({"tenants": {name: {"keys": [key]} for name, key in KEYS.items()}}))
    steps = Steps()
    async with fake_engine(before_step=steps.before_step) as engine:
        api = build_api(Gateway(settings(), Dispatcher(engine), text), keys=KeyRing(path))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=api), base_url="http://x") as http:
            alice, bob = ({"authorization": f"Bearer {KEYS[name]}"} for name in ("alice", "bob"))

            def post(request_id: str, key: dict[str, str], **changes: object) -> "asyncio.Task[httpx.Response]":
                asked = body(prompt=request_id, n=SLOTS // 2, max_tokens=9, **changes)
                headers = {"x-request-id": request_id, **key}
                return asyncio.create_task(http.post(COMPLETIONS, json=asked, headers=headers))

            mine = post("victim", alice)
            await steps.planned(1)
            urgent = [await steps.let_in(engine, post(f"urgent-{index}", bob, priority=-1)) for index in range(2)]
            steps.open()
            replies = await asyncio.gather(mine, *urgent)
            told = json.dumps(await explained(http, "victim", **alice))
    assert '"rule": "outranked"' in told
    assert '"for_priority": -1' in told
    assert "bob" not in told
    assert "urgent-" not in told
    assert not any(reply.json()["id"] in told for reply in replies[1:])


# --- Routing -----------------------------------------------------------------------------------------------------


def views(n_replicas: int) -> list[ReplicaView]:
    """Replicas of which each is busier than the one before, and the last does not serve."""
    return [
        ReplicaView(
            card=tiny_card(f"replica-{index}"),
            own=OwnLoad(n_sequences=3 * index, settled_tokens=10 * index),
            problem="the engine has failed" if index == n_replicas - 1 else None,
        )
        for index in range(n_replicas)
    ]


def routed_over(n_replicas: int) -> Callable[[str], Routing | None]:
    routings = Routings()
    asked = Request(request_id="r", prompt_ids=tuple(range(40)), params=SamplingParams(seed=1))
    routings.note("r", choose(asked, views(n_replicas), Random(1)), 1.0)
    routings.accept("r", "replica-1", 2.0)
    return lambda request_id: routings.of("r")


@pytest.mark.parametrize("streams", [False, True])
async def test_all_candidates_are_told_with_the_terms_that_were_computed_and_a_header_says_it_in_short(
    text: ModelText, streams: bool
) -> None:
    choice = choose(
        Request(request_id="r", prompt_ids=tuple(range(40)), params=SamplingParams(seed=1)), views(5), Random(1)
    )
    async with fake_engine() as engine:
        dispatcher = Dispatcher(engine, routed=routed_over(5))
        async with served(text, dispatcher) as url, asking(url) as http:
            reply = await http.post(COMPLETIONS, json=body(stream=streams), headers={"x-request-id": "mine"})
            routing = only_part(await explained(http, "mine"))["routing"]
    assert routing["candidates"] == [
        {
            "replica": candidate.replica_id,
            "cost_tokens": candidate.cost_tokens,
            "uncached_tokens": candidate.n_uncached_tokens,
            "waiting_tokens": candidate.n_waiting_tokens,
            "sequence_tokens": candidate.n_sequence_tokens,
            "shortage_tokens": candidate.n_shortage_tokens,
            "skipped": candidate.skipped,
        }
        for candidate in choice.ranked
    ]
    assert [one["replica"] for one in routing["candidates"]] == [
        "replica-0",
        "replica-1",
        "replica-2",
        "replica-3",
    ]
    assert routing["excluded"] == [{"replica": "replica-4", "reason": "does not serve: the engine has failed"}]
    assert (routing["reason"], routing["n_choices"], routing["accepted_by"]) == (choice.reason, 1, "replica-1")
    second = choice.ranked[1]
    assert reply.headers[ROUTE_HEADER] == (
        f'{choice.reason};replica="replica-1";cost_tokens={second.cost_tokens};candidates=4'
    )


async def test_where_nobody_chooses_there_is_no_such_header(text: ModelText) -> None:
    async with fake_engine() as engine, served(text, engine) as url, asking(url) as http:
        assert ROUTE_HEADER not in (await http.post(COMPLETIONS, json=body())).headers


def test_of_many_candidates_the_best_are_kept_and_of_many_requests_the_latest() -> None:
    routings = Routings()
    asked = Request(request_id="r", prompt_ids=tuple(range(40)), params=SamplingParams(seed=1))
    choice = choose(asked, views(MAX_CANDIDATES + 9), Random(1))
    for index in range(MAX_ROUTINGS + 5):
        routings.note(f"r{index}", choice, float(index))
    assert routings.of("r4") is None
    kept = routings.of("r5")
    assert kept is not None
    assert [one.replica_id for one in kept.choice.ranked] == [
        one.replica_id for one in choice.ranked[:MAX_CANDIDATES]
    ]
    assert (kept.n_left_out, kept.choice.ranked[0].digests) == (8, ())
    assert str(kept).endswith(f"candidates={MAX_CANDIDATES + 8}")
    routings.note("r5", choice, 9.0)
    again = routings.of("r5")
    assert again is not None
    assert (again.n_choices, again.accepted_by) == (2, None)
    routings.accept("nobody", "replica-0", 9.0)
    assert routings.of("nobody") is None


# --- The table ---------------------------------------------------------------------------------------------------


async def nobody_knows(request_ids: object) -> tuple[ToldStory, ...]:
    return ()


def report(request_id: str, *, prompts: tuple[PromptAttempts, ...] = ()) -> RequestReport:
    return RequestReport(
        request_id=request_id,
        face="http",
        kind="chat",
        received_at=1.0,
        ended_at=2.0,
        outcome="complete",
        call_id=f"chatcmpl-{request_id}",
        prompts=prompts,
    )


def finish(table: Explanations, one: RequestReport, tenant: str = "") -> None:
    ids = (one.request_id, f"chatcmpl-{one.request_id}")

    def tell() -> RequestReport:
        return one

    table.begin(tenant, ids, tell)
    table.end(tenant, ids, tell, one)


class Replicas:
    """Know the story of everybody, and answer a call once it is let through."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.answered = asyncio.Semaphore(0)

    async def ask(self, request_ids: Sequence[str]) -> tuple[ToldStory, ...]:
        self.calls.append(sorted(request_ids))
        await self.answered.acquire()
        story = StoryLog().told()
        return tuple(ToldStory(replica_id="r", request_id=each, story=story) for each in request_ids)


async def test_whoever_asks_while_replicas_are_asked_shares_the_next_call() -> None:
    replicas = Replicas()
    table = Explanations(replicas.ask)
    for index in range(9):
        finish(table, report(f"r{index}", prompts=(attempts(1, name=f"of{index}-"),)))

    def explaining(index: int) -> "asyncio.Task[dict[str, Any]]":
        return asyncio.create_task(table.explain("", f"r{index}"))

    first = explaining(0)
    await until(lambda: replicas.calls == [["of0-0-0"]])
    others = [explaining(index) for index in (1, 2, 2, 3)]
    await until(lambda: len(table._together._gathered) == 3)
    others[0].cancel()  # who goes takes nothing from the others
    replicas.answered.release()
    assert only_part(await first)["story"]["replica"] == "r"
    await until(lambda: len(replicas.calls) == 2)
    last = explaining(4)
    await until(lambda: bool(table._together._gathered))
    for _ in range(2):
        replicas.answered.release()
    for told in await asyncio.gather(*others[1:], last):
        assert only_part(told)["story"]["replica"] == "r"
    assert others[0].cancelled()
    assert replicas.calls == [["of0-0-0"], ["of1-0-0", "of2-0-0", "of3-0-0"], ["of4-0-0"]]


async def test_a_call_that_all_have_left_does_not_hold_up_the_next() -> None:
    replicas = Replicas()
    table = Explanations(replicas.ask)
    finish(table, report("r", prompts=(attempts(1),)))
    gone = asyncio.create_task(table.explain("", "r"))
    await until(lambda: len(replicas.calls) == 1)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    for _ in range(2):
        replicas.answered.release()
    assert only_part(await table.explain("", "r"))["story"]["replica"] == "r"


async def test_the_bounds_hold_under_ten_thousand_requests() -> None:
    by_number = Explanations(nobody_knows, max_requests=500, max_bytes=10**9)
    by_bytes = Explanations(nobody_knows, max_requests=10**9, max_bytes=200_000)
    for index in range(10_000):
        for table in (by_number, by_bytes):
            finish(table, report(f"r{index}"), tenant=f"t{index % 3}")
            assert len(by_number) <= 500
            assert by_bytes.n_bytes <= 200_000
    assert len(by_number) == 500
    assert 100 < len(by_bytes) < 200
    for table in (by_number, by_bytes):
        assert (len(table._numbers), len(table._live)) == (2 * len(table), 0)
        assert table.n_bytes == sum(ended.n_bytes for ended in table._ended.values())
        assert (await table.explain("t0", "r9999"))["request_id"] == "r9999"
        with pytest.raises(UnknownRequest):
            await table.explain("t0", "r0")


async def test_an_id_that_comes_again_is_the_later_request_s() -> None:
    table = Explanations(nobody_knows, max_requests=3)
    reports = [replace(report("same"), call_id=f"c{index}") for index in range(5)]
    tellers = [lambda one=one: one for one in reports]
    table.begin("", ("same", "c0"), tellers[0])
    table.begin("", ("same", "c1"), tellers[1])
    table.end("", ("same", "c0"), tellers[0], reports[0])
    assert (await table.explain("", "same"))["reply_id"] == "c1", "which is still running"
    assert (await table.explain("", "c0"))["state"] == "ended"
    table.end("", ("same", "c1"), tellers[1], reports[1])
    for index in range(2, 5):
        table.begin("", ("same", f"c{index}"), tellers[index])
        table.end("", ("same", f"c{index}"), tellers[index], reports[index])
    assert (await table.explain("", "same"))["reply_id"] == "c4"
    with pytest.raises(UnknownRequest):
        await table.explain("", "c1")


def attempts(n_attempts: int, n_parts: int = 1, name: str = "p", n_replicas: int = 1) -> PromptAttempts:
    made = tuple(
        Attempt(
            begun_at=1.0 + index,
            n_before=index,
            request_ids=tuple(f"{name}{index}-{part}" for part in range(n_parts)),
            replica_ids=[f"replica-{number}" for number in range(n_replicas)],
            ended_at=2.0 + index,
        )
        for index in range(n_attempts)
    )
    return PromptAttempts(made=made, n_tokens=0)


def test_of_many_attempts_the_first_and_the_latest_are_told() -> None:
    told: Any = explanation(report("r", prompts=(attempts(30),)), is_over=True)
    (prompt,) = told["prompts"]
    shown = [attempt["after_tokens"] for attempt in prompt["attempts"]]
    assert shown == [*range(FIRST_ATTEMPTS), *range(30 - LAST_ATTEMPTS, 30)]
    assert prompt["n_attempts_left_out"] == 30 - FIRST_ATTEMPTS - LAST_ATTEMPTS


def test_of_many_parts_the_first_are_told_and_the_replicas_asked_for_those_alone() -> None:
    told: Any = explanation(report("r", prompts=(attempts(2, n_parts=1000),)), is_over=True)
    for index, attempt in enumerate(told["prompts"][0]["attempts"]):
        assert [part["id"] for part in attempt["parts"]] == [f"p{index}-{part}" for part in range(MAX_PARTS)]
        assert attempt["n_parts_left_out"] == 1000 - MAX_PARTS
    assert len(ids_without_story(told)) == 2 * MAX_PARTS
    assert len(json.dumps(told)) < 5000


async def test_one_that_is_too_large_is_kept_without_its_prompts_and_drives_out_nobody() -> None:
    table = Explanations(nobody_knows)
    finish(table, report("small"))
    finish(table, report("large", prompts=(attempts(8, n_replicas=5000),)))
    assert table.n_bytes < MAX_BYTES_EACH
    told = await table.explain("", "large")
    assert (told["prompts"], told["n_prompts_left_out"], told["outcome"]) == ([], 1, "complete")
    assert (await table.explain("", "small"))["n_prompts_left_out"] == 0
