"""Cases of cancelling, failing, draining and waiting behind others, on a scripted model in this process.

Every engine here is audited when its test is through: no block held, and the pool's books in order.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import httpx
import pytest
from answers import Json, ask, opened, read
from bakehouse_replica.core.sampling import Grammar, GrammarKind, SamplingParams
from bakehouse_replica.core.types import (
    Capacity,
    Chunk,
    FinishReason,
    Request,
    Sample,
    SchedulingPolicy,
    StepPlan,
    TokenDelta,
)
from bakehouse_replica.engine import Engine
from bakehouse_replica.executors.scripted import ScriptedExecutor
from bakehouse_replica.model.constraint import Constraint
from bakehouse_replica.script import parse_script
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_router.dispatch import Dispatcher
from bakehouse_router.text.model_text import scripted_model_text
from driving import POLICY, Driver, make_request
from engines import CAPACITY, CARD, Gate
from gateways import served
from scripted import SETTINGS, WAIT_S, saying, scripted_engine, scripted_server, until
from two_replicas import two_replicas

ENDLESS: Json = {"pieces": ["x"], "default": {"ids": [0]}}
STREAMED: Json = {"model": "scripted", "prompt": "hi", "temperature": 0, "stream": True}
SMALL = ReplicaSettings(max_step_tokens=16, max_prefill_tokens=16, hash_key=b"key")


def completion(**fields: object) -> Json:
    return {"prompt": "hi", "temperature": 0, **fields}


def request(request_id: str, *, n_prompt: int = 4, n: int = 1, max_tokens: int = 1000, **fields: int) -> Request:
    # Prompts differ, so that none finds the blocks of another.
    start = sum(request_id.encode()) % 200
    prompt_ids = tuple(1 + (start + index) % 256 for index in range(n_prompt))
    params = SamplingParams(n=n, max_tokens=max_tokens, temperature=0.0, seed=1)
    return Request(request_id=request_id, prompt_ids=prompt_ids, params=params, **fields)  # type: ignore[arg-type]


async def deltas_of(engine: Engine, asked: Request) -> list[TokenDelta]:
    async with asyncio.timeout(WAIT_S):
        return [delta async for delivery in engine.generate(asked) for delta in delivery.deltas]


async def test_c45_an_abort_that_comes_before_its_request_ends_it_at_once() -> None:
    async with scripted_engine(parse_script(dict(ENDLESS))) as running:
        running.engine.abort("early")
        (delta,) = await deltas_of(running.engine, request("early"))
        assert running.plans == []
    assert (delta.token_ids, delta.finish) == ((), FinishReason.CANCELLED)


async def test_c45_a_client_that_hangs_up_stops_its_generation_within_a_step() -> None:
    gate = Gate(3)
    async with scripted_server(ENDLESS, before_step=gate.before_step) as server:
        async with opened(server.http, completion(max_tokens=1000)) as stream:
            while len(stream.answer.choices) == 0 or len(stream.answer.choice.text) < 3:
                await stream.advance()
        await until(lambda: server.client.n_open == 0)  # the cancel has been sent; a fourth step is in flight
        gate.open()
        await server.wait_until_idle()
        assert len(server.plans) <= 4


@dataclass
class SlowGrammars:
    """A source of constraints whose compilation takes until the test says so."""

    has_begun: threading.Event = field(default_factory=threading.Event)
    may_end: threading.Event = field(default_factory=threading.Event)

    def prepare(self, params: SamplingParams) -> None:
        self.has_begun.set()
        assert self.may_end.wait(WAIT_S)

    def constraint(self, sequence_id: int, sample: Sample) -> Constraint | None:
        return None


# The requests; the step that is in flight when all of them are aborted, `victim` first; how many sequences of the
# victim are in that step, and from which position on at least.
STATES: dict[str, tuple[Sequence[Request], int, int, int]] = {
    "waiting": ([request("a", n_prompt=40), request("victim", n_prompt=40)], 1, 0, 0),
    "second chunk of its prefill": ([request("victim", n_prompt=40)], 1, 1, 16),
    "decode": ([request("victim")], 3, 1, 5),
    "forked": ([request("victim", n_prompt=17, n=4)], 4, 4, 18),
    "beside others": ([request("a"), request("victim", n=3), request("b")], 5, 3, 5),
}


def starts_of_victim(requests: Sequence[Request], plan: StepPlan) -> list[int]:
    others = {index for index, one in enumerate(requests) if one.request_id != "victim"}  # ids go by arrival
    return [chunk.start for chunk in plan.chunks if chunk.sequence_id not in others]


@pytest.mark.parametrize("state", STATES)
async def test_c46_an_abort_leaks_no_block(state: str) -> None:
    requests, n_steps_before, n_in_flight, least_start = STATES[state]
    gate = Gate()
    async with scripted_engine(parse_script(dict(ENDLESS)), SMALL, before_step=gate.before_step) as running:
        consumers = [asyncio.create_task(deltas_of(running.engine, one)) for one in requests]
        gate.allow(n_steps_before)
        await until(lambda: len(running.plans) > n_steps_before)
        starts = starts_of_victim(requests, running.plans[-1])
        assert (len(starts), min(starts, default=0) >= least_start) == (n_in_flight, True)
        running.engine.abort("victim")
        for one in requests:
            running.engine.abort(one.request_id)
        gate.open()
        ends = [[delta.finish for delta in deltas if delta.finish] for deltas in await asyncio.gather(*consumers)]
        await running.wait_until_idle()
    assert ends == [[FinishReason.CANCELLED] * one.params.n for one in requests]


async def test_c46_an_abort_of_a_preempted_request_leaks_no_block() -> None:
    gate = Gate()
    script = parse_script(ENDLESS | {"max_model_len": 100})
    async with scripted_engine(script, n_blocks=6, before_step=gate.before_step) as running:
        urgent = request("urgent", n_prompt=30, max_tokens=60)
        victim = request("victim", n_prompt=30, max_tokens=60, priority=1)
        consumers = [asyncio.create_task(deltas_of(running.engine, one)) for one in (urgent, victim)]
        n_steps = 0
        while not was_preempted(running.plans):
            gate.allow(1)
            n_steps += 1
            await until(lambda n_steps=n_steps: len(running.plans) > n_steps)  # type: ignore[misc]
        running.engine.abort("victim")
        gate.open()
        await consumers[1]
        running.engine.abort("urgent")
        await consumers[0]
        await running.wait_until_idle()


def was_preempted(plans: Sequence[StepPlan]) -> bool:
    """Whether a sequence that had drawn tokens is missing from the newest plan."""
    drawn = {chunk.sequence_id for plan in plans for chunk in plan.chunks if chunk.sample is not None}
    return bool(plans) and not drawn <= {chunk.sequence_id for chunk in plans[-1].chunks}


async def test_c46_a_request_that_goes_while_its_grammar_compiles_leaves_nothing() -> None:
    grammars = SlowGrammars()
    params = SamplingParams(seed=1, max_tokens=5, grammar=Grammar(kind=GrammarKind.REGEX, text="x+"))
    asked = Request(request_id="a", prompt_ids=(1, 2, 3), params=params)
    async with scripted_engine(parse_script(dict(ENDLESS)), constraints=grammars) as running:
        consumer = asyncio.create_task(deltas_of(running.engine, asked))
        await until(grammars.has_begun.is_set)
        consumer.cancel()
        await asyncio.wait([consumer])
        grammars.may_end.set()
        assert len(await deltas_of(running.engine, request("b", max_tokens=3))) > 0
        assert all(len(chunk.token_ids) != 3 for plan in running.plans for chunk in plan.chunks)


def test_c47_a_result_that_comes_after_the_abort_is_ignored() -> None:
    capacity = Capacity(n_blocks=16, block_size=4, max_step_tokens=32, max_sequences=4)
    driver = Driver(capacity, POLICY)
    driver.add(make_request("gone", range(1, 10), n=3))
    driver.add(make_request("stays", range(11, 20)))
    driver.step(during=lambda: driver.abort("gone"))
    driver.run()
    assert [driver.outcome("gone", choice).finish for choice in range(3)] == [FinishReason.CANCELLED] * 3
    assert len(driver.outcome("stays").token_ids) == 8


async def test_c47_an_abort_during_a_step_leaves_the_engine_alive() -> None:
    gate = Gate()
    async with scripted_engine(parse_script(dict(ENDLESS)), before_step=gate.before_step) as running:
        consumer = asyncio.create_task(deltas_of(running.engine, request("gone")))
        await until(lambda: len(running.plans) == 1)  # in flight
        running.engine.abort("gone")
        gate.open()
        deltas = await consumer
        after = await deltas_of(running.engine, request("next", max_tokens=3))
        assert running.engine.failure is None
    assert sum(len(delta.token_ids) for delta in deltas) <= 1
    assert deltas[-1].finish is FinishReason.CANCELLED
    assert sum(len(delta.token_ids) for delta in after) == 3


async def test_c48_a_dead_engine_is_told_by_health_streams_and_requests_that_wait_or_come() -> None:
    gate = Gate(1)
    replica = ReplicaSettings(max_sequences=2, hash_key=b"key")
    tree = ENDLESS | {"raise_at": 4}
    async with (
        scripted_server(tree, replica=replica, before_step=gate.before_step) as server,
        opened(server.http, completion()) as first,
    ):
        entering = asyncio.create_task(server.http.post("/v1/completions", json=STREAMED))
        await until(lambda: server.client.n_open == 2)
        whole = asyncio.create_task(ask(server.http, completion()))
        await until(lambda: server.client.n_open == 3)
        gate.allow(2)
        await until(lambda: len(server.plans) == 4)  # two are running, the third waits
        assert {chunk.sequence_id for chunk in server.plans[-1].chunks} == {0, 1}
        await first.advance()
        gate.open()
        broken = [await first.rest(), read(200, (await entering).text)]
        waiting = await whole
        health = await server.http.get("/health")
        refused = await ask(server.http, completion())
    for stream in broken:
        # A token that had not been sent yet when the engine died may be missing.
        assert (stream.status, stream.is_done) == (200, True)
        assert set(stream.choice.text) == {"x"}
        assert stream.choice.finish is None
        assert stream.error is not None
        assert (stream.error["code"], stream.error["type"]) == ("engine_dead", "server_error")
    assert [health.status_code, waiting.status, refused.status] == [503] * 3
    assert waiting.error is not None
    assert refused.error is not None


async def test_c48_a_stalled_engine_that_is_closed_ends_its_streams() -> None:
    async with scripted_server(ENDLESS | {"stall_at": 2}) as server, opened(server.http, completion()) as stream:
        while len(stream.answer.choices) == 0 or len(stream.answer.choice.text) < 2:
            await stream.advance()
        server.executor.close()
        broken = await stream.rest()
    assert broken.choice.text == "xx"
    assert broken.error is not None


async def test_c48_an_engine_with_a_stalled_step_can_be_closed() -> None:
    plans: list[StepPlan] = []
    script = parse_script(ENDLESS | {"stall_at": 1})
    executor = ScriptedExecutor(script, CAPACITY, before_step=plans.append)
    policy = SchedulingPolicy(max_model_len=CARD.max_model_len)
    engine = Engine(executor=executor, policy=policy, card=CARD, close_grace_s=0.05)
    engine.start()
    consumer = asyncio.create_task(deltas_of(engine, request("a", max_tokens=5)))
    await until(lambda: len(plans) == 2)
    await engine.close()
    deltas = await consumer
    assert sum(len(delta.token_ids) for delta in deltas) == 1
    assert deltas[-1].finish is FinishReason.ERROR


async def test_c49_a_gateway_that_starts_again_lists_and_serves_what_it_did_before() -> None:
    script = parse_script(saying("a", "b"))
    seen = []
    async with scripted_engine(script) as running:
        for _ in range(2):
            async with (
                served(scripted_model_text(script), Dispatcher(running.engine), SETTINGS) as url,
                httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http,
            ):
                paths = ("/health", "/ready", "/v1/models", "/v1/models/scripted")
                health, ready, models, model = [await http.get(path) for path in paths]
                (listed,) = models.json()["data"]
                (replica,) = health.json()["replicas"]
                told = {key: value for key, value in listed.items() if key != "created"}
                assert {key: value for key, value in model.json().items() if key != "created"} == told
                assert (health.status_code, ready.status_code) == (200, 200)
                assert (ready.json()["model"], replica["max_model_len"]) == (listed["id"], listed["max_model_len"])
                assert (await ask(http, completion(model=listed["id"]))).choice.text == "ab"
                seen.append((told, replica["id"]))
    assert seen[0] == seen[1]


async def test_c50_draining_refuses_new_work_and_finishes_what_runs() -> None:
    gate = Gate(1)
    tree = saying("a", "b", "c", "d")
    async with scripted_server(tree, before_step=gate.before_step) as server, AsyncExitStack() as stack:
        first = await stack.enter_async_context(opened(server.http, completion()))
        others = [asyncio.create_task(ask(server.http, completion(stream=True))) for _ in range(2)]
        await until(lambda: server.client.n_open == 3)
        draining = asyncio.create_task(server.engine.drain(WAIT_S))
        await asyncio.sleep(0)  # it refuses from its first step on
        refused = await ask(server.http, completion())
        health = await server.http.get("/health")
        gate.open()
        running = [await first.rest(), *await asyncio.gather(*others)]
        assert await draining
    assert [(one.choice.text, one.choice.finish) for one in running] == [("abcd", "stop")] * 3
    assert (refused.status, health.status_code) == (503, 503)
    assert int(refused.headers["retry-after"]) >= 1


REPLY = saying("a", "b", "c")


@pytest.mark.parametrize("way", [{}, {"stream": True}])
async def test_c61_a_replica_lost_before_the_first_token_costs_nobody_anything(way: Json) -> None:
    async with two_replicas(REPLY, raise_at=0) as http:
        found = await ask(http, completion(**way))
    assert (found.choice.text, found.choice.finish, found.error) == ("abc", "stop", None)


@pytest.mark.parametrize("way", [{}, {"stream": True}])
async def test_c61_choices_and_echo_and_usage_come_once_after_a_loss(way: Json) -> None:
    usage = {"stream_options": {"include_usage": True}} if way else {}
    async with two_replicas(REPLY, raise_at=0) as http:
        found = await ask(http, completion(n=2, echo=True, prompt_logprobs=0, **way, **usage))
    assert [choice.text for choice in found.choices.values()] == ["hiabc"] * 2
    assert {choice.finish for choice in found.choices.values()} == {"stop"}
    assert (found.count("prompt_tokens"), found.count("completion_tokens")) == (2, 8)


@pytest.mark.parametrize("raise_at", [1, 2])
@pytest.mark.parametrize("n", [1, 2])
async def test_c61_a_replica_lost_after_the_first_token_is_not_noticed(raise_at: int, n: int) -> None:
    gate, usage = Gate(1), {"stream_options": {"include_usage": True}}
    async with two_replicas(REPLY, raise_at=raise_at, before_step=gate.before_step) as http:
        async with opened(http, completion(n=n, logprobs=1, **usage)) as stream:
            await stream.advance()
            gate.open()
            found = await stream.rest()
        again = await ask(http, completion(n=n, logprobs=1))
    assert (found.error, found.is_done) == (None, True)
    assert [(choice.text, choice.finishes) for choice in found.choices.values()] == [("abc", ["stop"])] * n
    assert (found.count("prompt_tokens"), found.count("completion_tokens")) == (2, 4 * n)
    assert [choice.logprobs for choice in found.choices.values()] == [
        choice.logprobs for choice in again.choices.values()
    ]


def steps_of(plans: Sequence[StepPlan], is_meant: Callable[[Chunk], bool]) -> list[int]:
    return [index for index, plan in enumerate(plans) if any(map(is_meant, plan.chunks))]


async def test_c62_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    n_long, n_short = 131_072, 10
    script = ENDLESS | {"max_model_len": n_long + 1000}
    replica = ReplicaSettings(max_step_tokens=512, max_prefill_tokens=512, hash_key=b"key")
    gate = Gate(2)
    async with scripted_server(script, replica=replica, before_step=gate.before_step) as server:
        long = asyncio.create_task(ask(server.http, completion(prompt=[1] * n_long, max_tokens=1)))
        await until(lambda: len(server.plans) >= 2)
        asked = asyncio.create_task(ask(server.http, completion(prompt=[2] * n_short, max_tokens=1)))
        await until(lambda: server.client.n_open == 2)
        gate.allow(5)
        short = await asked
        is_still_running = not long.done()
        gate.open()
        assert (await long).count("completion_tokens") == 1
        first = steps_of(server.plans, lambda chunk: chunk.token_ids[:1] == (2,))
        last = steps_of(server.plans, lambda chunk: chunk.token_ids[:1] == (1,))
    assert short.choice.text == "x"
    assert is_still_running
    assert len(first) <= 3
    assert last[-1] > first[-1] + 50
    assert len(server.plans) >= n_long // 512
