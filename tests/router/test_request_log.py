"""The request log: one line a request, whatever became of it, whoever asked, and nothing of what was said."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from bakehouse_replica.core.errors import EngineDead, InvalidRequest, Overloaded
from bakehouse_replica.core.story import Preempted, PreemptionRule, StoryLog, ToldStory, Waited, WaitReason
from bakehouse_replica.core.types import FinishReason
from bakehouse_router.api.bodies import Origin
from bakehouse_router.api.deltas import stream_deltas
from bakehouse_router.api.grpc import InferenceService
from bakehouse_router.api.http import build_api
from bakehouse_router.attempts import Attempt
from bakehouse_router.gateway import Gateway
from bakehouse_router.keys import KeyRing
from bakehouse_router.proto import inference_pb2 as pb
from bakehouse_router.request_log import MAX_NAME_CHARS, RequestLog
from bakehouse_router.request_report import PromptAttempts, RequestReport
from bakehouse_router.settings import GatewaySettings
from bakehouse_router.text.model_text import ModelText
from engines import WAIT_S, Gate
from gateways import MODEL, ScriptedDispatcher, Step, completion, fake_engine, served
from recording import GrpcCall, Lines, kept_lines
from scripted import SETTINGS, saying
from two_replicas import two_replicas

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, object]] = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "secret words"}]},
    COMPLETIONS: {"model": MODEL, "prompt": "secret words"},
    RESPONSES: {"model": MODEL, "input": "secret words"},
}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    return kept_lines(caplog)


@pytest.mark.parametrize(("path", "kind"), [(CHAT, "chat"), (COMPLETIONS, "completion"), (RESPONSES, "response")])
@pytest.mark.parametrize("streams", [False, True])
async def test_each_route_leaves_one_line(
    text: ModelText, lines: Lines, path: str, kind: str, streams: bool
) -> None:
    async with served(text, ScriptedDispatcher(["ab", "c"], cached_tokens=2), in_json()) as url:
        reply = await post(url, path, stream=streams, request_id="mine", user="u1")
    assert reply.status_code == 200
    line = lines.only()
    assert (line["id"], line["face"], line["kind"], line["user"]) == ("mine", "http", kind, "u1")
    assert (line["outcome"], line["finish"], line["replicas"]) == ("complete", ["length"], ["replica-1"])
    assert (line["cached_tokens"], line["generated_tokens"]) == (2, 3)
    assert line["call"] in reply.text
    assert 0 <= line["first_token_s"] <= line["total_s"]
    assert "secret" not in lines.text, "what was asked is not logged unless asked for"


async def test_grpc_and_handle_calls_leave_one_line_each(text: ModelText, lines: Lines) -> None:
    gateway = Gateway(in_json(), ScriptedDispatcher(["ab"]), text)
    asked = pb.GenerateRequest(model=MODEL, chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="x")]))
    assert [one async for one in InferenceService(gateway).Generate(asked, GrpcCall({"x-request-id": "mine"}))]
    line = lines.only()
    assert (line["id"], line["face"], line["kind"], line["outcome"]) == ("mine", "grpc", "chat", "complete")

    lines.forget()
    fields = {"model": MODEL, "prompt": "x", "stream": True}
    with gateway.records.open("handle", "completion", "req-1", {}) as record:
        deltas = stream_deltas(gateway, "completion", fields, origin=Origin(), record=record)
        call_ids = {one.call_id async for one in deltas}
    line = lines.only()
    assert (line["face"], line["kind"], line["call"]) == ("handle", "completion", *call_ids)


async def test_the_wait_is_what_the_replica_tells(text: ModelText, lines: Lines) -> None:
    async with fake_engine() as engine, served(text, engine, in_json()) as url:
        await post(url, COMPLETIONS, max_tokens=3)
    line = lines.only()
    assert 0 <= line["queue_s"] <= line["first_token_s"]
    assert line["generated_tokens"] == 3
    # One block of 16 holds it all, from its admission to its end.
    assert 0 <= line["block_s"] <= line["total_s"]


@pytest.mark.parametrize(
    ("changes", "outcome", "param"),
    [
        ({"model": "other"}, "model_not_found", "model"),
        ({"max_tokens": -1}, "invalid_request", "max_tokens"),
        ({"temprature": 1}, "invalid_request", "temprature"),
        ({"max_tokens": 100_000}, "context_length_exceeded", "max_tokens"),
    ],
)
async def test_a_refused_request_leaves_one_line_that_names_the_field_and_quotes_nothing(
    text: ModelText, lines: Lines, changes: dict[str, Any], outcome: str, param: str
) -> None:
    async with served(text, ScriptedDispatcher(["ab"]), in_json()) as url:
        assert (await post(url, COMPLETIONS, **changes)).status_code in (400, 404)
    line = lines.only()
    assert (line["outcome"], line["param"]) == (outcome, param)
    assert "error" not in line


@pytest.mark.parametrize("key", ["my secret question", "geheim\u202e", "x" * 300, "a\nb"])
async def test_a_refused_key_that_is_no_field_s_name_is_not_shown(text: ModelText, lines: Lines, key: str) -> None:
    changes: dict[str, Any] = {key: 1}
    async with served(text, ScriptedDispatcher(["ab"]), in_json()) as url:
        assert (await post(url, COMPLETIONS, **changes)).status_code == 400
    line = lines.only()
    assert line["outcome"] == "invalid_request"
    assert "param" not in line


async def test_what_is_no_json_leaves_a_line_too(text: ModelText, lines: Lines) -> None:
    async with served(text, ScriptedDispatcher(), in_json()) as url, httpx.AsyncClient(base_url=url) as http:
        await http.post(CHAT, content=b"{secret", headers={"content-type": "application/json"})
    assert lines.only()["outcome"] == "invalid_request"
    assert "secret" not in lines.text


@pytest.mark.parametrize(
    ("error", "outcome", "message"),
    [
        (Overloaded("too many"), "overloaded", None),
        (EngineDead("the engine has died"), "engine_dead", "the engine has died"),
        (InvalidRequest("it says 'secret'", "prompt"), "invalid_request", None),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_errors_of_a_replica_leave_one_line_before_the_first_token_and_after_it(
    text: ModelText, lines: Lines, error: Exception, outcome: str, message: str | None, streams: bool
) -> None:
    scripts: list[list[Step]] = [[error], ["ab", error]]
    for script in scripts:
        lines.forget()
        async with served(text, ScriptedDispatcher(script), in_json()) as url:
            await post(url, COMPLETIONS, stream=streams)
        line = lines.only()
        assert (line["outcome"], line.get("error")) == (outcome, message)
        assert line["generated_tokens"] == (2 if len(script) == 2 else 0)


@pytest.mark.parametrize("face", ["http", "grpc"])
async def test_without_a_key_there_is_one_line_and_with_one_its_tenant(
    text: ModelText, lines: Lines, tmp_path: Path, face: str
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("tenants:\n  alice:\n    keys: [sk-0123456789abcdef0123]\n")
    gateway = Gateway(in_json(), ScriptedDispatcher(["ab"]), text)
    service, api = InferenceService(gateway, KeyRing(path)), build_api(gateway, keys=KeyRing(path))

    async def ask(**headers: str) -> None:
        if face == "grpc":
            asked = pb.GenerateRequest(text="x")
            assert [one async for one in service.Generate(asked, GrpcCall(headers))] or not headers
        else:
            transport = httpx.ASGITransport(app=api)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
                await http.post(COMPLETIONS, json={**BODIES[COMPLETIONS], "max_tokens": -1}, headers=headers)

    await ask()
    assert (lines.only()["outcome"], "tenant" in lines.only()) == ("invalid_api_key", False)
    lines.forget()
    await ask(authorization="Bearer sk-0123456789abcdef0123")
    assert lines.only()["tenant"] == "alice", "also where the body is refused, as here over HTTP"


async def test_a_client_that_leaves_is_cancelled_in_the_line(text: ModelText, lines: Lines) -> None:
    dispatcher = ScriptedDispatcher(["ab", asyncio.Event()])
    async with served(text, dispatcher, in_json()) as url, httpx.AsyncClient(base_url=url, timeout=30) as http:
        async with http.stream("POST", COMPLETIONS, json={**BODIES[COMPLETIONS], "stream": True}) as reply:
            await anext(reply.aiter_lines())
        async with asyncio.timeout(WAIT_S):
            await dispatcher.closed.wait()
            await lines.arrived()
    line = lines.only()
    assert (line["outcome"], line["generated_tokens"]) == ("cancelled", 2)


async def test_a_resumed_stream_says_so(lines: Lines) -> None:
    gate, chosen = Gate(1), replace(SETTINGS, request_log="json")
    body = {"model": SETTINGS.served_name, "prompt": "x", "temperature": 0, "stream": True}
    async with (
        two_replicas(saying("a", "b", "c", "d"), raise_at=2, before_step=gate.before_step, gateway=chosen) as http,
        http.stream("POST", COMPLETIONS, json=body) as reply,
    ):
        frames = reply.aiter_lines()
        await anext(frames)
        gate.open()
        assert [frame async for frame in frames][-2] == "data: [DONE]"
        await lines.arrived()
    line = lines.only()
    assert (line["outcome"], line["resumed"], line["generated_tokens"]) == ("complete", 1, 5)
    assert "retried" not in line


async def test_a_request_that_was_sent_again_says_so(lines: Lines) -> None:
    chosen = replace(SETTINGS, request_log="json")
    async with two_replicas(saying("a", "b"), raise_at=0, gateway=chosen) as http:
        await http.post(COMPLETIONS, json={"model": SETTINGS.served_name, "prompt": "x", "temperature": 0})
    line = lines.only()
    assert (line["outcome"], line["retried"]) == ("complete", 1)
    assert "resumed" not in line


async def test_prompts_and_answers_are_logged_where_asked_for(text: ModelText, lines: Lines) -> None:
    chosen = GatewaySettings(served_name=MODEL, request_log="json", logs_prompts=True)
    async with served(text, ScriptedDispatcher(["ab\n", "c"]), chosen) as url:
        await post(url, CHAT)
    line = lines.only()
    assert json.loads(line["prompt"]) == [{"role": "user", "content": "secret words"}]
    assert line["answer"] == ["ab\nc"]


async def test_off_leaves_nothing(text: ModelText, lines: Lines) -> None:
    chosen = GatewaySettings(served_name=MODEL, request_log="off", logs_prompts=True)
    async with served(text, ScriptedDispatcher(["ab"]), chosen) as url:
        await post(url, CHAT)
    assert lines.text == ""


def test_waits_and_preemptions_are_told_in_sum_the_longest_first_and_what_is_too_short_to_matter_is_not(
    lines: Lines,
) -> None:
    def waited(reason: WaitReason, seconds: float, *, is_behind: bool = False) -> Waited:
        return Waited(choice=0, at_s=0.0, reason=reason, is_behind=is_behind, n_plans=1, seconds=seconds)

    log = StoryLog()
    log.add(waited(WaitReason.NEXT_PLAN, 0.0004))
    log.add(waited(WaitReason.NO_BLOCKS, 0.25, is_behind=True))
    log.add(waited(WaitReason.NO_SLOT, 1.0))
    log.add(Preempted(choice=0, at_s=1.0, step=3, rule=PreemptionRule.BLOCKS, n_short=1, n_freed=2))
    log.add(waited(WaitReason.NO_SLOT, 0.5))
    told = ToldStory(replica_id="a", request_id="r", story=log.told(ended_at_s=9.0))
    attempts = tuple(Attempt(begun_at=1.0, n_before=0, stories=[told]) for _ in range(2))
    report = RequestReport(
        request_id="r",
        face="http",
        kind="chat",
        received_at=1.0,
        ended_at=2.0,
        outcome="complete",
        prompts=(PromptAttempts(made=attempts, n_tokens=1),),
    )
    RequestLog("json").write(report)
    line = lines.only()
    assert (line["waited"], line["preempted"]) == (["no_slot:3.000", "behind:no_blocks:0.500"], 2)
    lines.forget()
    RequestLog("text").write(report)
    assert "waited=no_slot:3.000,behind:no_blocks:0.500 preempted=2" in lines.text


NASTY = ["a\nb", 'say "x"', "a=b c", "\u2028\u2029\x85\x00\x1b[31m", "snow ☃ \ud800", "x" * 5000, "", "{}"]


@pytest.mark.parametrize("name", NASTY)
def test_no_name_breaks_a_line(lines: Lines, name: str) -> None:
    call = completion(user=name)
    report = RequestReport(
        request_id=name or "r",
        face="http",
        kind="completion",
        received_at=1.0,
        ended_at=2.5,
        outcome="complete",
        tenant=name,
        call=call,
        finishes=(FinishReason.STOP, FinishReason.LENGTH),
    )
    RequestLog("json").write(report)
    line = lines.only()
    expected = name if len(name) <= MAX_NAME_CHARS else name[:MAX_NAME_CHARS] + "…"
    assert line.get("user", "") == expected
    assert (line["finish"], line["total_s"]) == (["stop", "length"], 1.5)
    assert len(lines.text.splitlines()) == 1

    lines.forget()
    RequestLog("text").write(report)
    assert len(lines.text.splitlines()) == 1
    assert lines.text.isascii()
    fields = dict(re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', lines.text))
    written = fields.get("user", '""')
    assert (json.loads(written) if written.startswith('"') else written) == expected
    assert (fields["finish"], fields["outcome"], fields["total_s"]) == ("stop,length", "complete", "1.5")


def in_json() -> GatewaySettings:
    return GatewaySettings(served_name=MODEL, request_log="json")


async def post(url: str, path: str, *, request_id: str = "r", **changes: object) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        headers = {"x-request-id": request_id}
        return await http.post(path, json={**BODIES[path], **changes}, headers=headers)
