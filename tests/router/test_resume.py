"""Streams whose replica is lost anywhere go on as if nothing had been: ids, log-probabilities, finishes, usage."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from bakehouse_replica.core.errors import EngineDead, Unavailable
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.story import ToldStory
from bakehouse_replica.core.types import Delivery, FinishReason, ReplicaStatus, Request, TokenDelta, Usage
from bakehouse_replica.engine import Engine
from bakehouse_replica.script import Script, parse_script
from bakehouse_router import dispatch
from bakehouse_router.dispatch import Dispatcher
from scripted import WAIT_S, scripted_engine

# Four tokens that are nearly equally likely: a changed draw would show within a few tokens.
SCRIPT = parse_script({"pieces": [*"abcd"], "default": {"ids": [0]}, "prefer": [[1, 2, 3]], "max_model_len": 64})
N_TOKENS = 12
PROMPT = (0, 1, 2, 3, 0, 1)


@dataclass
class LossyClient:
    """An engine behind a line that breaks after so many deliveries: one number for each call, and none at last."""

    engine: Engine
    breaks_after: list[int]
    asked: list[Request] = field(default_factory=list)

    async def generate(self, request: Request) -> AsyncGenerator[Delivery, None]:
        n_left = self.breaks_after[len(self.asked)] if len(self.asked) < len(self.breaks_after) else None
        self.asked.append(request)
        async with aclosing(self.engine.generate(request)) as deliveries:
            async for delivery in deliveries:
                if n_left == 0:
                    raise EngineDead("lost")
                yield delivery
                n_left = None if n_left is None else n_left - 1

    async def statuses(self) -> tuple[ReplicaStatus, ...]:
        return ()

    async def explain(self, request_ids: Sequence[str]) -> tuple[ToldStory, ...]:
        return ()

    async def close(self) -> None:
        return None


@dataclass(frozen=True)
class Told:
    """What a client has been told of one choice."""

    token_ids: tuple[int, ...]
    ranks: tuple[int, ...]
    finish: FinishReason | None
    usage: Usage | None


def told(deltas: list[TokenDelta], choice: int) -> Told:
    own = [delta for delta in deltas if delta.choice == choice]
    assert [delta.start for delta in own] == [sum(len(one.token_ids) for one in own[:i]) for i in range(len(own))]
    return Told(
        token_ids=tuple(id_ for delta in own for id_ in delta.token_ids),
        ranks=tuple(logprob.rank for delta in own for logprob in delta.logprobs),
        finish=own[-1].finish,
        # A prompt that came before is cached: each of these requests has the very first admission's count.
        usage=None if own[-1].usage is None else replace(own[-1].usage, cached_tokens=0),
    )


def request(name: str, params: SamplingParams) -> Request:
    return Request(request_id=name, prompt_ids=PROMPT, params=params)


async def outcome(client: LossyClient, asked: Request) -> list[Told]:
    async with (
        asyncio.timeout(WAIT_S),
        aclosing(Dispatcher(client, resume_wait_s=0.0).stream(asked)) as deliveries,
    ):
        deltas = [delta async for delivery in deliveries for delta in delivery.deltas]
    assert {delta.request_id for delta in deltas} == {asked.request_id}
    return [told(deltas, choice) for choice in range(asked.params.n)]


VARIANTS = {
    "one": SamplingParams(seed=3, max_tokens=N_TOKENS),
    "three choices": SamplingParams(seed=3, max_tokens=N_TOKENS, n=3),
    "penalties": SamplingParams(seed=3, max_tokens=N_TOKENS, frequency_penalty=1.5, repetition_penalty=1.3),
    "log-probabilities": SamplingParams(seed=3, max_tokens=N_TOKENS, logprobs=2, n=2),
    "a stop id": SamplingParams(seed=3, max_tokens=N_TOKENS, stop_token_ids=(3,), min_tokens=3, n=3),
}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "RETRY_DELAYS_S", (0.0, 0.0))


@pytest.mark.parametrize("params", VARIANTS.values(), ids=VARIANTS)
async def test_a_loss_after_any_delivery_changes_nothing(params: SamplingParams) -> None:
    async with scripted_engine(SCRIPT) as running:
        undisturbed = await outcome(LossyClient(running.engine, []), request("whole", params))
        for n_before in range(N_TOKENS):
            client = LossyClient(running.engine, [n_before])
            assert await outcome(client, request(f"cut-{n_before}", params)) == undisturbed
        await running.wait_until_idle()
    assert {one.finish for one in undisturbed} <= {FinishReason.LENGTH, FinishReason.STOP}


@pytest.mark.parametrize("params", VARIANTS.values(), ids=VARIANTS)
async def test_loss_upon_loss_changes_nothing_either(params: SamplingParams) -> None:
    """Each attempt brings a token at least: without progress a second death would be the last."""
    random = Random(5)
    async with scripted_engine(SCRIPT) as running:
        undisturbed = await outcome(LossyClient(running.engine, []), request("whole", params))
        for index in range(20):
            client = LossyClient(running.engine, [random.randrange(1, 5) for _ in range(10)])
            assert await outcome(client, request(f"cut-{index}", params)) == undisturbed
        await running.wait_until_idle()


async def test_closing_a_resumed_stream_of_many_choices_cancels_them_all() -> None:
    params = SamplingParams(seed=3, max_tokens=50, n=4)
    async with scripted_engine(SCRIPT) as running:
        client = LossyClient(running.engine, [2])
        async with aclosing(Dispatcher(client).stream(request("left", params))) as deliveries:
            async for _ in deliveries:
                if len(client.asked) > 1:
                    break
        await running.wait_until_idle()


async def test_a_request_that_kills_every_replica_is_given_up_after_the_second() -> None:
    breaking: Script = replace(SCRIPT, raise_at=4)
    async with scripted_engine(breaking) as first, scripted_engine(breaking) as second:
        engines = [first.engine, second.engine]

        @dataclass
        class Alive(LossyClient):
            async def generate(self, request: Request) -> AsyncGenerator[Delivery, None]:
                self.engine = next((engine for engine in engines if engine.failure is None), engines[0])
                async with aclosing(LossyClient.generate(self, request)) as deliveries:
                    async for delivery in deliveries:
                        yield delivery

        with pytest.raises(Unavailable):
            await outcome(Alive(first.engine, []), request("poison", VARIANTS["one"]))
    assert all(engine.failure for engine in engines)
