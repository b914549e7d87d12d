"""Calls of kernels noted down, to be made again all at once, without Python between them.

A decode step calls some two hundred kernels, and each costs Python 5 to 15 µs around it: half of a small step.
The calls of two such steps differ in what stands in memory and in nothing else, once their memory stays where it
is. So they are noted: for each the address of its machine code, and a copy of its arguments. A `Recording` makes
them in order within one call, which lets go of the interpreter's lock once and not two hundred times.

A noted call owns nothing. Results come from `Recorder.empty`, whose memory the recording keeps; whatever else the
calls read and write must stay where it is as long as the recording is used.
"""

import math
from collections.abc import Sequence
from typing import ParamSpec, TypeVar, cast
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bakehouse_kernels.cpu.calls import NOTHING_WRONG, Cells, Kernel, Words, call_at
from bakehouse_kernels.cpu.compile import compiled
from bakehouse_kernels.cpu.pool import Crew

P = ParamSpec("P")
R = TypeVar("R")

_FLOAT_BYTES = 4
_LINE_BYTES = 64


class Memory:
    """Memory for the results of recordings that are not played at the same time."""

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = {}

    def empty(self, *shape: int) -> Tensor:
        """An uninitialised float32 tensor. Once nobody has it any more, its memory is for whoever asks next."""
        n_bytes = math.prod(shape) * _FLOAT_BYTES
        size = 1 << max(_LINE_BYTES, n_bytes - 1).bit_length()  # a power of two, for others of about that size
        free = self._free.setdefault(size, [])
        piece = free.pop() if free else _piece(size)
        used = piece[:n_bytes]
        finalize(used, free.append, piece).atexit = False
        return torch.from_numpy(used).view(torch.float32).view(shape)


def _piece(n_bytes: int) -> NDArray[np.uint8]:
    """Begins with a line of the caches."""
    room = np.empty(n_bytes + _LINE_BYTES, np.uint8)
    first = -room.ctypes.data % _LINE_BYTES
    return room[first : first + n_bytes]


@compiled(exact=True)
def _play(cells: Cells, entries: Words, addresses: Words) -> int:
    """Make the calls in order; the first complaint, after which none is made."""
    for i in range(len(entries)):
        complaint = call_at(entries[i], addresses[i])
        if complaint != NOTHING_WRONG:
            return int(complaint)
    return NOTHING_WRONG


class Recording:
    """Noted calls, and the tensor in which their result stands each time they have been made."""

    def __init__(self, crew: Crew, notes: Sequence[tuple[int, Words]], result: Tensor) -> None:
        self._crew = crew
        self._calls = tuple(call for _, call in notes)
        self._entries = np.array([entry for entry, _ in notes], np.int64)
        self._addresses = np.array([call.ctypes.data for call in self._calls], np.int64)
        self._result = result

    @property
    def result(self) -> Tensor:
        """Where the result stands."""
        return self._result

    def play(self) -> None:
        """Make the calls in their order. `IndexError` where one finds a row whose slot is outside of its cache."""
        complaint = self._crew.run(_play, self._entries, self._addresses)
        if complaint != NOTHING_WRONG:
            raise IndexError(f"the slot of row {complaint} is outside of the cache")


class Recorder:
    """Takes calls as a `Crew` does, and notes them instead."""

    def __init__(self, crew: Crew, memory: Memory) -> None:
        self._crew = crew
        self._memory = memory
        self._notes: list[tuple[int, Words]] = []

    def empty(self, *shape: int) -> Tensor:
        """Memory for a result, which stays where it is."""
        return self._memory.empty(*shape)

    def run(self, kernel: Kernel[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """Note `kernel(...)` for all threads."""
        self._notes.append(kernel.note(self._crew.cells, *arguments, **named))
        return cast("R", NOTHING_WRONG)

    def run_alone(self, kernel: Kernel[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """Note `kernel(...)` for whichever thread plays."""
        self._notes.append(kernel.note(self._crew.cells_alone, *arguments, **named))
        return cast("R", NOTHING_WRONG)

    def recording(self, result: Tensor) -> Recording:
        """What has been noted."""
        return Recording(self._crew, self._notes, result)


# Who takes the calls of kernels, and gives the memory for their results.
Caller = Crew | Recorder
