"""Starts ranks as processes of this machine, for whoever has no Ray."""

import os
import pickle
import subprocess
import sys
from typing import Protocol

import torch

from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.executors.links import Invitation
from bakehouse_replica.settings import ReplicaSettings

# Rank 0 has gone by then: they end by themselves, unless they hang.
_END_GRACE_S = 5.0


class Ranks(Protocol):
    """The processes of ranks 1, 2, …"""

    def check(self) -> None:
        """Raises `StartupError`, which names the rank, where one has ended or could not be started."""
        ...

    def end(self) -> None:
        """End what is left of them, once rank 0 has closed its connections; idempotent."""
        ...


class StartRanks(Protocol):
    """Starts the processes that will follow the invitation."""

    def __call__(self, settings: ReplicaSettings, invitation: Invitation) -> Ranks: ...


class LocalRanks:
    """Child processes. On GPUs each sees one of its own, and this process has the first."""

    def __init__(self, settings: ReplicaSettings, invitation: Invitation) -> None:
        """Raises `StartupError` where this machine has too few GPUs."""
        places = own_gpus(invitation.size) if settings.device == "cuda" else [{}] * invitation.size
        self._processes = [_start(settings, invitation, rank, places[rank]) for rank in range(1, invitation.size)]

    def check(self) -> None:
        """Raises where a process has ended."""
        for rank, process in enumerate(self._processes, start=1):
            if process.poll() is not None:
                raise StartupError(f"rank {rank} has ended before it joined, with status {process.returncode}")

    def end(self) -> None:
        """Wait for them for a moment, then end them."""
        for process in self._processes:
            try:
                process.wait(_END_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def own_gpus(n_ranks: int) -> list[dict[str, str]]:
    """The environment by which each rank sees a GPU of its own, as under Ray, of those that this process sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    n_gpus = torch.cuda.device_count()
    if n_gpus < n_ranks:
        raise StartupError(f"--tensor-parallel is {n_ranks}, but this machine shows {n_gpus} GPUs, one for a rank")
    names = visible.split(",") if visible else [str(index) for index in range(n_gpus)]
    return [{"CUDA_VISIBLE_DEVICES": name} for name in names]


def _start(
    settings: ReplicaSettings, invitation: Invitation, rank: int, place: dict[str, str]
) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        **place,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        # A rank that waits for others must not take the cores that they compute on.
        "OMP_WAIT_POLICY": "passive",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "bakehouse_replica.executors.worker"],
        stdin=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # a Ctrl-C on the terminal is rank 0's affair
    )
    assert process.stdin is not None, "started with a pipe"
    with process.stdin:
        pickle.dump((settings, invitation, rank), process.stdin)
    return process
