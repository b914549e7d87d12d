"""What the engine costs per step besides the model: 256 sequences on the fake executor, one token a step each.

CPU milliseconds per step of the engine's thread (scheduling: `plan` and `apply`; publishing: deltas to their
recipients) and of the event loop that hands them on: to a request's own stream each, or to a gateway's
subscription, packed into one message a step; pickled as Ray would, but Ray and Serve are not in it (see
`cluster/benchmarks/data_plane.py`). First without overlap, then with it: what that gains, `overlap.py` shows. Ends
with what the engine's thread spends the most time in, the fake executor left out.

PYTHONPATH=replica .venv/bin/python replica/benchmarks/engine_step.py
"""

import asyncio
import cProfile
import pickle
import pstats
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import pairwise, product
from statistics import median
from time import thread_time
from typing import ParamSpec, TypeVar

from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.scheduler import Scheduler
from bakehouse_replica.core.step_message import Received, ReturnAddress, Subscribe
from bakehouse_replica.core.types import Capacity, ReplicaCard, Request, SchedulingPolicy, StepPlan
from bakehouse_replica.engine import Engine
from bakehouse_replica.executors.fake import FakeExecutor
from bakehouse_replica.service import ReplicaService
from bakehouse_replica.streams import StreamTable

N_SEQUENCES = 256
N_PROMPT = 64
N_STEPS = 300
N_WARM_UP = 50  # prompts are computed, and everybody decodes
BLOCK_SIZE = 16
STEP_TOKENS = N_SEQUENCES * N_PROMPT
MAX_MODEL_LEN = N_PROMPT + N_STEPS
REPORT_S = 0.5  # as often as a gateway; a replica gives up one that is silent for long
CAPACITY = Capacity(
    n_blocks=N_SEQUENCES * (MAX_MODEL_LEN // BLOCK_SIZE + 1),
    block_size=BLOCK_SIZE,
    max_step_tokens=STEP_TOKENS,
    max_sequences=N_SEQUENCES,
)
PROFILED = r"(scheduler|sequence|roster|room|budget|blocks|flight|maker|streams|mailbox|engine)\.py|socket"
N_PROFILED_LINES = 16
P = ParamSpec("P")
T = TypeVar("T")
Serving = Callable[[ReplicaService, Request, int], AsyncGenerator[object, None]]


async def _settled_cpu_s() -> float:
    for _ in range(8):  # what has been posted is handed on: two turns a hop, and two hops at most
        await asyncio.sleep(0)
    return thread_time()


@dataclass
class Meter:
    """CPU seconds of the engine's thread by part, one entry a call."""

    spent_s: dict[str, list[float]] = field(default_factory=dict)

    def on(self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        spent_s = self.spent_s.setdefault(name, [])

        @wraps(function)
        def measured(*args: P.args, **kwargs: P.kwargs) -> T:
            begun_s = thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent_s.append(thread_time() - begun_s)

        return measured

    def median_ms(self, name: str) -> float:
        return 1e3 * median(self.spent_s[name][N_WARM_UP:])


def by_streams(service: ReplicaService, request: Request, index: int) -> AsyncGenerator[object, None]:
    """Each request is a stream of its own."""
    return service.generate(request)


def by_subscription(service: ReplicaService, request: Request, index: int) -> AsyncGenerator[object, None]:
    """The gateway has subscribed."""
    return service.serve(request, ReturnAddress(gateway_id="g", first_stream=index))


class _StandIn:
    """Stands in for a gateway: takes its subscription's messages, and tells of them while they come."""

    def __init__(self, service: ReplicaService) -> None:
        self._service = service
        self._n_messages = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take())
            tasks.create_task(self._report())

    async def _take(self) -> None:
        subscribe = Subscribe(replica_id=CARD.replica_id, gateway_id="g", subscription_id="g")
        async with aclosing(self._service.subscribe(subscribe)) as messages:
            async for message in messages:
                self._n_messages += 1
                pickle.dumps(message)  # as Ray does

    async def _report(self) -> None:
        while True:
            await self._service.status(Received(gateway_id="g", n_messages={"g": self._n_messages}))
            await asyncio.sleep(REPORT_S)


async def _read(items: AsyncGenerator[object, None]) -> None:
    async with aclosing(items):
        async for item in items:
            pickle.dumps(item)  # as Ray does


async def serve_all(
    serving: Serving, profile: cProfile.Profile | None = None, max_flights: int = 1
) -> tuple[Meter, list[float]]:
    """What the engine's thread has spent, and the event loop's CPU seconds, one entry a step."""
    loop = asyncio.get_running_loop()
    loop_cpu_s: list[float] = []

    def let_loop_settle(plan: StepPlan) -> None:
        # So the two never run at the same time, and neither pays for the other's hold on the interpreter.
        loop_cpu_s.append(asyncio.run_coroutine_threadsafe(_settled_cpu_s(), loop).result())

    capacity = replace(CAPACITY, max_flights=max_flights)
    engine = Engine(executor=FakeExecutor(capacity, before_step=let_loop_settle), policy=POLICY, card=CARD)
    meter = Meter()
    scheduler: Scheduler = engine._scheduler
    streams: StreamTable = engine._streams
    scheduler.plan = meter.on("plan", scheduler.plan)  # type: ignore[method-assign]
    scheduler.apply = meter.on("apply", scheduler.apply)  # type: ignore[method-assign]
    streams.deliver = meter.on("publish", streams.deliver)  # type: ignore[method-assign]
    if profile is not None:
        engine._thread = threading.Thread(target=profile.runcall, args=(engine._run,), daemon=True)
    engine.start()
    service = ReplicaService(engine)

    gateway = asyncio.create_task(_StandIn(service).run())
    await asyncio.sleep(0)
    requests = [
        asyncio.create_task(_read(serving(service, _request(index), index))) for index in range(N_SEQUENCES)
    ]
    await asyncio.gather(*requests)
    gateway.cancel()
    await engine.close()
    return meter, [later - earlier for earlier, later in pairwise(loop_cpu_s)]


POLICY = SchedulingPolicy(max_model_len=MAX_MODEL_LEN, max_prefill_tokens=STEP_TOKENS)
CARD = ReplicaCard(
    replica_id="r",
    model_name="fake",
    model_digest="fake",
    hash_key=b"",
    block_size=BLOCK_SIZE,
    n_blocks=CAPACITY.n_blocks,
    vocabulary_size=50_000,
    max_model_len=MAX_MODEL_LEN,
    max_sequences=N_SEQUENCES,
)


def _request(index: int) -> Request:
    params = SamplingParams(temperature=1.0, seed=index, max_tokens=N_STEPS)
    return Request(request_id=f"req-{index:032x}", prompt_ids=(index, *range(1, N_PROMPT)), params=params)


def main() -> None:
    """Prints a line for each way, and a profile of the second."""
    print(f"{N_SEQUENCES} sequences, CPU ms a step (median)   plan  apply  publish  engine   event loop")
    ways = (("a stream each", by_streams), ("one subscription", by_subscription))
    for max_flights, (name, serving) in product((1, 2), ways):
        meter, loop_s = asyncio.run(serve_all(serving, max_flights=max_flights))
        parts = [meter.median_ms(part) for part in ("plan", "apply", "publish")]
        way = name if max_flights == 1 else f"{name}, overlap"
        loop_ms = 1e3 * median(loop_s[N_WARM_UP:])
        print(f"{way:42} {parts[0]:6.2f} {parts[1]:6.2f} {parts[2]:8.2f} {sum(parts):7.2f} {loop_ms:12.2f}")
    profile = cProfile.Profile()
    asyncio.run(serve_all(by_subscription, profile))
    print("\nThe engine's thread, one subscription (the profiler itself slows it down):")
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(PROFILED, N_PROFILED_LINES)


if __name__ == "__main__":
    main()
