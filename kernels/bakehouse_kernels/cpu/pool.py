"""Threads that help with a kernel's work, and are not waited for when they do not come.

On few cores that others use as well, a barrier is dear: whoever comes last at it, because another process has its
core, holds up all. Here a kernel's work lies in shares. The caller does one, then those that nobody has begun, and
waits only for shares that a helper is in the midst of. Kernels take small items from a common counter (`take`), so
a share that begins late finds nothing left to do. In the worst case a kernel takes as long as on one thread.

A helper that finds nothing spins for some 30 µs, as long as the next kernel of a step is away, and then sleeps.

    cells[_TICKET]     generation << 16 | shares that nobody has begun. A thread takes one by compare-and-swap,
                       which fails where the ticket it read is one of an earlier generation
    cells[_DONE]       shares that have ended; until all have, `_KERNEL` and `_CALL` stand
    cells[_ASLEEP]     helpers that sleep or are about to; who takes one off it posts the semaphore once
"""

import platform
from collections.abc import Callable
from threading import Lock, Thread
from typing import Any, Concatenate, ParamSpec, TypeVar, cast
from weakref import finalize

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import register_jitable
from torch import Tensor

from bakehouse_kernels.cpu.calls import Cells, address_of, call_at, entry_to
from bakehouse_kernels.cpu.compile import compiled, intrinsic
from bakehouse_kernels.cpu.tile import declare

P = ParamSpec("P")
R = TypeVar("R")

# Places of `cells`, a line of the caches each.
_TICKET, _DONE, _ASLEEP, _GENERATION, _KERNEL, _CALL, _N_SHARES, _SEMAPHORE, _END = range(0, 72, 8)
_SHARE_BITS = 16
_SHARE_MASK = (1 << _SHARE_BITS) - 1

# Looks of an idle helper at the ticket before it sleeps; one takes 10 to 20 ns.
_LOOKS = 2000

# Looks of the caller at unfinished shares before it offers its core to whoever does them.
_PATIENT_LOOKS = 1000

# Made at run time, where type checkers do not see it.
_settings: Any = numba.config

_INT, _LONG = ir.IntType(32), ir.IntType(64)
_MACHINE = platform.machine().lower()


def _of_the_c_library(name: str, *arguments: Any) -> Any:
    return types.ExternalFunction(name, types.int32(*arguments))


_sem_init = _of_the_c_library("sem_init", types.intp, types.int32, types.uint32)
_sem_post = _of_the_c_library("sem_post", types.intp)
_sem_wait = _of_the_c_library("sem_wait", types.intp)
_usleep = _of_the_c_library("usleep", types.uint32)
_sched_yield = _of_the_c_library("sched_yield")


def _cell(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return builder.gep(array.data, [args[1]])


@intrinsic
def _look(_typing: Any, cells: Any, i: Any) -> Any:
    """`cells[i]` as other threads left it."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        return builder.load_atomic(_cell(context, builder, signature, args), "seq_cst", 8)

    return types.int64(cells, types.int64), generate


@intrinsic
def _put(_typing: Any, cells: Any, i: Any, value: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        builder.store_atomic(args[2], _cell(context, builder, signature, args), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(cells, types.int64, types.int64), generate


@intrinsic
def _add(_typing: Any, cells: Any, i: Any, value: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        return builder.atomic_rmw("add", _cell(context, builder, signature, args), args[2], "seq_cst")

    return types.int64(cells, types.int64, types.int64), generate


@intrinsic
def _swap_if(_typing: Any, cells: Any, i: Any, expected: Any, value: Any) -> Any:
    """Whether `cells[i]` was `expected`, and now is `value`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        cell = _cell(context, builder, signature, args)
        return builder.extract_value(builder.cmpxchg(cell, args[2], args[3], "seq_cst"), 1)

    return types.boolean(cells, types.int64, types.int64, types.int64), generate


@intrinsic
def _pause(_typing: Any) -> Any:
    """Let the other thread of the core, or nobody, go first for some cycles."""

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, _args: list[ir.Value]) -> ir.Value:
        if _MACHINE in ("x86_64", "amd64"):
            builder.call(declare(builder, "llvm.x86.sse2.pause", ir.VoidType(), []), [])
        elif _MACHINE in ("aarch64", "arm64"):
            builder.call(declare(builder, "llvm.aarch64.hint", ir.VoidType(), [_INT]), [ir.Constant(_INT, 1)])
        return context.get_dummy_value()

    return types.void(), generate


@register_jitable
def _begin_share(cells: Cells) -> bool:
    """Whether one of the shares that nobody had begun is now the calling thread's."""
    ticket = _look(cells, _TICKET)
    while ticket & _SHARE_MASK:
        if _swap_if(cells, _TICKET, ticket, ticket - 1):
            return True
        ticket = _look(cells, _TICKET)
    return False


