"""A server on a scripted model, in this process and without Ray: real HTTP, gateway, engine and sampler."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace

import httpx
import torch
from bakehouse_replica.build import scripted_capacity
from bakehouse_replica.core.story import ToldStory
from bakehouse_replica.core.types import (
    Delivery,
    ReplicaCard,
    ReplicaStatus,
    Request,
    SchedulingPolicy,
    StepPlan,
)
from bakehouse_replica.engine import Engine
from bakehouse_replica.executors.scripted import ScriptedExecutor
from bakehouse_replica.executors.step_sizes import step_sizes
from bakehouse_replica.grammar_compiler import GrammarCompiler
from bakehouse_replica.model.constraint import ConstraintSource
from bakehouse_replica.model.grammar import GrammarStore
from bakehouse_replica.script import Script, parse_script
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_router.dispatch import Dispatcher
from bakehouse_router.settings import GatewaySettings
from bakehouse_router.text.model_text import ModelText, scripted_model_text
from gateways import served

MODEL = "scripted"
EOS = "</s>"
WAIT_S = 60.0
POLL_S = 0.002
SETTINGS = GatewaySettings(served_name=MODEL)

Piece = str | dict[str, str]


def saying(*reply: Piece, **changes: object) -> dict[str, object]:
    """A script that answers everything with these pieces and ends with `EOS`, id 0; `changes` are other keys."""
    tree: dict[str, object] = {"pieces": vocabulary(*reply), "eos": 0, "default": {"pieces": list(reply)}}
    return tree | changes


def vocabulary(*pieces: Piece) -> list[Piece]:
    """`EOS` and then these, each once; single bytes are in every vocabulary."""
    distinct: list[Piece] = [EOS]
    for piece in pieces:
        if piece not in distinct and not (isinstance(piece, dict) and len(piece.get("bytes", "")) == 2):
            distinct.append(piece)
    return distinct


@dataclass(slots=True)
class WatchedClient:
    """An engine as the gateway's client that counts the streams which are open."""

    engine: Engine
    n_open: int = 0
    requests: list[Request] = field(default_factory=list)

    async def generate(self, request: Request) -> AsyncGenerator[Delivery, None]:
        self.requests.append(request)
        self.n_open += 1
        try:
            async with aclosing(self.engine.generate(request)) as deliveries:
                async for delivery in deliveries:
                    yield delivery
        finally:
            self.n_open -= 1

    async def statuses(self) -> tuple[ReplicaStatus, ...]:
        return await self.engine.statuses()

    async def explain(self, request_ids: Sequence[str]) -> tuple[ToldStory, ...]:
        return await self.engine.explain(request_ids)

    async def close(self) -> None:
        await self.engine.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedEngine:
    """An engine on a scripted executor. `plans`: every step so far, in order."""

    engine: Engine
    executor: ScriptedExecutor
    plans: list[StepPlan]

    async def wait_until_idle(self) -> None:
        """Returns when nothing is running or waiting and no block is held."""
        await until(lambda: _is_idle(self.engine))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedServer(ScriptedEngine):
    """A running server, and an HTTP client of it."""

    url: str
    http: httpx.AsyncClient
    text: ModelText
    client: WatchedClient


async def until(condition: Callable[[], bool], wait_s: float = WAIT_S) -> None:
    """Returns when `condition` holds: for what another thread or the other end of a connection does."""
    async with asyncio.timeout(wait_s):
        while not condition():
            await asyncio.sleep(POLL_S)


def _is_idle(engine: Engine) -> bool:
    load = engine.load()
    return not load.n_running and not load.n_waiting and not load.n_held_blocks


@asynccontextmanager
async def scripted_engine(
    script: Script,
    replica: ReplicaSettings | None = None,
    *,
    constraints: ConstraintSource | None = None,
    n_blocks: int | None = None,
    before_step: Callable[[StepPlan], None] | None = None,
) -> AsyncGenerator[ScriptedEngine, None]:
    """An engine that is audited at the end, unless it has failed or stalls.

    `constraints` replaces the shipped grammars. `n_blocks` cuts the pool down, below what one sequence of the
    whole context needs if so wished. `before_step` runs in the engine's thread.
    """
    plans: list[StepPlan] = []

    def record(plan: StepPlan) -> None:
        plans.append(plan)
        if before_step is not None:
            before_step(plan)

    replica = replica or ReplicaSettings(hash_key=b"key")
    capacity = scripted_capacity(replica, script.max_model_len)
    if n_blocks is not None:
        capacity = replace(capacity, n_blocks=n_blocks)
    if constraints is None:
        constraints = GrammarStore(GrammarCompiler(script.vocabulary, script.vocabulary_size))
    executor = ScriptedExecutor(script, capacity, constraints=constraints, before_step=record)
    engine = _engine(script, replica, executor)
    engine.start()
    try:
        yield ScriptedEngine(engine=engine, executor=executor, plans=plans)
        if engine.failure is None and script.stall_at is None:
            await _audit(engine)
    finally:
        executor.close()  # a stalled step ends
        await engine.close()


async def _audit(engine: Engine) -> None:
    assert await engine.drain(WAIT_S), "the engine still had work after the last request"
    assert engine.load().n_held_blocks == 0, "blocks are held although nothing runs"
    engine._scheduler.check()  # its thread waits for commands, so nobody else touches it


def _engine(script: Script, replica: ReplicaSettings, executor: ScriptedExecutor) -> Engine:
    capacity = executor.capacity
    card = ReplicaCard(
        replica_id="replica-1",
        model_name=MODEL,
        model_digest="digest",
        hash_key=replica.hash_key,
        block_size=capacity.block_size,
        n_blocks=capacity.n_blocks,
        vocabulary_size=script.vocabulary_size,
        max_model_len=script.max_model_len,
        max_sequences=capacity.max_sequences,
    )
    policy = SchedulingPolicy(
        max_model_len=script.max_model_len,
        max_prefill_tokens=step_sizes(replica, torch.device("cpu")).max_prefill_tokens,
        max_waiting_requests=replica.max_waiting_requests,
    )
    return Engine(executor=executor, policy=policy, card=card)


@asynccontextmanager
async def scripted_server(
    tree: Mapping[str, object],
    *,
    gateway: GatewaySettings = SETTINGS,
    replica: ReplicaSettings | None = None,
    n_blocks: int | None = None,
    before_step: Callable[[StepPlan], None] | None = None,
) -> AsyncGenerator[ScriptedServer, None]:
    """A server that follows the script `tree` (what a script's file holds); see `scripted_engine`."""
    script = parse_script(dict(tree))
    text = scripted_model_text(script, template_override=gateway.chat_template)
    async with scripted_engine(script, replica, n_blocks=n_blocks, before_step=before_step) as running:
        client = WatchedClient(running.engine)
        async with (
            served(text, Dispatcher(client, resume_wait_s=0.0), gateway) as url,
            httpx.AsyncClient(base_url=url, timeout=60) as http,
        ):
            yield ScriptedServer(
                engine=running.engine,
                executor=running.executor,
                plans=running.plans,
                url=url,
                http=http,
                text=text,
                client=client,
            )
