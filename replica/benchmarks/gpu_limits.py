"""What the device can do at most, measured: bytes moved and bfloat16 products a second."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch


@dataclass(frozen=True, slots=True)
class Limits:
    """Ceilings that ratios are taken of."""

    bytes_per_s: float
    operations_per_s: float


def seconds(work: Callable[[], object], device: torch.device, n_runs: int) -> float:
    """Of one of `n_runs` runs in a row, after two that do not count; on a GPU by its own clock."""
    work()
    work()
    if device.type != "cuda":
        begun_at = perf_counter()
        for _ in range(n_runs):
            work()
        return (perf_counter() - begun_at) / n_runs
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begun.record()
    for _ in range(n_runs):
        work()
    ended.record()
    ended.synchronize()
    return begun.elapsed_time(ended) / 1e3 / n_runs


def measured_limits(device: torch.device, *, is_tiny: bool) -> Limits:
    """Memory: the better of a copy and a sum, far larger than any cache. Products: of 8192 x 8192."""
    n_numbers, side, n_runs = (1 << 20, 256, 3) if is_tiny else (1 << 30, 8192, 20)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    source = torch.ones(n_numbers, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    copied_s = seconds(lambda: target.copy_(source), device, n_runs)
    summed_s = seconds(lambda: source.sum(), device, n_runs)
    bytes_per_s = max(2 * source.nbytes / copied_s, source.nbytes / summed_s)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    multiplied_s = seconds(lambda: left @ right, device, n_runs)
    return Limits(bytes_per_s=bytes_per_s, operations_per_s=2 * side**3 / multiplied_s)
