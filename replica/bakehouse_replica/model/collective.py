"""What ranks that share a decoder say to each other within a step: sums, columns side by side, one rank's values.

All ranks call the same operations in the same order, with tensors of the same shapes. On the CPU they go through
gloo and a call returns when it is done; on GPUs through NCCL, where it returns at once and stands in the order of
the device's stream, so that a CUDA graph may hold it. What only the hosts agree on goes through gloo everywhere.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch

# What `torch.distributed` exports, where type checkers see it.
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    GatherOptions,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    ReduceOp,
    Store,
    TCPStore,
    Work,
)
from torch.nn import functional

# How soon a host that waits for other ranks sees that one of them is lost.
_POLL = timedelta(milliseconds=200)
# Ranks may take as long to load their parts; before that there are operations, too.
_START_LIMIT = timedelta(hours=2)


class CollectiveError(Exception):
    """Another rank has left in the middle of an operation, or never came; which one, this one cannot know."""


class Collective(Protocol):
    """One rank's way to the others."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """All ranks."""
        ...

    @property
    def n_begun(self) -> int:
        """Operations that this rank's host has begun so far, and recordings of them: how far it is."""
        ...

    @property
    def is_recordable(self) -> bool:
        """Whether `Ops.record` can note these operations together with those of a device."""
        ...

    def count_play(self) -> None:
        """This rank's host has begun operations that are recorded: they count as one."""
        ...

    def sum_(self, x: Tensor) -> None:
        """`x` becomes the sum of all ranks' `x`; modifies it."""
        ...

    def gather_columns(self, x_RC: Tensor, widths: Sequence[int]) -> Tensor:
        """On rank 0 all ranks' columns side by side; elsewhere nothing of use. Rank r has `widths[r]` of them."""
        ...

    def broadcast_(self, x: Tensor) -> None:
        """`x` becomes rank 0's; modifies it."""
        ...

    def smallest(self, n: int) -> int:
        """The least of all ranks' `n`, agreed on by the hosts."""
        ...

    def limit(self, timeout_s: float) -> None:
        """From now on no operation of hosts waits longer, whatever becomes of the others."""
        ...

    def abort(self) -> None:
        """Let operations that wait for a lost rank end, from any thread; none works any more."""
        ...


class Alone:
    """The only rank: nothing to be said."""

    rank, size, n_begun, is_recordable = 0, 1, 0, True

    def count_play(self) -> None:
        """Nothing."""

    def sum_(self, x: Tensor) -> None:
        """Nothing."""

    def gather_columns(self, x_RC: Tensor, widths: Sequence[int]) -> Tensor:
        """The columns."""
        return x_RC

    def broadcast_(self, x: Tensor) -> None:
        """Nothing."""

    def smallest(self, n: int) -> int:
        """It."""
        return n

    def limit(self, timeout_s: float) -> None:
        """Nothing."""

    def abort(self) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where ranks find each other: rank 0 listens at `host` and `port`; `own_host` is where this rank can be."""

    rank: int
    size: int
    host: str
    port: int
    own_host: str


def open_store(host: str, size: int) -> tuple[TCPStore, int]:
    """Rank 0's side of a `Meeting`, and its port; it lasts as long as the object."""
    store = TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
    return store, store.port


