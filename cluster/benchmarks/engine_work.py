"""The work of `bakehouse bench` through scheduler and executor alone: what a server could deliver at most.

    .venv/bin/python cluster/benchmarks/engine_work.py [--workloads W2 W4] [--weights float32 int8]

No Ray, no HTTP, no tokenizer: prompts are random ids with the shared beginnings of the workload, each finished
request is followed by the next one at once. The difference to `bakehouse bench` is what the way between costs.
Steps are told apart by what they hold: tokens of prompts, or of answers alone.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from time import perf_counter

from bakehouse_cluster.bench.workloads import PRESETS, Demand
from bakehouse_replica.core.executor import Executor, execute
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.scheduler import Scheduler
from bakehouse_replica.core.types import ModelSource, Request, SchedulingPolicy, StepPlan
from bakehouse_replica.executors.in_process import load_executor
from bakehouse_replica.model.spec import read_spec
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_replica.source import open_source

CONTEXT = 2048
SETTINGS = {
    "float32": ReplicaSettings(),
    "bfloat16": ReplicaSettings(dtype="bfloat16"),
    "int8": ReplicaSettings(quantize="int8"),
}


@dataclass(slots=True)
class Steps:
    """Those of one kind."""

    n_steps: int = 0
    n_tokens: int = 0
    seconds: float = 0.0


def requests_of(name: str, seed: int, n_ids: int) -> Iterator[Request]:
    """The workload's requests, with ids for their prompts."""
    draw = Random(seed)
    prefixes: defaultdict[int | None, tuple[int, ...]] = defaultdict(
        lambda: tuple(draw.choices(range(100, n_ids), k=CONTEXT))
    )

    def prompt(demand: Demand) -> tuple[int, ...]:
        assert demand.n_input is not None, "a workload of given lengths"
        own = tuple(draw.choices(range(100, n_ids), k=demand.n_input - demand.n_prefix))
        return prefixes[demand.prefix_id][: demand.n_prefix] + own

    workload = PRESETS[name].workload
    for index, demand in enumerate(workload.demands(workload.n_requests, draw)):
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=demand.n_output)
        yield Request(request_id=f"{seed}-{index}", prompt_ids=prompt(demand), params=params)


def work(executor: Executor, scheduler: Scheduler, requests: Iterator[Request], n_users: int) -> dict[str, Steps]:
    """Serve all requests, so many at once."""
    steps: defaultdict[str, Steps] = defaultdict(Steps)
    n_open = 0
    for _ in range(n_users):
        n_open += _begin(scheduler, requests)
    while n_open:
        begun_at = perf_counter()
        plan = scheduler.plan(begun_at)
        assert plan is not None, "requests are open"
        deltas = scheduler.apply(execute(executor, plan), perf_counter())
        for delta in deltas:
            if delta.finish is not None:
                n_open += _begin(scheduler, requests) - 1
        of_kind = steps[_kind(plan)]
        of_kind.n_steps += 1
        of_kind.n_tokens += sum(len(chunk.token_ids) for chunk in plan.chunks)
        of_kind.seconds += perf_counter() - begun_at
    return steps


def _begin(scheduler: Scheduler, requests: Iterator[Request]) -> int:
    request = next(requests, None)
    if request is None:
        return 0
    scheduler.add(request, perf_counter())
    return 1


def _kind(plan: StepPlan) -> str:
    has_prompts = any(len(chunk.token_ids) > 1 for chunk in plan.chunks)
    return "with prompts" if has_prompts else "answers alone"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=sorted(PRESETS), default=sorted(PRESETS))
    parser.add_argument("--weights", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=2, help="the first warms up")
    asked = parser.parse_args()
    for weights in asked.weights:
        settings = replace(SETTINGS[weights], source=ModelSource(model=asked.model))
        files = open_source(settings.source)
        spec = read_spec(files)
        executor = load_executor(settings, files, spec, CONTEXT)
        for name in asked.workloads:
            policy = SchedulingPolicy(max_model_len=CONTEXT, max_prefill_tokens=settings.max_prefill_tokens)
            scheduler = Scheduler(capacity=executor.capacity, policy=policy, model_digest="", hash_key=b"")
            for seed in range(asked.rounds):
                begun_at = perf_counter()
                requests = requests_of(name, seed, spec.vocabulary_size)
                steps = work(executor, scheduler, requests, PRESETS[name].n_users)
                elapsed_s = perf_counter() - begun_at
            n_out = sum(request.params.max_tokens or 0 for request in requests_of(name, 0, spec.vocabulary_size))
            parts = "; ".join(
                f"{kind}: {each.n_steps} steps, {each.n_tokens} tokens, {each.seconds:.2f} s"
                for kind, each in sorted(steps.items())
            )
            rate = f"{n_out / elapsed_s:6.1f} tokens/s out in {elapsed_s:.2f} s"
            print(f"{weights:8} {name}: {rate} ({parts})", flush=True)


if __name__ == "__main__":
    main()
