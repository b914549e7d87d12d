"""What this machine can do at most: bytes read from memory a second, and operations on registers.

    .venv/bin/python kernels/benchmarks/limits.py [--threads 2]

No step can be faster than max(bytes / bandwidth, operations / peak). Other scripts take `measured` from here.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from bakehouse_kernels.cpu.compile import compiled, intrinsic
from bakehouse_kernels.cpu.narrow import bfloat16_arithmetic, int8_arithmetic
from bakehouse_kernels.cpu.packing import WeightFormat
from bakehouse_kernels.cpu.pool import Cells, Crew, n_cores, shared, take
from bakehouse_kernels.cpu.tile import FLOAT32, SHAPE, Arithmetic
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

N_NUMBERS = 128 * 1024**2  # 512 MB, beyond any cache
N_STEPS = 500_000
N_RUNS = 5
N_SUMS = 2 * SHAPE.max_rows  # as many as a tile has, so that none waits for its last addition

_LONG, _INT = ir.IntType(64), ir.IntType(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of some threads together; a multiply-add counts as two operations."""

    read_bytes_per_s: float
    operations_per_s: dict[WeightFormat, float]

    def least_time_s(self, *, n_bytes: float, n_operations: dict[WeightFormat, float]) -> float:
        """What the work takes where reading and computing hide behind each other."""
        computing_s = sum(n / self.operations_per_s[kind] for kind, n in n_operations.items())
        return max(n_bytes / self.read_bytes_per_s, computing_s)

    def __str__(self) -> str:
        rates = ", ".join(f"{rate / 1e9:.0f} G/s {kind}" for kind, rate in self.operations_per_s.items())
        return f"{self.read_bytes_per_s / 1e9:.1f} GB/s read, operations: {rates}"


def _register_loop(arithmetic: Arithmetic) -> Any:
    """For compiled code: `loop(n_steps, number)`, each step multiplying and adding into `N_SUMS` vectors."""

    @intrinsic
    def loop(_typing: Any, n_steps: Any, number: Any) -> Any:
        def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, arguments: list[ir.Value]) -> ir.Value:
            n, known_at_run_time = arguments
            vector, before = ir.VectorType(arithmetic.element, SHAPE.lanes), builder.block
            sums_vector = ir.VectorType(arithmetic.total, SHAPE.lanes)
            x = builder.bitcast(known_at_run_time, arithmetic.element)
            weights = builder.insert_element(ir.Constant(vector, None), x, ir.Constant(_INT, 0))
            steps, done = builder.append_basic_block("steps"), builder.append_basic_block("done")
            builder.branch(steps)
            builder.position_at_end(steps)
            step, sums = builder.phi(_LONG), [builder.phi(sums_vector) for _ in range(N_SUMS)]
            following = builder.add(step, ir.Constant(_LONG, 1))
            new = [arithmetic.multiply_add(builder, total, x, weights) for total in sums]
            builder.cbranch(builder.icmp_signed("<", following, n), steps, done)
            step.add_incoming(ir.Constant(_LONG, 0), before)
            step.add_incoming(following, steps)
            for i, (total, changed) in enumerate(zip(sums, new, strict=True)):
                # Different beginnings, or the compiler would make one sum of all.
                beginning = ir.Constant(sums_vector, [ir.Constant(arithmetic.total, i)] * SHAPE.lanes)
                total.add_incoming(beginning, before)
                total.add_incoming(changed, steps)
            builder.position_at_end(done)
            integers = ir.VectorType(_INT, SHAPE.lanes)
            result = builder.bitcast(new[0], integers)
            for changed in new[1:]:
                result = builder.xor(result, builder.bitcast(changed, integers))
            return builder.extract_element(result, ir.Constant(_INT, 0))

        return types.int32(types.int64, types.int32), generate

    return loop


def _shared_loop(arithmetic: Arithmetic) -> Callable[..., None]:
    """For a crew to run: each thread goes `N_STEPS` times through the loop."""
    loop = _register_loop(arithmetic)

    @compiled()
    def multiply(taken: NDArray[np.int64], out: NDArray[np.int32], number: np.int32) -> None:
        out[take(taken, 1)] = loop(N_STEPS, number)

    share_out = shared(multiply)

    @compiled()
    def run(cells: Cells, taken: NDArray[np.int64], out: NDArray[np.int32], number: np.int32) -> None:
        share_out(cells, taken, out, number)

    return run


_LOOPS: dict[WeightFormat, Callable[..., None]] = {
    "float32": _shared_loop(FLOAT32),
    "bfloat16": _shared_loop(bfloat16_arithmetic(SHAPE)),
    "int8": _shared_loop(int8_arithmetic(SHAPE)),
}
_INPUTS_A_STEP: dict[WeightFormat, int] = {"float32": 1, "bfloat16": 2, "int8": 4}


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
    n_lanes = 2 * n_threads * N_STEPS * N_SUMS * SHAPE.lanes
    return Limits(
        read_bytes_per_s=numbers.nbytes / read_s,
        operations_per_s={
            kind: n_lanes * _INPUTS_A_STEP[kind] / best_time_s(partial(_run, crew, loop, out, one))
            for kind, loop in _LOOPS.items()
        },
    )


def _run(crew: Crew, loop: Callable[..., None], out: NDArray[np.int32], number: np.int32) -> None:
    crew.run(loop, np.zeros(1, np.int64), out, number)


def main() -> None:
    """Print the limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=n_cores())
    print(measured(parser.parse_args().threads))


if __name__ == "__main__":
    main()