def shared(kernel: Callable[P, None]) -> Callable[Concatenate[Cells, P], None]:
    """For compiled code: `share_out(cells, ...)` has `kernel(...)` called by each thread that comes in time."""
    entry, of_any_arguments = entry_to(kernel), cast("Callable[..., None]", kernel)

    @register_jitable
    def share_out(cells: Cells, *call: Any) -> None:
        n_others = cells[_N_SHARES] - 1
        if n_others > 0:
            cells[_KERNEL], cells[_CALL] = entry(call), address_of(call)
            cells[_GENERATION] += 1
            _put(cells, _DONE, 0)
            _put(cells, _TICKET, (cells[_GENERATION] << _SHARE_BITS) | n_others)
            _wake(cells, n_others)
        of_any_arguments(*call)
        while n_others > 0 and _begin_share(cells):
            of_any_arguments(*call)
            _add(cells, _DONE, 1)
        _wait(cells, _DONE, n_others)

    return cast("Callable[Concatenate[Cells, P], None]", share_out)


@register_jitable
def _wake(cells: Cells, n_wanted: int) -> None:
    for _ in range(n_wanted):
        n_asleep = _look(cells, _ASLEEP)
        if n_asleep > 0 and _swap_if(cells, _ASLEEP, n_asleep, n_asleep - 1):
            _sem_post(cells[_SEMAPHORE:].ctypes.data)


@register_jitable
def _wait(cells: Cells, place: int, n: int) -> None:
    """Until `cells[place]` has come to n."""
    n_looks = 0
    while _look(cells, place) < n:
        n_looks += 1
        if n_looks < _PATIENT_LOOKS:
            _pause()
        else:
            _sched_yield()


@compiled()
def _help(cells: Cells) -> None:
    """What a helper does until it is dismissed."""
    semaphore = cells[_SEMAPHORE:].ctypes.data
    while _look(cells, _N_SHARES) > 0:
        n_looks = 0
        while n_looks < _LOOKS:
            if _begin_share(cells):
                call_at(cells[_KERNEL], cells[_CALL])
                _add(cells, _DONE, 1)
                n_looks = 0
            else:
                _pause()
                n_looks += 1
        _add(cells, _ASLEEP, 1)
        if _look(cells, _TICKET) & _SHARE_MASK:
            n_asleep = _look(cells, _ASLEEP)
            if n_asleep > 0 and _swap_if(cells, _ASLEEP, n_asleep, n_asleep - 1):
                continue  # awake after all
        if _sem_wait(semaphore) != 0:  # macOS has no such semaphores: look again every half a millisecond
            _usleep(500)


@compiled()
def _prepare(cells: Cells) -> None:
    _sem_init(cells[_SEMAPHORE:].ctypes.data, 0, 0)


@compiled()
def _dismiss(cells: Cells) -> None:
    n_threads = _look(cells, _N_SHARES)
    _put(cells, _N_SHARES, 0)
    for _ in range(n_threads - 1):
        _sem_post(cells[_SEMAPHORE:].ctypes.data)


@intrinsic
def take(_typing: Any, counter: Any, n: Any) -> Any:
    """For compiled code: the first of `n` items that are now the caller's; `counter` is int64 `[0]` at first.

    A thread that takes little at a time is not long in the way of the others where it is interrupted.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", array.data, args[1], "monotonic")

    return types.int64(counter, types.int64), generate


@register_jitable
def report(counter: Cells, n: int) -> None:
    """For compiled code: n more items have ended; `counter` is int64 `[0]` at first."""
    _add(counter, 0, n)


@register_jitable
def wait_for(counter: Cells, n: int) -> None:
    """For compiled code: until n items have been reported, by threads that were in the midst of the last ones."""
    _wait(counter, 0, n)


class Crew:
    """So many threads: whichever calls, and helpers that live as long as this does."""

    def __init__(self, n_threads: int) -> None:
        self._lock = Lock()
        self._cells = np.zeros(_END, np.int64)
        self._cells[_N_SHARES] = n_threads
        self._alone = np.zeros(_END, np.int64)
        self._alone[_N_SHARES] = 1
        _prepare(self._cells)
        for i in range(n_threads - 1):
            Thread(target=_help, args=(self._cells,), daemon=True, name=f"kernel-helper-{i}").start()
        finalize(self, _dismiss, self._cells).atexit = False

    @property
    def cells(self) -> Cells:
        """What `run` passes."""
        return self._cells

    @property
    def cells_alone(self) -> Cells:
        """What `run_alone` passes."""
        return self._alone

    def empty(self, *shape: int) -> Tensor:
        """Uninitialised memory for a float32 result."""
        return torch.empty(shape)

    def run(self, kernel: Callable[Concatenate[Cells, P], R], *arguments: P.args, **named: P.kwargs) -> R:
        """`kernel(cells, ...)`, in which calls of what `shared` made use the helpers. Any thread may call."""
        with self._lock:
            return kernel(self._cells, *arguments, **named)

    def run_alone(self, kernel: Callable[Concatenate[Cells, P], R], *arguments: P.args, **named: P.kwargs) -> R:
        """`kernel(cells, ...)` in the calling thread, for work that is too little to share."""
        return kernel(self._alone, *arguments, **named)


@register_jitable
def n_threads(cells: Cells) -> int:
    """For compiled code: how many threads a call may have at most."""
    return int(cells[_N_SHARES])


def n_cores() -> int:
    """Threads that a crew can have: the cores this process may use."""
    return int(_settings.NUMBA_NUM_THREADS)
