"""Where the time of a decode step goes, and how far the step is from what the machine can do at most.

    .venv/bin/python replica/benchmarks/decode_step.py [--sequences 1 32] [--context 128] [--weights float32 int8]

Runs what an engine runs, without Ray: the scheduler plans, the executor of the model executes, the scheduler
applies, the deltas are posted to one event loop. A step plays its operations in one call; for the breakdown they
are called one by one, and timed. The least time is max(bytes / bandwidth, operations / peak), with
the limits that `kernels/benchmarks/limits.py` measures in the same process; bytes are those of the packed weights
and of all contexts' keys and values, operations those of products and attention.
"""

import argparse
import asyncio
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import get_args

import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.cpu.ops import CpuOps
from bakehouse_kernels.cpu.packing import WeightFormat, packed_bytes
from bakehouse_kernels.dispatch import default_block_size, kv_dtype_beside
from bakehouse_replica.core.executor import execute
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.scheduler import Scheduler
from bakehouse_replica.core.types import Capacity, ModelSource, Request, SchedulingPolicy
from bakehouse_replica.executors.in_process import InProcessExecutor, build_executor
from bakehouse_replica.mailbox import Mailbox
from bakehouse_replica.model.spec import ModelSpec, read_spec
from bakehouse_replica.model.weights import load_weights
from bakehouse_replica.source import ModelFiles, open_source
from bakehouse_replica.streams import StreamTable

sys.path.insert(0, str(Path(__file__).parents[2] / "kernels" / "benchmarks"))
from limits import Limits, measured
from timed_ops import TimedOps

