"""The threads that share a kernel's work."""

import time
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest
import torch
from bakehouse_kernels.cpu.calls import Cells
from bakehouse_kernels.cpu.ops import CpuOps
from bakehouse_kernels.cpu.pool import Crew, n_threads, shared, take
from numpy.typing import NDArray

Counts = NDArray[np.int64]


@numba.njit(nogil=True)
def _mark(taken: Counts, times_taken: Counts) -> None:
    first = take(taken, 3)
    while first < len(times_taken):
        for item in range(first, min(first + 3, len(times_taken))):
            times_taken[item] += 1
        first = take(taken, 3)


_share_marks = shared(_mark)


@numba.njit(nogil=True)
def _mark_all(cells: Cells, times_taken: Counts) -> int:
    _share_marks(cells, np.zeros(1, np.int64), times_taken)
    return n_threads(cells)


@numba.njit(nogil=True)
def _be_there(present: Counts, n_expected: int) -> None:
    take(present, 1)
    for _ in range(10**9):  # until all are there at the same time
        if take(present, 0) == n_expected:
            return
    take(present, -(10**6))


_share_presence = shared(_be_there)


@numba.njit(nogil=True)
def _meet(cells: Cells, n_expected: int) -> int:
    present = np.zeros(1, np.int64)
    _share_presence(cells, present, n_expected)
    return int(present[0])


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_item_is_taken_once_by_crews_of_any_size(size: int) -> None:
    crew = Crew(size)
    for n_items in (0, 1, 2, 3, 1000, 100_001):
        times_taken = np.zeros(n_items, np.int64)
        assert crew.run(_mark_all, times_taken) == size
        assert (times_taken == 1).all()


def test_kernels_in_quick_succession_do_not_mix() -> None:
    crew = Crew(3)
    for n_items in [n % 19 for n in range(5000)]:
        times_taken = np.zeros(n_items, np.int64)
        crew.run(_mark_all, times_taken)
        assert (times_taken == 1).all()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_threads_of_a_crew_come_awake_or_asleep(size: int) -> None:
    crew = Crew(size)
    for pause_s in (0.0, 0.0, 0.01, 0.0, 0.05):  # the helpers sleep after some 30 µs
        time.sleep(pause_s)
        assert crew.run(_meet, size) == size


def test_work_alone_needs_no_helper() -> None:
    times_taken = np.zeros(10, np.int64)
    assert Crew(3).run_alone(_mark_all, times_taken) == 1
    assert (times_taken == 1).all()


def test_helpers_that_find_nothing_to_do_sleep() -> None:
    crew = Crew(4)
    crew.run(_mark_all, np.zeros(100, np.int64))
    time.sleep(0.05)
    begun_s = time.process_time()
    time.sleep(0.3)
    # Four that span would take 0.3 s each, or 0.6 together on two cores.
    assert time.process_time() - begun_s < 0.1


def test_python_threads_may_call_at_the_same_time(cpu_ops: CpuOps, generator: torch.Generator) -> None:
    inputs = [torch.randn(40, 200, generator=generator) for _ in range(8)]
    packed = cpu_ops.pack(torch.randn(200, 300, generator=generator))
    wanted = [cpu_ops.linear(x, packed) for x in inputs]
    with ThreadPoolExecutor(4) as executor:
        for _ in range(20):
            found = list(executor.map(lambda x: cpu_ops.linear(x, packed), inputs))
            assert all(a.equal(b) for a, b in zip(found, wanted, strict=True))
