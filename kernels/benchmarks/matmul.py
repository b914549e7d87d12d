"""Time `x @ w` (weights `[in, out]`), `F.linear` (weights `[out, in]`) and the served product (weights packed).

    OMP_WAIT_POLICY=passive python kernels/benchmarks/matmul.py [--threads 2]

The shapes are SmolLM2-135M's four products of a layer and its head; enough of each to outgrow the cache.
"""

import argparse
import time
from collections.abc import Callable

import torch
from bakehouse_kernels.cpu.linear import linear, pack
from torch import Tensor
from torch.nn import functional

SHAPES = {
    "qkv": (576, 960),
    "out": (576, 576),
    "gate, up": (576, 3072),
    "down": (1536, 576),
    "head": (576, 49152),
}
WEIGHT_BYTES = 64e6  # of the matrices that are read in turn


def best_time_s(step: Callable[[], None], n_runs: int) -> float:
    """The shortest run after one that warms up: the least disturbed by other processes."""
    step()
    times = []
    for _ in range(n_runs):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return min(times)


def product_times_s(n_rows: int, n_in: int, n_out: int, n_runs: int) -> list[float]:
    """Seconds a product of `x @ w`, of `F.linear` and of the served one."""
    x = torch.randn(n_rows, n_in)
    n_matrices = max(1, round(WEIGHT_BYTES / (4 * n_in * n_out)))
    in_out = [torch.randn(n_in, n_out) for _ in range(n_matrices)]
    forms: list[tuple[Callable[[Tensor, Tensor], Tensor], list[Tensor]]] = [
        (torch.mm, in_out),
        (functional.linear, [weight.t().contiguous() for weight in in_out]),
        (linear, [pack(weight) for weight in in_out]),
    ]
    times = []
    for product, weights in forms:

        def step(product: Callable[[Tensor, Tensor], Tensor] = product, weights: list[Tensor] = weights) -> None:
            for weight in weights:
                product(x, weight)

        times.append(best_time_s(step, n_runs) / n_matrices)
    return times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--runs", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"{arguments.threads} threads; milliseconds a product")
    print("product    in   out  rows |   x @ w  F.linear   packed | GFLOP/s packed")
    for name, (n_in, n_out) in SHAPES.items():
        for n_rows in (1, 8, 32, 256):
            times = product_times_s(n_rows, n_in, n_out, arguments.runs)
            columns = " ".join(f"{seconds * 1e3:8.3f}" for seconds in times)
            rate = 2 * n_rows * n_in * n_out / times[-1] / 1e9
            print(f"{name:8} {n_in:4} {n_out:5} {n_rows:5} | {columns} | {rate:7.1f}")


if __name__ == "__main__":
    main()
