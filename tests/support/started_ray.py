"""A Ray that is started as a pod of a cluster starts it: by `ray start`, with the environment of a cluster.

It has ports, folder and token of its own, listens on loopback (HAProxy alone does not), and ends with its process
group.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from bakehouse_cluster.guard import end_all
from bakehouse_cluster.serve_environment import cluster_environment, haproxy_places
from servers import START_TIMEOUT_S, STOP_TIMEOUT_S, free_port, wait_until

LOOPBACK = "127.0.0.1"
DEPLOY_ATTEMPTS = 3
# Serve builds the application in a process of its own, then starts gateway and replica: a minute where both cores
# are busy with something else each time.
RUNNING_TIMEOUT_S = 400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRay:
    """A head node, and what its users need to know; the log is that of `ray start`."""

    dashboard: str
    environment: Mapping[str, str]
    token: str
    log: Path

    def deploy(self, document: Path) -> None:
        """`serve deploy`, which waits for nothing but Serve's first proxy, and gives that one 60 s.

        On a busy machine it takes longer; so it is asked again then, as KubeRay's operator does.
        """
        arguments = [str(Path(sys.executable).parent / "serve"), "deploy", str(document), "-a", self.dashboard]
        for _ in range(DEPLOY_ATTEMPTS):
            done = subprocess.run(arguments, env=self.environment, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return
        raise AssertionError(done.stdout + done.stderr)

    def application(self, name: str = "bakehouse") -> dict[str, Any]:
        """What the dashboard's REST interface says of an application; empty before it is known."""
        answer = httpx.get(
            f"{self.dashboard}/api/serve/applications/",
            headers={"authorization": f"Bearer {self.token}"},
            timeout=START_TIMEOUT_S,
        )
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()["applications"].get(name, {})
        return found

    def pids(self) -> dict[str, set[int]]:
        """The processes that run each deployment."""
        deployments = self.application()["deployments"]
        return {
            name: {replica["pid"] for replica in deployment["replicas"]}
            for name, deployment in deployments.items()
        }

    def wait_until_running(self) -> None:
        """Until the application is as it was asked for."""

        def is_running() -> bool:
            application = self.application()
            assert application.get("status") not in ("DEPLOY_FAILED", "UNHEALTHY"), application
            return application.get("status") == "RUNNING"

        wait_until(is_running, RUNNING_TIMEOUT_S, "the application runs")


@contextmanager
def started(log: Path, *, labels: str = "") -> Iterator[StartedRay]:
    """A head node of two CPUs whose dashboard answers; `labels` are the node's."""
    folder = Path(tempfile.mkdtemp(prefix="bh-", dir="/tmp"))  # short: socket paths end at 107 characters
    token_path = folder / "token"
    token_path.write_text("0" * 64)
    environment = {
        **os.environ,
        **cluster_environment(drain_s=1),
        **haproxy_places(folder / "haproxy"),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray turns 127.0.0.1 into the machine's address
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
    }
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(folder, port, labels), env=environment, stdout=output, stderr=output, start_new_session=True
        )
    node = StartedRay(
        dashboard=f"http://{LOOPBACK}:{port}", environment=environment, token=token_path.read_text(), log=log
    )
    try:
        wait_until(lambda: _answers(node, process), START_TIMEOUT_S, "the dashboard answers")
        yield node
    finally:
        known = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        finally:
            end_all(folder, known)


def _command(folder: Path, dashboard_port: int, labels: str) -> list[str]:
    ports = {
        name: free_port()
        for name in (
            "port",
            "node-manager-port",
            "object-manager-port",
            "ray-client-server-port",
            "dashboard-agent-listen-port",
            "dashboard-agent-grpc-port",
            "runtime-env-agent-port",
            "metrics-export-port",
        )
    }
    return [
        str(Path(sys.executable).parent / "ray"),
        *("start", "--head", "--block", "--num-cpus=2", "--disable-usage-stats", "--include-log-monitor=false"),
        *(f"--node-ip-address={LOOPBACK}", f"--dashboard-host={LOOPBACK}", f"--dashboard-port={dashboard_port}"),
        *(f"--temp-dir={folder}", "--object-store-memory=80000000", f"--labels={labels}"),
        *(f"--{name}={port}" for name, port in ports.items()),
    ]


def _answers(node: StartedRay, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, node.log.read_text()
    try:
        return node.application() == {}
    except httpx.HTTPError:
        return False
