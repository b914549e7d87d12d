"""Starts a server, waits until it serves, and ends all of its processes whatever happens."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from benchmarks.peers.environments import Unavailable, last_line
from benchmarks.peers.systems import Command

# vLLM compiles for a minute; a first start of ours converts the weights.
_START_S = 400.0
_POLL_S = 0.25
# Ours lets running requests end and then removes Ray.
_END_S = 30.0
# Between kill and disappearance; one that init does not wait for never disappears.
_KILL_S = 3.0
# Time of guests stands in user and nice as well.
_NOT_BUSY = ("idle", "iowait", "guest", "guest_nice")


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """CPU seconds since some beginning. `machine`: of all, what a hypervisor took included; `server`: of its
    processes; `generator`: of this process.
    """

    at_s: float
    machine: float
    server: float
    generator: float

    def others_since(self, before: "CpuTimes") -> float:
        """How many cores others have used on average since `before`; near 0 on a quiet machine."""
        machine, server = self.machine - before.machine, self.server - before.server
        others_s = machine - server - (self.generator - before.generator)
        return max(0.0, others_s) / (self.at_s - before.at_s)


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server that runs."""

    pid: int

    def cpu_times(self) -> CpuTimes:
        """Until now."""
        busy_s = sum(spent for kind, spent in psutil.cpu_times()._asdict().items() if kind not in _NOT_BUSY)
        server_s = 0.0
        for one in _family(self.pid):
            with suppress(psutil.NoSuchProcess):
                # Of its ended children too: a server's helpers come and go.
                server_s += sum(one.cpu_times()[:4])
        return CpuTimes(at_s=time.monotonic(), machine=busy_s, server=server_s, generator=time.process_time())


@contextmanager
def running(command: Command, *, url: str, ready_path: str, log_path: Path) -> Iterator[ServerProcess]:
    """The server while the block runs; all of its processes have ended afterwards, also after Ctrl-C.

    Raises `Unavailable` where it ends by itself or does not answer `ready_path` with 200 in time. Its output goes
    to `log_path`.
    """
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command.argv,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**_clean_environment(), **command.variables},
            # Ctrl-C in the terminal is for us; the server is ended below.
            start_new_session=True,
        )
        try:
            _wait_until_ready(process, f"{url}{ready_path}", log_path)
            yield ServerProcess(process.pid)
        finally:
            _end(process)


def _clean_environment() -> dict[str, str]:
    """Ours without what would set a server's threads or modules; each system is set up by its command alone."""
    prefixes = ("OMP_", "KMP_", "GOMP_", "PYTHONPATH", "LD_PRELOAD")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise Unavailable(f"ended with {process.returncode} at its start: {last_line(log_path)}")
        with suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == httpx.codes.OK:
                return
        time.sleep(_POLL_S)
    raise Unavailable(f"did not answer {url} within {_START_S:g} s: {last_line(log_path)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    # Taken first: afterwards they are nobody's children.
    family = _family(process.pid)
    # The leader alone at first, for it to end its own in order; then those that it has left.
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    for one in family:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(family, timeout=_KILL_S)
    process.wait()
    # What it left behind when it ended by itself.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _family(pid: int) -> list[psutil.Process]:
    """The process and its descendants, itself first; none where it has ended."""
    with suppress(psutil.NoSuchProcess):
        leader = psutil.Process(pid)
        return [leader, *leader.children(recursive=True)]
    return []
