"""`bakehouse serve` as a process of its own, for tests that use it over the network."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil

PROGRAM = (sys.executable, "-m", "bakehouse_cluster.cli")
# Some 20 s and 5 s on idle cores, and four minutes were measured at a load of 27.
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 120.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running `bakehouse serve`."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    @property
    def sdk(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def tree(self) -> list[psutil.Process]:
        """The process and everything it has started."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]


def command(*arguments: str) -> list[str]:
    return [*PROGRAM, *arguments]


# Below the ports that a system gives to whoever asks for any, as the processes of a Ray do before the server
# listens (35 of 14,000, measured); above those that Ray has for its workers.
_PORTS = iter(random.sample(range(20_000, 32_000), 12_000))


def free_port() -> int:
    """One that nobody listens on, another each time."""
    for port in _PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """How long it took for `condition` to hold."""
    begun_s = time.monotonic()
    while not condition():
        elapsed_s = time.monotonic() - begun_s
        assert elapsed_s < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(POLL_S)
    return time.monotonic() - begun_s


@contextmanager
def running(
    log: Path, *arguments: str, program: Sequence[str] = PROGRAM, start_timeout_s: float = START_TIMEOUT_S
) -> Iterator[Server]:
    """A server that is ready and has said so, in a process group of its own, as in a terminal.

    `program` is the command line that `serve` and its options go to.
    """
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*program, "serve", "--port", str(port), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(process=process, url=f"http://127.0.0.1:{port}", log=log)
    try:
        wait_until(lambda: answers_ready(server), start_timeout_s, "ready")
        wait_until(lambda: "Ctrl-C ends it" in log.read_text(), STOP_TIMEOUT_S, "announced")
        yield server
    except Exception as error:
        error.add_note(f"The server's log ends with:\n{log.read_text()[-4000:]}")
        raise
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        process.wait(STOP_TIMEOUT_S)


def answers_ready(server: Server) -> bool:
    assert server.process.poll() is None, server.log.read_text()
    try:
        return httpx.get(f"{server.url}/ready", timeout=START_TIMEOUT_S).status_code == 200
    except httpx.TransportError:
        return False


def gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
