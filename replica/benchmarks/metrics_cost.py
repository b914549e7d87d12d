"""What metrics cost a replica at 64 streams, as a share of its steps.

PYTHONPATH=replica .venv/bin/python replica/benchmarks/metrics_cost.py

Engines step 64 decoding sequences on the fake executor, driven from here instead of by their threads. Steps with
and without metrics take turns in one run, so that both meet the same machine: the median of the differences of
neighbours, with its standard error. The counting of a step is also timed by itself, many times over. To the larger
of both comes what happens by the second: two copies of all series, and one hand-over to a real Ray, vLLM's names
included, on the event loop. All are CPU times.

The share is that of the shortest step there can be, with no model at all, and of one of 20 ms.
"""

import logging
import time
from collections.abc import Callable
from statistics import median

import ray
from bakehouse_replica.core.call import Call
from bakehouse_replica.core.counts import Counts
from bakehouse_replica.core.metric_table import METRICS, Source
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.sequence import Sequence
from bakehouse_replica.core.tally import Tally
from bakehouse_replica.core.types import Capacity, FinishReason, ReplicaCard, Request, SchedulingPolicy, TokenDelta
from bakehouse_replica.core.vllm_table import VLLM_METRICS
from bakehouse_replica.engine import Engine
from bakehouse_replica.executors.fake import FakeExecutor
from bakehouse_replica.meter import Meter
from bakehouse_replica.ray_metrics import RayMetrics

