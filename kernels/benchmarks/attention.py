"""Time attention over the paged cache, with the shapes of SmolLM2-135M, all layers.

    .venv/bin/python kernels/benchmarks/attention.py [--threads 2] [--kv-dtype float16] [--cpu-time]

A line per batch: milliseconds a step (best of several), the rates that come of it, torch's attention over keys
and values that are already gathered side by side, how many times faster this one is, and the share of what the
machine's limits allow (`limits.py`). `--cpu-time` counts the processor's time instead of the clock's, for one
thread on a machine that others use as well. Every layer has a cache of its own, as in a model: one that is read
again and again would lie in the processor's cache.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from bakehouse_kernels.cpu.ops import CpuOps
from limits import measured
from torch.nn.functional import scaled_dot_product_attention

N_LAYERS, N_HEADS, N_KV_HEADS, HEAD_DIM = 30, 9, 3, 64
KV_DTYPES = {"float32": torch.float32, "float16": torch.float16}
BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Equal chunks: the last `n_queries` of `context_len` tokens of each sequence, the first `n_shared` common."""

    n_sequences: int
    n_queries: int
    context_len: int
    n_shared: int = 0

    @property
    def n_operations(self) -> float:
        """Of a step of all layers, a multiply-add as two: scores and sums over what each row sees."""
        n_seen = self.n_queries * self.context_len - self.n_queries * (self.n_queries - 1) // 2
        return 4.0 * self.n_sequences * n_seen * N_HEADS * HEAD_DIM * N_LAYERS

    def n_bytes(self, kv_dtype: torch.dtype) -> float:
        """Of keys and values in a step of all layers, each block once."""
        n_tokens = self.n_sequences * (self.context_len - self.n_shared) + self.n_shared
        return 2.0 * n_tokens * N_KV_HEADS * HEAD_DIM * kv_dtype.itemsize * N_LAYERS


SHAPES = [
    *(Shape(n_sequences=s, n_queries=1, context_len=length) for length in (128, 800) for s in (1, 8, 32)),
    Shape(n_sequences=1, n_queries=1, context_len=4096),
    Shape(n_sequences=16, n_queries=1, context_len=800),
    Shape(n_sequences=16, n_queries=1, context_len=800, n_shared=768),
    Shape(n_sequences=1, n_queries=256, context_len=256),
    Shape(n_sequences=1, n_queries=256, context_len=1024),
]


def best_time_s(step: Callable[[], object], n_runs: int, clock: Callable[[], float]) -> float:
    """The shortest run after one that warms up: the least disturbed by other processes."""
    times = []
    for _ in range(n_runs + 1):
        start = clock()
        step()
        times.append(clock() - start)
    return min(times[1:])


def paged_step(ops: CpuOps, shape: Shape) -> Callable[[], object]:
    """A step whose blocks lie scattered over the pool."""
    n_shared_blocks, n_blocks_each = shape.n_shared // BLOCK_SIZE, -(-shape.context_len // BLOCK_SIZE)
    n_blocks = shape.n_sequences * n_blocks_each
    cache = ops.new_cache(
        n_layers=N_LAYERS, n_blocks=n_blocks, block_size=BLOCK_SIZE, n_kv_heads=N_KV_HEADS, head_dim=HEAD_DIM
    )
    for tensor in (*cache.key, *cache.value):
        tensor.fill_(0.5)
    q_TND = torch.randn(shape.n_sequences * shape.n_queries, N_HEADS, HEAD_DIM)
    table_SB = torch.randperm(n_blocks).int().view(shape.n_sequences, n_blocks_each)
    table_SB[:, :n_shared_blocks] = table_SB[0, :n_shared_blocks]
    query_start = torch.arange(shape.n_sequences + 1).int() * shape.n_queries
    lengths = torch.full((shape.n_sequences,), shape.context_len, dtype=torch.int32)

    def step() -> None:
        plan = ops.plan_attention(table_SB, query_start, lengths)
        for layer in range(N_LAYERS):
            ops.paged_attention(q_TND, cache, layer, plan, scale=HEAD_DIM**-0.5)

    return step


def torch_step(shape: Shape) -> Callable[[], object]:
    """Torch's attention of all sequences at once, keys and values `[S, N, L, D]`, repeated for each query head.

    One layer's, and again for each: as many as the paged cache has would not fit.
    """
    key, value = torch.randn(2, shape.n_sequences, N_HEADS, shape.context_len, HEAD_DIM)
    q = torch.randn(shape.n_sequences, N_HEADS, shape.n_queries, HEAD_DIM)
    mask = torch.ones(shape.n_queries, shape.context_len, dtype=torch.bool)
    mask = mask.tril(shape.context_len - shape.n_queries)

    def step() -> None:
        for _ in range(N_LAYERS):
            if shape.n_queries == 1:
                scaled_dot_product_attention(q, key, value)
            elif shape.n_queries == shape.context_len:
                scaled_dot_product_attention(q, key, value, is_causal=True)
            else:
                scaled_dot_product_attention(q, key, value, attn_mask=mask)

    return step


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="float32")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    if arguments.cpu_time and arguments.threads != 1:
        parser.error("--cpu-time is for one thread")
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    kv_dtype = KV_DTYPES[arguments.kv_dtype]
    ops, limits = CpuOps(arguments.threads, kv_dtype=kv_dtype), measured(arguments.threads)
    print(
        f"{arguments.threads} threads, {limits.read_bytes_per_s / 1e9:.1f} GB/s, "
        f"{limits.operations_per_s['float32'] / 1e9:.0f} GFLOP/s at most; "
        f"keys and values in {arguments.kv_dtype}; ms a step of {N_LAYERS} layers"
    )
    print("sequences queries context shared |       ms GFLOP/s  GB/s |    torch  times | of limit")
    for shape in SHAPES:
        paged_s = best_time_s(paged_step(ops, shape), arguments.runs, clock)
        torch_s = best_time_s(torch_step(shape), arguments.runs, clock)
        least_s = limits.least_time_s(
            n_bytes=shape.n_bytes(kv_dtype), n_operations={"float32": shape.n_operations}
        )
        print(
            f"{shape.n_sequences:9} {shape.n_queries:7} {shape.context_len:7} {shape.n_shared:6} | "
            f"{paged_s * 1e3:8.2f} {shape.n_operations / paged_s / 1e9:7.0f} "
            f"{shape.n_bytes(kv_dtype) / paged_s / 1e9:5.1f} | {torch_s * 1e3:8.2f} {torch_s / paged_s:6.1f} | "
            f"{least_s / paged_s:8.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
