"""C-64: the simulator takes the very steps that the engine takes, with its own thread and a model on the CPU.

Both get the same requests in the same steps: those of step k come while step k is carried out. Then time plays no
part, and plans can be compared one by one: who is computed, from where to where, in which blocks, which copies.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from bakehouse_cluster.plan.clock import VirtualClock
from bakehouse_cluster.plan.replica import SimulatedReplica
from bakehouse_replica.core.counts import Series
from bakehouse_replica.core.errors import BakehouseError
from bakehouse_replica.core.executor import Executor, Pending
from bakehouse_replica.core.metric_table import PREEMPTIONS, PREFIX_HIT_TOKENS, PREFIX_QUERIED_TOKENS
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.scheduler import Scheduler
from bakehouse_replica.core.tally import replica_counts
from bakehouse_replica.core.types import (
    Capacity,
    ReplicaCard,
    Request,
    SchedulingPolicy,
    StepPlan,
    TokenDelta,
)
from bakehouse_replica.engine import Engine
from bakehouse_replica.executors.simulated import SimulatedExecutor, StepCost
from executors import MakeExecutor, make_fake, make_in_process

WAIT_S = 60.0
CAPACITY = Capacity(n_blocks=14, block_size=4, max_step_tokens=16, max_sequences=4)
POLICY = SchedulingPolicy(max_model_len=60, max_prefill_tokens=8, long_prefill_tokens=12, max_waiting_requests=5)
CARD = ReplicaCard(
    replica_id="r",
    model_name="m",
    model_digest="d",
    hash_key=b"k",
    block_size=CAPACITY.block_size,
    n_blocks=CAPACITY.n_blocks,
    vocabulary_size=200,
    max_model_len=POLICY.max_model_len,
    max_sequences=CAPACITY.max_sequences,
)
COUNTED = (PREEMPTIONS.name, PREFIX_QUERIED_TOKENS.name, PREFIX_HIT_TOKENS.name)
COMMON = tuple((13 * index + 5) % 60 for index in range(12))


def request(name: str, own: tuple[int, ...], n_output: int, n: int = 1, priority: int = 0) -> Request:
    params = SamplingParams(max_tokens=n_output, temperature=0.0, seed=1, n=n)
    return Request(request_id=name, prompt_ids=COMMON + own, params=params, priority=priority)


# Prompts that begin alike; more than fit into 14 blocks at once; a fork; a request that outranks others; and more
# than five that wait, of whom the scheduler refuses the rest.
ARRIVALS: dict[int, list[Request]] = {
    -1: [request("first", (1, 2, 3), 12)],
    0: [request("second", (4,), 14), request("third", (5, 6, 7, 8, 9), 10)],
    2: [request("forked", (11, 12), 6, n=2)],
    4: [request("again", (1, 2, 3, 4), 9), request("urgent", (21,), 8, priority=-1)],
    9: [request(f"crowd-{index}", (30 + index, 31), 5) for index in range(6)],
    15: [request("late", (1, 2, 3), 20)],
}


@dataclass
class Seen:
    """What one of the two did."""

    plans: list[StepPlan]
    counted: dict[str, object]
    cached_tokens: dict[str, int]
    refused: list[str]

    def cached(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            if delta.usage is not None:
                self.cached_tokens[delta.request_id] = delta.usage.cached_tokens


def counted(series: Sequence[Series]) -> dict[str, object]:
    return {one.name: one.value for one in series if one.name in COUNTED}


def outline(plan: StepPlan) -> object:
    """All of a plan but the ids of tokens drawn, which each executor draws in its own way."""
    chunks = [
        (
            chunk.sequence_id,
            chunk.start,
            len(chunk.token_ids),
            chunk.token_ids if chunk.start + len(chunk.token_ids) <= len(COMMON) else None,
            chunk.block_ids,
            None if chunk.sample is None else (chunk.sample.seeds, chunk.sample.output_index, chunk.sample.choice),
            chunk.follows_draw,
        )
        for chunk in plan.chunks
    ]
    return plan.step, plan.copies, chunks


class StepByStep:
    """An executor that lets the requests of each step in before it carries the step out."""

    def __init__(self, inner: Executor, plans: list[StepPlan]) -> None:
        self.arrive: Callable[[int], None] = lambda _: None
        self._inner = inner
        self._plans = plans

    @property
    def capacity(self) -> Capacity:
        return self._inner.capacity

    def prepare(self, params: SamplingParams) -> None:
        self._inner.prepare(params)

    def begin(self, plan: StepPlan) -> Pending:
        self._plans.append(plan)
        self.arrive(plan.step)
        return self._inner.begin(plan)

    def close(self) -> None:
        self._inner.close()


async def by_engine(make_executor: MakeExecutor, capacity: Capacity) -> Seen:
    seen = Seen([], {}, {}, [])
    executor = StepByStep(make_executor(capacity), seen.plans)
    engine = Engine(executor=executor, policy=POLICY, card=CARD)
    loop, tasks = asyncio.get_running_loop(), list[asyncio.Task[None]]()

    async def serve(wanted: Request) -> None:
        try:
            async for delivery in engine.generate(wanted):
                seen.cached(delivery.deltas)
        except BakehouseError:
            seen.refused.append(wanted.request_id)

    async def submit(step: int) -> None:
        for wanted in ARRIVALS.get(step, ()):
            tasks.append(asyncio.create_task(serve(wanted)))
            await asyncio.sleep(0)  # by then it is in the engine's queue

    executor.arrive = lambda step: asyncio.run_coroutine_threadsafe(submit(step), loop).result(WAIT_S)
    engine.start()
    async with asyncio.timeout(WAIT_S):
        await submit(-1)
        n_awaited = 0
        while n_awaited < len(tasks):
            await tasks[n_awaited]
            n_awaited += 1
    await engine.close()
    seen.counted = counted(engine.series)
    return seen


def by_simulator(capacity: Capacity) -> Seen:
    seen, counts = Seen([], {}, {}, []), replica_counts()
    executor = StepByStep(SimulatedExecutor(capacity, StepCost(step_s=1.0), vocabulary_size=200), seen.plans)
    clock = VirtualClock()
    replica = SimulatedReplica(
        card=CARD,
        scheduler=Scheduler(
            capacity=capacity, policy=POLICY, model_digest=CARD.model_digest, hash_key=CARD.hash_key, counts=counts
        ),
        executor=executor,
        clock=clock,
        deliver=seen.cached,
        refuse=lambda refused, _: seen.refused.append(refused.request_id),
    )

    def submit(step: int) -> None:
        for wanted in ARRIVALS.get(step, ()):
            replica.submit(wanted)

    executor.arrive = submit
    submit(-1)
    clock.run()
    seen.counted = counted(counts.series())
    return seen


@pytest.mark.parametrize("max_flights", [1, 2], ids=["one by one", "overlapping"])
@pytest.mark.parametrize("make_executor", [make_in_process, make_fake], ids=["cpu", "fake"])
async def test_c64_the_simulator_takes_the_engine_s_own_steps(
    make_executor: MakeExecutor, max_flights: int
) -> None:
    capacity = replace(CAPACITY, max_flights=max_flights)
    real, simulated = await by_engine(make_executor, capacity), by_simulator(capacity)
    for one, other in zip(real.plans, simulated.plans, strict=True):
        assert outline(one) == outline(other)
    assert simulated.counted == real.counted
    assert simulated.cached_tokens == real.cached_tokens
    assert simulated.refused == real.refused != []
    assert max(ARRIVALS) in {plan.step for plan in real.plans}, "not all requests came"
    n_preemptions, n_hits = real.counted[PREEMPTIONS.name], real.counted[PREFIX_HIT_TOKENS.name]
    assert n_preemptions != 0
    assert n_hits != 0
