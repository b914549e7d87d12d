"""Time the served matrix products against torch's ways and the machine's limits.

    OMP_WAIT_POLICY=passive .venv/bin/python kernels/benchmarks/matmul.py [--threads 2] [--shapes qkv,head,step]

The shapes are SmolLM2-135M's four products of a layer, with weights of its 30 layers in turn, and its head.
In G operations/s; "of limit" is the served products' share of what max(bytes / bandwidth, operations / peak)
allows. "step" are all products of a step, one after another, in milliseconds.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, get_args

import torch
from bakehouse_kernels.cpu.ops import CpuOps
from bakehouse_kernels.cpu.packing import WeightFormat, packed_bytes
from limits import Limits, measured
from torch import Tensor
from torch.nn import functional

W = TypeVar("W")

SHAPES = {"qkv": (576, 960), "out": (576, 576), "gate+up": (576, 3072), "down": (1536, 576), "head": (576, 49152)}
N_LAYERS = {"head": 1}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ONE_DNN_ROWS = 32  # its layout is made for a number of rows; that for 32 was the fastest or close to it for all


def median_time_s(product: Callable[[W], object], weights: Sequence[W], n_runs: int) -> float:
    """Seconds a product, over all weights in turn; the first run warms up."""
    times = []
    for _ in range(n_runs + 1):
        start = time.perf_counter()
        for weight in weights:
            product(weight)
        times.append((time.perf_counter() - start) / len(weights))
    return statistics.median(times[1:])


def ways(
    weights: list[Tensor], served: dict[WeightFormat, CpuOps]
) -> dict[str, tuple[Callable[..., object], list[object]]]:
    """Name to a function of rows and weight, and the weights in its form."""
    one_dnn = torch.ops.mkldnn
    integers = [(weight * 20).round().clamp(-127, 127).to(torch.int8) for weight in weights]
    return {
        "x @ w": (torch.mm, list(weights)),
        "F.linear": (functional.linear, [weight.t().contiguous() for weight in weights]),
        "oneDNN": (
            lambda x, weight: one_dnn._linear_pointwise(x, weight, None, "none", [], ""),
            [one_dnn._reorder_linear_weight(weight.t().contiguous(), ONE_DNN_ROWS) for weight in weights],
        ),
        "_int_mm": (torch._int_mm, [weight.t().contiguous().t() for weight in integers]),
        **{kind: (ops.linear, [ops.pack(weight) for weight in weights]) for kind, ops in served.items()},
    }


def print_shape(name: str, limits: Limits, served: dict[WeightFormat, CpuOps], n_runs: int) -> None:
    """A line for each number of rows."""
    n_in, n_out = SHAPES[name]
    weights = [torch.randn(n_in, n_out) for _ in range(N_LAYERS.get(name, 30))]
    forms = ways(weights, served)
    for n_rows in ROWS:
        x = torch.randn(n_rows, n_in)
        n_operations = 2 * n_rows * n_in * n_out
        inputs = {"_int_mm": (x * 20).round().clamp(-127, 127).to(torch.int8)}
        times = {
            way: median_time_s(partial(product, inputs.get(way, x)), packed, n_runs)
            for way, (product, packed) in forms.items()
        }
        row_bytes = 4 * n_rows * (n_in + n_out)
        shares = [
            limits.least_time_s(
                n_bytes=row_bytes + packed_bytes(n_in, n_out, kind), n_operations={kind: n_operations}
            )
            / times[kind]
            for kind in served
        ]
        rates = " ".join(f"{n_operations / seconds / 1e9:8.0f}" for seconds in times.values())
        print(f"{name:8} {n_rows:5} | {rates} | {' '.join(f'{share:8.0%}' for share in shares)}", flush=True)


_Product = tuple[int, Callable[[Tensor], object]]  # inputs of a row, and what multiplies rows of so many


def _multiply(rows: dict[int, Tensor], product: _Product) -> None:
    n_in, multiply = product
    multiply(rows[n_in])


def print_steps(served: dict[WeightFormat, CpuOps], n_runs: int) -> None:
    """A line for each number of rows: what all layers and the head take together."""
    products: dict[WeightFormat, list[_Product]] = {kind: [] for kind in served}
    for kind, ops in served.items():
        for name in [name for name in SHAPES if name not in N_LAYERS] * 30 + list(N_LAYERS):
            n_in, weight = SHAPES[name][0], torch.randn(*SHAPES[name])
            is_gated = name == "gate+up"
            product = ops.gated_linear if is_gated else ops.linear
            packed = ops.pack_gated(weight) if is_gated else ops.pack(weight)
            products[kind].append((n_in, partial(product, packed=packed)))
    for n_rows in ROWS:
        rows = {n_in: torch.randn(n_rows, n_in) for n_in, _ in SHAPES.values()}
        times = " ".join(
            f"{1e3 * len(step) * median_time_s(partial(_multiply, rows), step, n_runs):8.2f}"
            for step in products.values()
        )
        print(f"step     {n_rows:5} | {times} ms", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shapes", default=",".join((*SHAPES, "step")))
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    served = {kind: CpuOps(arguments.threads, weight_format=kind) for kind in get_args(WeightFormat)}
    limits = measured(arguments.threads)
    print(f"{arguments.threads} threads; {limits}")
    kinds = " ".join(f"{kind:>8}" for kind in served)
    print(f"product   rows |    x @ w F.linear   oneDNN  _int_mm {kinds} | of limit: {kinds}")
    for name in arguments.shapes.split(","):
        if name == "step":
            print_steps(served, arguments.runs)
        else:
            print_shape(name, limits, served, arguments.runs)


if __name__ == "__main__":
    main()
