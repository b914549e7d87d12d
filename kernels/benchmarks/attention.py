"""Time attention over the paged cache, with the shapes of SmolLM2-135M, all layers.

    OMP_WAIT_POLICY=passive python kernels/benchmarks/attention.py [--threads 2]

A line per batch: milliseconds a step (best of several) of the compiled kernel at two block sizes, of the
reference, and of torch's attention called once a sequence over a cache that is already contiguous; then what
share of the machine's read bandwidth the compiled kernel reaches. Every layer has a cache of its own, as in a
model: one that is read again and again would lie in the processor's cache.
"""

import argparse
import time
from collections.abc import Callable

import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.dispatch import select_ops
from bakehouse_kernels.layout import KVCache
from bakehouse_kernels.reference import ReferenceOps
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

N_LAYERS, N_HEADS, N_KV_HEADS, HEAD_DIM = 30, 9, 3, 64
FLOAT_BYTES = 4


def best_time_s(step: Callable[[], object], n_runs: int) -> float:
    """The shortest run after one that warms up: the least disturbed by other processes."""
    step()
    times = []
    for _ in range(n_runs):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return min(times)


def paged_step(
    ops: Ops, n_sequences: int, n_queries: int, context_len: int, block_size: int
) -> Callable[[], object]:
    """A step of equal chunks whose blocks lie scattered over the pool."""
    n_blocks_each = -(-context_len // block_size)
    n_blocks = n_sequences * n_blocks_each
    cache = KVCache.allocate(
        n_layers=N_LAYERS,
        n_blocks=n_blocks,
        block_size=block_size,
        n_kv_heads=N_KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for tensor in (*cache.key, *cache.value):
        tensor.normal_()
    q_TND = torch.randn(n_sequences * n_queries, N_HEADS, HEAD_DIM)
    table_SB = torch.randperm(n_blocks).int().view(n_sequences, n_blocks_each)
    query_start = torch.arange(n_sequences + 1).int() * n_queries
    lengths = torch.full((n_sequences,), context_len, dtype=torch.int32)

    def step() -> None:
        for layer in range(N_LAYERS):
            ops.paged_attention(q_TND, cache, layer, table_SB, query_start, lengths, scale=HEAD_DIM**-0.5)

    return step


def torch_step(n_sequences: int, n_queries: int, context_len: int) -> Callable[[], object]:
    """Torch's attention, a call a sequence, keys and values `[H, L, D]` side by side in memory."""
    shape = (N_LAYERS, n_sequences, 1, N_KV_HEADS, context_len, HEAD_DIM)
    key, value = torch.randn(shape), torch.randn(shape)
    q = torch.randn(n_sequences, 1, N_HEADS, n_queries, HEAD_DIM)
    mask = torch.ones(n_queries, context_len, dtype=torch.bool).tril(context_len - n_queries)

    def step() -> None:
        for layer in range(N_LAYERS):
            for s in range(n_sequences):
                scaled_dot_product_attention(q[s], key[layer, s], value[layer, s], attn_mask=mask, enable_gqa=True)

    return step


def read_bandwidth(n_runs: int) -> float:
    """Bytes a second at which torch sums an array too large for any cache."""
    array: Tensor = torch.ones(100_000_000)
    return array.numel() * FLOAT_BYTES / best_time_s(array.sum, n_runs)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    ops = select_ops(torch.device("cpu"), torch.float32, arguments.threads)
    bandwidth = read_bandwidth(arguments.runs)
    print(f"{arguments.threads} threads, reading at {bandwidth / 1e9:.1f} GB/s; ms a step of {N_LAYERS} layers")
    print("sequences queries context | block 16  block 32 | reference    torch | GB/s (32)  of bandwidth")
    batches = [(s, 1, length) for length in (128, 768) for s in (1, 8, 32)] + [(1, 256, 256), (1, 256, 768)]
    for n_sequences, n_queries, context_len in batches:
        steps = [paged_step(ops, n_sequences, n_queries, context_len, block_size) for block_size in (16, 32)]
        steps.append(paged_step(ReferenceOps(), n_sequences, n_queries, context_len, 32))
        steps.append(torch_step(n_sequences, n_queries, context_len))
        block_16, block_32, reference, torch_own = (best_time_s(step, arguments.runs) for step in steps)
        cache_bytes = 2 * n_sequences * context_len * N_KV_HEADS * HEAD_DIM * FLOAT_BYTES * N_LAYERS
        rate = cache_bytes / block_32
        print(
            f"{n_sequences:9} {n_queries:7} {context_len:7} | {block_16 * 1e3:8.2f}  {block_32 * 1e3:8.2f} | "
            f"{reference * 1e3:9.1f} {torch_own * 1e3:8.2f} | {rate / 1e9:9.1f}  {rate / bandwidth:12.0%}"
        )


if __name__ == "__main__":
    main()
