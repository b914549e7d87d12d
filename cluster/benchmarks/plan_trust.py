"""How far off `bakehouse plan` is: what it predicts for the workloads of `bakehouse bench`, beside what happens.

    .venv/bin/python cluster/benchmarks/plan_trust.py [--weights int8] [--workloads W2 W4] [--rounds 3] [--cpu]

In each round the executor is calibrated, then each workload is served by an engine over the same executor in this
process, and simulated with the cost that was just fitted. So the two see the same minutes of the machine. Without
Ray and HTTP, whose work `bakehouse plan` leaves out: on a laptop they take a core's share of their own.

With `--cpu` the model computes in one thread, and its time is the thread's own CPU time, in the calibration and
when it serves, so that a machine that others use can be measured too. It then serves on the planner's virtual
clock: only the cost model stands in question, not what an engine does beside.
"""

import argparse
import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter, thread_time

from bakehouse_cluster.bench.arranging import arrange
from bakehouse_cluster.bench.result import Load
from bakehouse_cluster.bench.statistics import distribution
from bakehouse_cluster.bench.workloads import PRESETS
from bakehouse_cluster.plan.asking import RequestWriter
from bakehouse_cluster.plan.calibrate import fit, fit_of, measure, split, step_sizes
from bakehouse_cluster.plan.fleet import Fleet, ReplicaShape, closed_loop, simulated_executor
from bakehouse_replica.build import executor_of, step_sizes_of
from bakehouse_replica.core.executor import Executor, Pending
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import (
    Capacity,
    Request,
    SchedulingPolicy,
    StepPlan,
    StepResult,
)
from bakehouse_replica.engine import Engine
from bakehouse_replica.executors.simulated import StepCost
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_replica.source import open_source