class Group:
    """Ranks in processes of their own, by torch.distributed.

    `check` is called again and again while the host waits, and raises where waiting is in vain.
    """

    def __init__(
        self,
        meeting: Meeting,
        device: torch.device,
        check: Callable[[], None],
        store: TCPStore | None = None,
    ) -> None:
        """Waits for all ranks; rank 0 brings the `store`. Takes no place as this process's default group."""
        self._rank, self._size = meeting.rank, meeting.size
        self._check = check
        self._n_begun = 0
        self._device = device
        store = store or TCPStore(meeting.host, meeting.port, meeting.size, is_master=False)
        self._gloo = _gloo(store, meeting)
        self._group = _group(store, meeting, device, self._gloo)
        if device.type == "cuda":
            self._connect()

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def size(self) -> int:
        """All ranks."""
        return self._size

    @property
    def n_begun(self) -> int:
        """Operations begun by this host, and graphs of them."""
        return self._n_begun

    @property
    def is_recordable(self) -> bool:
        """With NCCL."""
        return self._device.type == "cuda"

    def count_play(self) -> None:
        """Of a graph with operations of this group."""
        self._n_begun += 1

    def sum_(self, x: Tensor) -> None:
        """`x` becomes the sum of all ranks' `x`."""
        self._do(lambda: self._group.allreduce([x]), x.device)

    def gather_columns(self, x_RC: Tensor, widths: Sequence[int]) -> Tensor:
        """On rank 0 all columns side by side. Shares that are narrower than the widest travel with zeros."""
        widest = max(widths)
        padded_RC = functional.pad(x_RC, (0, widest - x_RC.shape[1])) if x_RC.shape[1] < widest else x_RC
        padded_RC = padded_RC.contiguous()
        parts = [torch.empty_like(padded_RC) for _ in widths] if self._rank == 0 else []
        whole = [parts] if parts else []
        self._do(lambda: self._group.gather(whole, [padded_RC], GatherOptions()), x_RC.device)
        if not parts:
            return x_RC
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def broadcast_(self, x: Tensor) -> None:
        """`x` becomes rank 0's."""
        self._do(lambda: self._group.broadcast(x, 0), x.device)

    def smallest(self, n: int) -> int:
        """The least of all ranks' `n`."""
        n_1, options = torch.tensor([n]), AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.MIN)
        self._do(lambda: self._group.allreduce([n_1], options), n_1.device)
        return int(n_1)

    def limit(self, timeout_s: float) -> None:
        """From now on no operation through gloo waits longer; before, ranks may be loading."""
        self._gloo._set_default_timeout(timedelta(seconds=timeout_s))

    def abort(self) -> None:
        """End what is under way on the device; hosts that wait look at `check` by themselves."""
        if self._device.type == "cuda":
            self._group.abort()

    def _connect(self) -> None:
        """NCCL connects at the first operation of a kind, which no graph may hold, and takes memory for it."""
        x_11 = torch.zeros((1, 1), device=self._device)
        self.sum_(x_11)
        self.broadcast_(x_11)
        self.gather_columns(x_11, (1,) * self._size)
        torch.cuda.synchronize(self._device)

    def _do(self, begin: Callable[[], Work], device: torch.device) -> None:
        """Begin the operation and wait for it on the host; on a GPU let the stream wait for it."""
        self._n_begun += 1
        try:
            work = begin()
            while device.type == "cpu" and not work.is_completed():
                # Whether it has failed or only takes longer is seen below.
                with suppress(RuntimeError):
                    work.wait(_POLL)
                self._check()
            work.wait()
        except RuntimeError as error:
            raise CollectiveError(f"rank {self._rank} has lost another rank: {error}") from error


def _gloo(store: Store, meeting: Meeting) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # By default gloo listens wherever this machine's name leads.
    options._devices = [ProcessGroupGloo.create_device(hostname=meeting.own_host)]
    options._timeout = _START_LIMIT
    return ProcessGroupGloo(PrefixStore("gloo", store), meeting.rank, meeting.size, options)


def _group(store: Store, meeting: Meeting, device: torch.device, gloo: ProcessGroupGloo) -> ProcessGroup:
    """gloo for tensors of hosts, NCCL for those of `device` where it is a GPU."""
    kinds = ProcessGroup.BackendType
    group = ProcessGroup(store, meeting.rank, meeting.size)
    group._set_default_backend(kinds.NCCL if device.type == "cuda" else kinds.GLOO)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if device.type == "cuda":
        from torch._C._distributed_c10d import ProcessGroupNCCL  # builds of torch for CPUs have none

        options = ProcessGroupNCCL.Options()
        # Who loads faster waits for the others; in steps there is a watch.
        options._timeout = _START_LIMIT
        nccl = ProcessGroupNCCL(PrefixStore("nccl", store), meeting.rank, meeting.size, options)
        group._register_backend(device, kinds.NCCL, nccl)
    return group
