"""An engine on the fake executor for tests, let through its steps one by one where a test wants that."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from bakehouse_replica.core.executor import Executor
from bakehouse_replica.core.sampling import Grammar, SamplingParams
from bakehouse_replica.core.types import Capacity, ReplicaCard, Request, SchedulingPolicy, StepPlan, TokenDelta
from bakehouse_replica.engine import Engine
from bakehouse_replica.executors.fake import FakeExecutor

CAPACITY = Capacity(n_blocks=64, block_size=4, max_step_tokens=32, max_sequences=8)
CARD = ReplicaCard(
    replica_id="r1",
    model_name="fake",
    model_digest="fake",
    hash_key=b"",
    block_size=CAPACITY.block_size,
    n_blocks=CAPACITY.n_blocks,
    vocabulary_size=1000,
    max_model_len=200,
    max_sequences=CAPACITY.max_sequences,
)
WAIT_S = 60.0  # for whatever comes within milliseconds on idle cores


def request(
    request_id: str,
    *,
    prompt: tuple[int, ...] = (1, 2, 3, 4, 5),
    n: int = 1,
    max_tokens: int = 6,
    timeout_s: float | None = None,
    grammar: Grammar | None = None,
) -> Request:
    """A seeded request for six tokens, unless told otherwise."""
    params = SamplingParams(n=n, max_tokens=max_tokens, seed=1, grammar=grammar)
    return Request(request_id=request_id, prompt_ids=prompt, params=params, timeout_s=timeout_s)


class Gate:
    """Lets the engine's thread make one step per permit; `open` lets it run free."""

    def __init__(self, n_permits: int = 0) -> None:
        self._permits = threading.Semaphore(n_permits)
        self._is_open = threading.Event()
        self.n_steps = 0

    def before_step(self, plan: StepPlan) -> None:
        if not self._is_open.is_set():
            assert self._permits.acquire(timeout=WAIT_S), f"step {plan.step} was never let through"
        self.n_steps += 1

    def allow(self, n_steps: int) -> None:
        self._permits.release(n_steps)

    def open(self) -> None:
        self._is_open.set()
        self._permits.release()


@asynccontextmanager
async def engine_with(
    before_step: Callable[[StepPlan], None] | None = None,
    *,
    executor: Executor | None = None,
    max_waiting_requests: int = 100,
    clock: Callable[[], float] | None = None,
    on_failure: Callable[[str], None] | None = None,
    replica_id: str = CARD.replica_id,
) -> AsyncGenerator[Engine, None]:
    """A started engine, closed in the end; its clock ticks by a second with every look at it."""
    ticks = iter(range(1_000_000))
    engine = Engine(
        executor=executor or FakeExecutor(CAPACITY, before_step=before_step),
        policy=SchedulingPolicy(max_model_len=CARD.max_model_len, max_waiting_requests=max_waiting_requests),
        card=replace(CARD, replica_id=replica_id),
        clock=clock or (lambda: float(next(ticks))),
        on_failure=on_failure,
    )
    engine.start()
    try:
        async with asyncio.timeout(WAIT_S):
            yield engine
    finally:
        await engine.close()


async def collect(engine: Engine, wanted: Request) -> list[TokenDelta]:
    """All deltas of a request."""
    return [delta async for delivery in engine.generate(wanted) for delta in delivery.deltas]


async def wait_until_idle(engine: Engine) -> None:
    """Until nothing runs; the engine refuses new requests from then on."""
    assert await engine.drain(WAIT_S)


def ids_of(deltas: list[TokenDelta], choice: int = 0) -> list[int]:
    """The choice's ids, after checking that its deltas are contiguous and end exactly once, on the last."""
    own = [delta for delta in deltas if delta.choice == choice]
    ids: list[int] = []
    for delta in own:
        assert delta.start == len(ids)
        ids += delta.token_ids
    assert [delta.finish is not None for delta in own] == [False] * (len(own) - 1) + [True]
    return ids