SETTINGS = {
    "float32": ReplicaSettings(),
    "bfloat16": ReplicaSettings(dtype="bfloat16"),
    "int8": ReplicaSettings(quantize="int8"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one workload, measured or predicted."""

    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    e2e_p50_s: float

    def ratios(self, other: "Outcome") -> tuple[float, ...]:
        """Of this one's numbers to another's."""
        return (
            self.output_tokens_per_s / other.output_tokens_per_s,
            self.ttft_p50_s / other.ttft_p50_s,
            self.ttft_p90_s / other.ttft_p90_s,
            self.e2e_p50_s / other.e2e_p50_s,
        )


def requests_of(name: str, seed: int, vocabulary_size: int) -> Iterator[Request]:
    """The workload's requests, under ids that no other seed has."""
    preset = PRESETS[name]
    load = Load(kind="concurrency", value=preset.n_users)
    arrangement = arrange(name, preset.workload, load, seed)
    writer = RequestWriter(vocabulary_size=vocabulary_size, draw=arrangement.words, encode=_refuse)
    for request in map(writer.write, arrangement.demands):
        params = replace(request.params, temperature=0.0)
        yield replace(request, request_id=f"{name}-{seed}-{request.request_id}", params=params)


async def measured(engine: Engine, requests: Iterator[Request], n_users: int) -> Outcome:
    """Served by the engine to so many users, each of whom waits for an answer before the next request."""
    ttft_s: list[float] = []
    e2e_s: list[float] = []
    n_output = 0

    async def user() -> None:
        nonlocal n_output
        for request in requests:
            sent_at = perf_counter()
            first_at = None
            async for delivery in engine.generate(request):
                first_at = first_at or perf_counter()
                n_output += sum(len(delta.token_ids) for delta in delivery.deltas)
            assert first_at is not None, "an answer has a token"
            ttft_s.append(first_at - sent_at)
            e2e_s.append(perf_counter() - sent_at)

    begun_at = perf_counter()
    await asyncio.gather(*(user() for _ in range(n_users)))
    return _outcome(n_output / (perf_counter() - begun_at), ttft_s, e2e_s)


class CpuTimed:
    """An executor whose steps take as long as they keep this thread's core busy."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    @property
    def capacity(self) -> Capacity:
        """Of the executor."""
        return self._executor.capacity

    def prepare(self, params: SamplingParams) -> None:
        """As the executor does."""
        self._executor.prepare(params)

    def begin(self, plan: StepPlan) -> "CpuTimedStep":
        """As the executor does."""
        return CpuTimedStep(self._executor.begin(plan))

    def close(self) -> None:
        """As the executor does."""
        self._executor.close()


@dataclass(frozen=True, slots=True)
class CpuTimedStep:
    """A step of one that computes where its result is taken."""

    step: Pending

    def result(self) -> StepResult:
        """With the CPU time that it took."""
        begun_at = thread_time()
        return replace(self.step.result(), elapsed_s=thread_time() - begun_at)


def simulated(
    shape: ReplicaShape, requests: Iterator[Request], n_users: int, executor: Executor | None = None
) -> Outcome:
    """The same on the virtual clock; with an `executor` its steps, and their time, are real ones."""
    make_executor = simulated_executor if executor is None else lambda _: executor
    run = closed_loop(Fleet(shape, 1, make_executor=make_executor), requests, n_users)
    ttft_s = [record.ttft_s for record in run.records if record.ttft_s is not None]
    n_output = sum(record.n_output for record in run.records)
    return _outcome(n_output / run.duration_s, ttft_s, [record.latency_s for record in run.records])


def _outcome(rate: float, ttft_s: Sequence[float], e2e_s: Sequence[float]) -> Outcome:
    ttft, e2e = distribution(ttft_s), distribution(e2e_s)
    assert ttft is not None, "requests were answered"
    assert e2e is not None, "requests were answered"
    return Outcome(output_tokens_per_s=rate, ttft_p50_s=ttft.p50, ttft_p90_s=ttft.p90, e2e_p50_s=e2e.p50)


def _refuse(given: object) -> tuple[int, ...]:
    raise AssertionError(f"presets give lengths, not {given!r}")


@asynccontextmanager
async def _serving(engine: Engine) -> AsyncIterator[None]:
    engine.start()
    try:
        yield
    finally:
        await engine.close()


async def compare(weights: str, names: Sequence[str], asked: argparse.Namespace) -> None:
    """Prints a line for each round and workload, and the medians."""
    settings = replace(SETTINGS[weights], max_model_len=asked.max_model_len, device="cpu")
    if asked.cpu:
        settings = replace(settings, n_threads=1)
    files = open_source(settings.source)
    executor, vocabulary_size, max_model_len = executor_of(settings, files)
    policy = SchedulingPolicy(
        max_model_len=max_model_len, max_prefill_tokens=step_sizes_of(settings, files).max_prefill_tokens
    )
    shape = ReplicaShape(
        capacity=executor.capacity, policy=policy, cost=StepCost(), vocabulary_size=vocabulary_size
    )
    card = replace(shape.card("measured"), model_digest=files.digest)
    engine = Engine(executor=executor, policy=policy, card=card)
    sizes = step_sizes(
        executor.capacity, max_model_len=max_model_len, max_prefill_tokens=policy.max_prefill_tokens
    )
    ratios: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}

    async def served(name: str, seed: int) -> Outcome:
        requests, n_users = requests_of(name, seed, vocabulary_size), PRESETS[name].n_users
        if asked.cpu:
            return simulated(shape, requests, n_users, CpuTimed(executor))
        return await measured(engine, requests, n_users)

    async with _serving(engine):
        for name in names:
            await served(name, -1)
        for index in range(asked.rounds):
            # The engine is idle meanwhile, and leaves its executor alone.
            steps = measure(
                executor,
                sizes,
                vocabulary_size=vocabulary_size,
                advance=lambda: None,
                clock=thread_time if asked.cpu else perf_counter,
            )
            fitted, held_out = split(steps)
            cost = fit(fitted)
            found = fit_of(cost, held_out)
            print(f"{weights} round {index}: {cost}; held out: p50 {found.error_p50:.1%}", flush=True)
            for name in names:
                real = await served(name, index)
                requests = requests_of(name, index, vocabulary_size)
                told = simulated(replace(shape, cost=cost), requests, PRESETS[name].n_users)
                ratios[name].append(told.ratios(real))
                print(f"  {name}: measured {real}, predicted {told}", flush=True)
    print(f"{weights}: predicted / measured, median of {asked.rounds} (least to most)")
    for name, rows in ratios.items():
        spread = ", ".join(
            f"{label} {median(column):.2f} ({min(column):.2f} to {max(column):.2f})"
            for label, column in zip(
                ("output tok/s", "TTFT p50", "TTFT p90", "E2E p50"), zip(*rows, strict=True), strict=True
            )
        )
        print(f"  {name}: {spread}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", choices=SETTINGS, default=["float32"])
    parser.add_argument("--workloads", nargs="+", choices=sorted(PRESETS), default=sorted(PRESETS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="one thread, by its CPU time")
    parser.add_argument("--max-model-len", type=int, default=1024)
    asked = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    for weights in asked.weights:
        asyncio.run(compare(weights, asked.workloads, asked))


if __name__ == "__main__":
    main()
