"""`bakehouse serve` in a process of its own, and the CPU time of each kind of process that it has started."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from sse_load import Arrived

START_TIMEOUT_S = 120.0
POLL_S = 0.1
# What a process is called by what stands in its command line; the first that fits counts.
ROLES = (
    (":Replica", "replica"),
    (":Gateway", "gateway"),
    ("ProxyActor", "proxy"),
    ("HAProxy", "proxy"),
    ("haproxy", "proxy"),
    ("ServeController", "controller"),
    ("raylet/raylet", "raylet"),
    ("gcs/gcs_server", "GCS"),
    ("dashboard/agent.py", "dashboard agent"),
    ("ray::DashboardAgent", "dashboard agent"),
    ("runtime_env/agent", "runtime env agent"),
    ("ray::RuntimeEnvAgent", "runtime env agent"),
    ("log_monitor", "log monitor"),
    ("dashboard", "dashboard"),
    ("autoscaler", "autoscaler monitor"),
    ("bakehouse_cluster", "bakehouse serve"),
    ("ray::IDLE", "idle workers"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalServer:
    """A server that is ready."""

    url: str
    process: psutil.Process

    def cpu_s(self) -> Counter[str]:
        """CPU seconds so far by the role of the process."""
        used: Counter[str] = Counter()
        for process in (self.process, *self.process.children(recursive=True)):
            try:
                times = process.cpu_times()
                used[_role(" ".join(process.cmdline()))] += times.user + times.system
            except psutil.NoSuchProcess:
                continue
        return used


@contextmanager
def serving(
    config: Mapping[str, Mapping[str, object]], environment: Mapping[str, str] | None = None
) -> Iterator[LocalServer]:
    """A server with this configuration, ended with the block; what it says is shown where it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "bakehouse.json", Path(folder) / "log"
        path.write_text(json.dumps(config))  # JSON is YAML
        command = [
            sys.executable,
            "-m",
            "bakehouse_cluster.cli",
            "serve",
            "--port",
            str(port),
            "--config",
            str(path),
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | dict(environment or {})
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(url, process, log)
            yield LocalServer(url=url, process=psutil.Process(process.pid))
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait()


def generate_load(server: LocalServer, *, n_streams: int, n_tokens: int, n_prompt: int = 16) -> Arrived:
    """What arrives of so many streams, counted by a generator in a process of its own."""
    script = Path(__file__).with_name("sse_load.py")
    numbers = ["--streams", str(n_streams), "--tokens", str(n_tokens), "--prompt", str(n_prompt)]
    said = subprocess.run(
        [sys.executable, str(script), server.url, *numbers], check=True, stdout=subprocess.PIPE
    ).stdout
    return Arrived(**json.loads(said))


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise SystemExit(f"the server did not start:\n{log.read_text()}")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=START_TIMEOUT_S):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
    raise SystemExit(f"the server was not ready after {START_TIMEOUT_S:.0f} s:\n{log.read_text()}")


def _role(command: str) -> str:
    return next((role for part, role in ROLES if part in command), "other")
