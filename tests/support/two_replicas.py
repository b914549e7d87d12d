"""A server over two scripted replicas, of which the first one dies where its script says so."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import httpx
from bakehouse_replica.core.story import ToldStory
from bakehouse_replica.core.types import Delivery, ReplicaStatus, Request, StepPlan
from bakehouse_replica.engine import Engine
from bakehouse_replica.script import parse_script
from bakehouse_router.dispatch import Dispatcher
from bakehouse_router.settings import GatewaySettings
from bakehouse_router.text.model_text import scripted_model_text
from gateways import served
from scripted import SETTINGS, WAIT_S, scripted_engine


@dataclass
class Successors:
    """Replicas of which the first that is alive serves, as after the loss of one."""

    engines: Sequence[Engine]

    async def generate(self, asked: Request) -> AsyncGenerator[Delivery, None]:
        engine = next(engine for engine in self.engines if engine.failure is None)
        async with aclosing(engine.generate(asked)) as deliveries:
            async for delivery in deliveries:
                yield delivery

    async def statuses(self) -> tuple[ReplicaStatus, ...]:
        return tuple([status for engine in self.engines for status in await engine.statuses()])

    async def explain(self, request_ids: Sequence[str]) -> tuple[ToldStory, ...]:
        return tuple([told for engine in self.engines for told in await engine.explain(request_ids)])

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()


@asynccontextmanager
async def two_replicas(
    tree: Mapping[str, object],
    raise_at: int,
    before_step: Callable[[StepPlan], None] | None = None,
    gateway: GatewaySettings = SETTINGS,
) -> AsyncGenerator[httpx.AsyncClient, None]:
    """A client of a server whose first replica dies at that output token; `before_step` is in its steps."""
    sound, breaking = parse_script(dict(tree)), parse_script({**tree, "raise_at": raise_at})
    async with (
        scripted_engine(breaking, before_step=before_step) as first,
        scripted_engine(sound) as second,
        served(scripted_model_text(sound), Dispatcher(Successors([first.engine, second.engine])), gateway) as url,
        httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http,
    ):
        yield http