N_STREAMS = 64
N_PROMPT = 64
N_ENGINES, N_PAIRS = 6, 400
N_REPEATS = 2000
MAX_MODEL_LEN = N_PROMPT + 2 * N_PAIRS + 200
BLOCK_SIZE = 16
MODEL_STEP_S = 0.020
LIMIT = 0.03
CAPACITY = Capacity(
    n_blocks=N_STREAMS * (MAX_MODEL_LEN // BLOCK_SIZE + 1),
    block_size=BLOCK_SIZE,
    max_step_tokens=N_STREAMS * N_PROMPT,
    max_sequences=N_STREAMS,
)
CARD = ReplicaCard(
    replica_id="r",
    model_name="fake",
    model_digest="fake",
    hash_key=b"",
    block_size=BLOCK_SIZE,
    n_blocks=CAPACITY.n_blocks,
    vocabulary_size=1000,
    max_model_len=MAX_MODEL_LEN,
    max_sequences=N_STREAMS,
)


class NoMeter(Meter):
    """Counts nothing."""

    def count_step(self, begun_at: float, planned_at: float, executed_at: float, published_at: float) -> None:
        """Nothing."""

    def is_due(self, now: float) -> bool:
        """Never."""
        return False

    def audit_if_due(self, check: Callable[[], None], clock: Callable[[], float], *, is_idle: bool) -> None:
        """Never."""


class NoTally(Tally):
    """Counts nothing."""

    def admit(self, call: Call, now: float) -> None:
        """Nothing."""

    def depart(self, n_sequences: int, n_tokens: int, n_copies: int) -> None:
        """Nothing."""

    def draw(self, n_tokens: int) -> None:
        """Nothing."""

    def begin_output(self, call: Call) -> None:
        """Nothing but what keeps it from coming again."""
        call.first_token_at = 0.0

    def end(self, last: Sequence, reason: FinishReason) -> None:
        """Nothing."""


def decoding_engine() -> Engine:
    """All streams have their first tokens."""
    policy = SchedulingPolicy(max_model_len=MAX_MODEL_LEN, max_prefill_tokens=CAPACITY.max_step_tokens)
    engine = Engine(executor=FakeExecutor(CAPACITY), policy=policy, card=CARD)
    for index in range(N_STREAMS):
        params = SamplingParams(temperature=1.0, seed=index)
        prompt = (index, *range(1, N_PROMPT))
        engine._scheduler.add(Request(request_id=str(index), prompt_ids=prompt, params=params), 0.0)
    while engine._scheduler.load().waiting_tokens:
        engine._step()
    return engine


def cpu_s(work: Callable[[], object], n_times: int) -> float:
    """CPU seconds of one of so many calls."""
    begun_s = time.thread_time()
    for _ in range(n_times):
        work()
    return (time.thread_time() - begun_s) / n_times


def paired() -> tuple[float, float, float]:
    """CPU seconds of a step with metrics, by how much it is longer than one without, and the error of that."""
    with_s: list[float] = []
    added_s: list[float] = []
    for _ in range(N_ENGINES):
        engine = decoding_engine()
        counting = (engine._meter, engine._scheduler._tally)
        silent = (NoMeter(), NoTally(Counts(()), CAPACITY))
        for index in range(N_PAIRS):
            spent_s = {}
            for ways in ((counting, silent), (silent, counting))[index % 2]:
                engine._meter, tally = ways
                for owner in (engine._scheduler, engine._scheduler._phases, engine._scheduler._ends):
                    owner._tally = tally
                spent_s[ways] = cpu_s(lambda: (engine._take_commands(), engine._step()), 1)  # noqa: B023 - at once
            with_s.append(spent_s[counting])
            added_s.append(spent_s[counting] - spent_s[silent])
    middle = median(added_s)
    spread = 1.48 * median(abs(each - middle) for each in added_s)  # of a normal distribution, its deviation
    return median(with_s), middle, 1.25 * spread / len(added_s) ** 0.5


def counting_s(engine: Engine) -> float:
    """CPU seconds of what counts in one step, by itself."""
    meter, tally, clock = engine._meter, engine._scheduler._tally, time.monotonic
    deltas = [TokenDelta(request_id=str(index), choice=0, start=9, token_ids=(1,)) for index in range(N_STREAMS)]
    calls = [next(iter(engine._scheduler._roster.calls.values()))] * N_STREAMS
    grants = dict.fromkeys(range(N_STREAMS), 1)

    def count() -> None:
        meter.audit_if_due(engine._scheduler.check, clock, is_idle=False)
        meter.is_due(0.0)
        tally.depart(N_STREAMS, sum(grants.values()), 0)
        for call in calls:
            if call.first_token_at is None:
                tally.begin_output(call)
        tally.draw(sum([len(delta.token_ids) for delta in deltas]))
        meter.count_step(0.0, clock(), clock(), clock())

    return median(cpu_s(count, 20) for _ in range(N_REPEATS // 20))


def by_the_second_s(engine: Engine) -> tuple[float, float]:
    """CPU seconds of a copy of all series, and of handing one over to Ray."""
    meter, scheduler = engine._meter, engine._scheduler

    def copy() -> None:
        scheduler.note(engine._load, time.monotonic())
        meter.take(0.0, serves=True)

    copy_s = median(cpu_s(copy, 10) for _ in range(50))
    groups = [
        RayMetrics(metric for metric in METRICS if metric.source is Source.REPLICA),
        RayMetrics(VLLM_METRICS, {"model_name": "fake"}),
    ]

    def hand_over() -> None:
        engine._step()  # so that counters have changed
        copy()
        begun_s = time.thread_time()
        for group in groups:
            group.push(engine.series)
        pushed_s.append(time.thread_time() - begun_s)

    pushed_s: list[float] = []
    for _ in range(50):
        hand_over()
    return copy_s, median(pushed_s)


def main() -> None:
    """Prints each cost and its share."""
    engine = decoding_engine()
    engine._step()
    with_s, added_s, error_s = paired()
    alone_s = counting_s(engine)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    copy_s, push_s = by_the_second_s(engine)
    ray.shutdown()
    per_second_s = 2 * copy_s + push_s
    print(f"{N_STREAMS} streams, fake executor: a step takes {1e3 * with_s:.2f} ms of CPU time")
    print(f"counting in a step: {1e6 * alone_s:.1f} us by itself")
    print(
        f"counting in a step: {1e6 * added_s:.1f} +- {1e6 * error_s:.1f} us, paired with steps that do not count"
    )
    print(f"by the second: 2 copies of {1e6 * copy_s:.0f} us, 1 hand-over to Ray of {1e6 * push_s:.0f} us")
    worst_s = max(alone_s, added_s)
    for name, step_s in (("the shortest step", with_s), (f"a step of {1e3 * MODEL_STEP_S:.0f} ms", MODEL_STEP_S)):
        share = worst_s / step_s + per_second_s
        verdict = "under" if share < LIMIT else "OVER"
        print(f"share of {name} ({1e3 * step_s:.2f} ms): {share:.2%}, {verdict} {LIMIT:.0%}")


if __name__ == "__main__":
    main()
