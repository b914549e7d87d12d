"""What this machine can do at most: bytes read from memory a second, and operations on registers.

    python kernels/benchmarks/limits.py [--threads 2]

No step can be faster than max(bytes / bandwidth, operations / peak). Other scripts take `measured` from here.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from bakehouse_kernels.cpu.compile import compiled, intrinsic
from bakehouse_kernels.cpu.pool import Cells, Crew, n_cores, shared, take
from bakehouse_kernels.cpu.tile import SHAPE, int8_multiply_add, multiply_add
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

N_NUMBERS = 128 * 1024**2  # 512 MB, beyond any cache
N_STEPS = 500_000
N_RUNS = 5
N_SUMS = 2 * SHAPE.max_rows  # as many as a tile has, so that none waits for its last addition

_LONG, _INT, _FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of some threads together; a multiply-add counts as two operations."""

    read_bytes_per_s: float
    float32_per_s: float
    int8_per_s: float

    def least_time_s(self, *, n_bytes: float, n_float32: float = 0.0, n_int8: float = 0.0) -> float:
        """What the work takes where reading and computing hide behind each other."""
        return max(n_bytes / self.read_bytes_per_s, n_float32 / self.float32_per_s + n_int8 / self.int8_per_s)


def _register_loop(element: ir.Type, operation: Callable[..., ir.Value]) -> Any:
    """For compiled code: `loop(n_steps, number)`, each step multiplying and adding into `N_SUMS` vectors."""

    @intrinsic
    def loop(_typing: Any, n_steps: Any, number: Any) -> Any:
        def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, arguments: list[ir.Value]) -> ir.Value:
            n, known_at_run_time = arguments
            vector, before = ir.VectorType(element, SHAPE.lanes), builder.block
            x = builder.bitcast(known_at_run_time, element)
            weights = builder.insert_element(ir.Constant(vector, None), x, ir.Constant(_INT, 0))
            steps, done = builder.append_basic_block("steps"), builder.append_basic_block("done")
            builder.branch(steps)
            builder.position_at_end(steps)
            step, sums = builder.phi(_LONG), [builder.phi(vector) for _ in range(N_SUMS)]
            following = builder.add(step, ir.Constant(_LONG, 1))
            new = [operation(builder, total, x, weights) for total in sums]
            builder.cbranch(builder.icmp_signed("<", following, n), steps, done)
            step.add_incoming(ir.Constant(_LONG, 0), before)
            step.add_incoming(following, steps)
            for i, (total, changed) in enumerate(zip(sums, new, strict=True)):
                # Different beginnings, or the compiler would make one sum of all.
                total.add_incoming(ir.Constant(vector, [ir.Constant(element, i)] * SHAPE.lanes), before)
                total.add_incoming(changed, steps)
            builder.position_at_end(done)
            integers = ir.VectorType(_INT, SHAPE.lanes)
            result = builder.bitcast(new[0], integers)
            for changed in new[1:]:
                result = builder.xor(result, builder.bitcast(changed, integers))
            return builder.extract_element(result, ir.Constant(_INT, 0))

        return types.int32(types.int64, types.int32), generate

    return loop


_float32_loop = _register_loop(_FLOAT, multiply_add)
_int8_loop = _register_loop(_INT, int8_multiply_add(SHAPE))


@compiled()
def _multiply_float32(taken: NDArray[np.int64], out: NDArray[np.int32], number: np.int32) -> None:
    out[take(taken, 1)] = _float32_loop(N_STEPS, number)


@compiled()
def _multiply_int8(taken: NDArray[np.int64], out: NDArray[np.int32], number: np.int32) -> None:
    out[take(taken, 1)] = _int8_loop(N_STEPS, number)


_share_float32, _share_int8 = shared(_multiply_float32), shared(_multiply_int8)


@compiled()
def _run_float32(cells: Cells, taken: NDArray[np.int64], out: NDArray[np.int32], number: np.int32) -> None:
    _share_float32(cells, taken, out, number)


@compiled()
def _run_int8(cells: Cells, taken: NDArray[np.int64], out: NDArray[np.int32], number: np.int32) -> None:
    _share_int8(cells, taken, out, number)


def best_time_s(work: Callable[[], object]) -> float:
    """The shortest of some runs after one that warms up: the least disturbed by other processes."""
    times = []
    for _ in range(N_RUNS + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def measured(n_threads: int) -> Limits:
    """The limits of `n_threads` threads; takes some seconds."""
    crew, out = Crew(n_threads), np.zeros(n_threads, np.int32)
    numbers = torch.ones(N_NUMBERS)
    torch.set_num_threads(n_threads)
    one = np.float32(1).view(np.int32)  # its bits, which the compiler must not know
    read_s = best_time_s(numbers.sum)
    float32_s = best_time_s(lambda: crew.run(_run_float32, np.zeros(1, np.int64), out, one))
    int8_s = best_time_s(lambda: crew.run(_run_int8, np.zeros(1, np.int64), out, one))
    n_float32 = 2 * n_threads * N_STEPS * N_SUMS * SHAPE.lanes
    return Limits(
        read_bytes_per_s=numbers.nbytes / read_s,
        float32_per_s=n_float32 / float32_s,
        int8_per_s=4 * n_float32 / int8_s,
    )


def main() -> None:
    """Print the limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=n_cores())
    limits = measured(parser.parse_args().threads)
    print(
        f"{limits.read_bytes_per_s / 1e9:.1f} GB/s read, {limits.float32_per_s / 1e9:.0f} GFLOP/s float32, "
        f"{limits.int8_per_s / 1e9:.0f} GOP/s int8"
    )


if __name__ == "__main__":
    main()