CPU = torch.device("cpu")
N_STEPS = 40
PRODUCTS = ("linear", "add_linear", "gated_linear")
ATTENTION = ("paged_attention", "plan_attention")
ROWS = ("rms_norm", "rope_and_write")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one step reads and computes."""

    n_bytes: float
    n_product_operations: float
    n_attention_operations: float

    def least_time_s(self, limits: Limits, weights: WeightFormat) -> float:
        """Under these limits; attention is float32 always."""
        n_operations: dict[WeightFormat, float] = {"float32": self.n_attention_operations}
        n_operations[weights] = n_operations.get(weights, 0.0) + self.n_product_operations
        return limits.least_time_s(n_bytes=self.n_bytes, n_operations=n_operations)


def work_of(spec: ModelSpec, n_sequences: int, context: float, weights: WeightFormat) -> Work:
    """Of a step that decodes one token for each sequence."""
    width, hidden = spec.head_dim * spec.n_heads, spec.hidden_size
    qkv = hidden, width + 2 * spec.head_dim * spec.n_kv_heads
    matrices = [qkv, (width, hidden), (hidden, 2 * spec.feed_forward_size), (spec.feed_forward_size, hidden)]
    shapes = [*matrices * spec.n_layers, (hidden, spec.vocabulary_size)]
    kv_bytes = n_sequences * context * spec.n_layers * 2 * spec.n_kv_heads * spec.head_dim
    kv_bytes *= kv_dtype_beside(weights).itemsize
    return Work(
        n_bytes=sum(packed_bytes(n_in, n_out, weights) for n_in, n_out in shapes) + kv_bytes,
        n_product_operations=2 * n_sequences * sum(n_in * n_out for n_in, n_out in shapes),
        n_attention_operations=4 * n_sequences * context * spec.n_layers * width,
    )


def most_tokens(n_sequences: int, context: int) -> int:
    """Of a sequence: its prompt, what it decodes while others are still prefilled, and the measured steps."""
    return context + N_STEPS + n_sequences + 8


def executor_of(
    files: ModelFiles, spec: ModelSpec, ops: Ops, n_sequences: int, context: int, weight_format: WeightFormat
) -> InProcessExecutor:
    """The executor of the model."""
    weights = load_weights(files, spec, dtype=torch.float32, device=CPU, rotated=weight_format == "int8")
    block_size = default_block_size(CPU)
    capacity = Capacity(
        n_blocks=n_sequences * (most_tokens(n_sequences, context) // block_size + 1),
        block_size=block_size,
        max_step_tokens=512,
        max_sequences=n_sequences,
    )
    return build_executor(spec=spec, weights=weights, ops=ops, capacity=capacity)


async def measure(
    executor: InProcessExecutor, n_sequences: int, context: int, clear: Callable[[], None]
) -> tuple[float, dict[str, float]]:
    """The median time of a step, and of its parts the mean, in seconds; `clear` is called before the steps."""
    params = SamplingParams(temperature=0.0, seed=0)
    first = context - N_STEPS // 2  # so that the mean context is what was asked for
    policy = SchedulingPolicy(max_model_len=most_tokens(n_sequences, context))
    scheduler = Scheduler(capacity=executor.capacity, policy=policy, model_digest="", hash_key=b"")
    streams = StreamTable()
    for index in range(n_sequences):
        prompt_ids = tuple((index * 7919 + 31 * i) % 40_000 + 100 for i in range(first))
        request = Request(request_id=str(index), prompt_ids=prompt_ids, params=params)
        streams.open(request, Mailbox(1))
        scheduler.add(request, 0.0)
    while scheduler.load().waiting_tokens:
        plan = scheduler.plan(0.0)
        assert plan is not None, "prompts wait"
        scheduler.apply(execute(executor, plan), 0.0)
    steps, parts = [], defaultdict(float)
    clear()
    for _ in range(N_STEPS):
        times = [perf_counter()]
        plan = scheduler.plan(0.0)
        times.append(perf_counter())
        assert plan is not None, "sequences decode"
        assert len(plan.chunks) == n_sequences, "all of them"
        result = execute(executor, plan)
        times.append(perf_counter())
        deltas = scheduler.apply(result, 0.0)
        times.append(perf_counter())
        streams.deliver(deltas)
        times.append(perf_counter())
        await asyncio.sleep(0)  # the event loop's own work, on another thread in an engine
        steps.append(times[-1] - times[0])
        parts["scheduling"] += (times[1] - times[0] + times[3] - times[2]) / N_STEPS
        parts["publishing"] += (times[4] - times[3]) / N_STEPS
        parts["execute"] += (times[2] - times[1]) / N_STEPS
    return statistics.median(steps), parts


def by_operation(parts: dict[str, float], ops: TimedOps) -> dict[str, float]:
    """The parts with those of `execute`."""
    timed = {
        "products": sum(ops.seconds[name] for name in PRODUCTS),
        "attention": sum(ops.seconds[name] for name in ATTENTION),
        "norm, rope, cache": sum(ops.seconds[name] for name in ROWS),
        "sampling": ops.seconds["survey"],
    }
    inside = {name: seconds / N_STEPS for name, seconds in timed.items()}
    others = {name: seconds for name, seconds in parts.items() if name != "execute"}
    return {**others, **inside, "batch, Python between": parts["execute"] - sum(inside.values())}


def main() -> None:
    """Measures and prints a block of lines per kind of weights and number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--weights", nargs="+", choices=get_args(WeightFormat), default=get_args(WeightFormat))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    limits = measured(arguments.threads)
    files = open_source(ModelSource(model=arguments.model))
    spec = read_spec(files)
    print(f"{arguments.model}, {arguments.threads} threads, context {arguments.context}; limits: {limits}")
    for weights in arguments.weights:
        for n_sequences in arguments.sequences:
            ops = CpuOps(arguments.threads, weight_format=weights, kv_dtype=kv_dtype_beside(weights))
            timed = TimedOps(ops)
            size = n_sequences, arguments.context
            played, called = (executor_of(files, spec, each, *size, weights) for each in (ops, timed))
            step_s, _ = asyncio.run(measure(played, *size, lambda: None))
            called_s, parts = asyncio.run(measure(called, *size, timed.clear))
            parts = by_operation(parts, timed)
            least_s = work_of(spec, n_sequences, arguments.context, weights).least_time_s(limits, weights)
            print(
                f"\n{weights}, {n_sequences} sequences: {step_s * 1e3:.2f} ms "
                f"a step, {n_sequences / step_s:.0f} tokens/s; least {least_s * 1e3:.2f} ms: "
                f"{step_s / least_s:.2f} times that; operations called one by one: {called_s * 1e3:.2f} ms"
            )
            for name, seconds in sorted(parts.items(), key=lambda part: -part[1]):
                print(f"    {name:<22} {seconds * 1e3:8.2f} ms {seconds / sum(parts.values()):6.1%}")


if __name__ == "__main__":
    main()
