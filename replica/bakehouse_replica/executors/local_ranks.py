"""Starts ranks as processes of this machine, for whoever has no Ray."""

import os
import pickle
import subprocess
import sys
from typing import Protocol

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
    """Child processes."""

    def __init__(self, settings: ReplicaSettings, invitation: Invitation) -> None:
        self._processes = [_start(settings, invitation, rank) for rank in range(1, invitation.size)]

    @property
    def process_ids(self) -> list[int]:
        """Of ranks 1, 2, …"""
        return [process.pid for process in self._processes]

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


def _start(settings: ReplicaSettings, invitation: Invitation, rank: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        # A rank that waits for others must not take the cores that they compute on.
        "OMP_WAIT_POLICY": "passive",
    }
    if settings.device == "cuda":  # each rank sees its own device alone, as under Ray
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(index) for index in range(invitation.size)]
        environment["CUDA_VISIBLE_DEVICES"] = devices[rank]
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
