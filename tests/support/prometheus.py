"""A real Prometheus that scrapes the Ray of a running server, and what it has found."""

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml
from servers import Server, free_port, wait_until

DISCOVERY_FILE = "prom_metrics_service_discovery.json"  # Ray writes it some 15 s after its start
START_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus:
    """A running one."""

    url: str

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """The labels and the value of each series that an expression has now."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=30).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        return [(series["metric"], float(series["value"][1])) for series in answer["data"]["result"]]

    def value(self, expression: str) -> float | None:
        """The value of an expression that has one series, None where it has none."""
        found = self.query(expression)
        assert len(found) < 2, f"{expression} has {len(found)} series"
        return found[0][1] if found else None

    def labels_of(self, selector: str, label: str) -> set[str]:
        """The values that a label has in the series that match."""
        answer = httpx.get(f"{self.url}/api/v1/series", params={"match[]": selector}, timeout=30).json()
        return {series[label] for series in answer["data"] if label in series}

    def rules(self) -> list[dict[str, object]]:
        """Each rule, with its health, its last error and, of an alert, its state."""
        answer = httpx.get(f"{self.url}/api/v1/rules", timeout=30).json()
        return [rule for group in answer["data"]["groups"] for rule in group["rules"]]

    def targets(self) -> dict[str, str]:
        """The health of each target by its address."""
        answer = httpx.get(f"{self.url}/api/v1/targets", timeout=30).json()
        return {target["scrapeUrl"]: target["health"] for target in answer["data"]["activeTargets"]}


def ray_folder(server: Server) -> Path:
    """Ray's temporary folder, as the processes of the server have it on their command lines."""
    for process in server.tree():
        for argument in process.cmdline():
            if argument.startswith(("--temp-dir=", "--temp_dir=")):
                return Path(argument.partition("=")[2])
    raise AssertionError("no process of the server names Ray's temporary folder")


def require_prometheus() -> str:
    """The program; without it the test is skipped."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs the program prometheus (Debian's package of that name)")
    return program


@contextmanager
def monitoring(server: Server, log: Path) -> Iterator[tuple[Prometheus, subprocess.Popen[bytes]]]:
    """`bakehouse monitor` as the server says to call it, and the Prometheus that it has started."""
    require_prometheus()
    asked = re.search(r"metrics +(.* monitor --session \S+)", server.log.read_text())
    assert asked is not None, server.log.read_text()
    with log.open("wb") as output:
        process = subprocess.Popen(
            shlex.split(asked[1]), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_until(lambda: _says_it_runs(process, log), START_S, "bakehouse monitor")
        url = re.search(r"Prometheus at (\S+)", log.read_text())
        assert url is not None, log.read_text()
        yield Prometheus(url=url[1]), process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        process.wait(START_S)


def _says_it_runs(process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    return "Ctrl-C ends it" in log.read_text()


@contextmanager
def scraping(server: Server, folder: Path) -> Iterator[Prometheus]:
    """A Prometheus that keeps its data in `folder`, and finds the metrics of the server's Ray each second."""
    program = require_prometheus()
    # Ray writes the machine's own address, but listens on the loopback alone.
    relabel = {
        "source_labels": ["__address__"],
        "regex": r"[^:]+:(\d+)",
        "target_label": "__address__",
        "replacement": "127.0.0.1:$1",
    }
    job = {
        "job_name": "ray",
        "file_sd_configs": [{"files": [str(ray_folder(server) / DISCOVERY_FILE)], "refresh_interval": "1s"}],
        "relabel_configs": [relabel],
    }
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{free_port()}"
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'prometheus'}",
                f"--web.listen-address={url.removeprefix('http://')}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        prometheus = Prometheus(url=url)
        wait_until(lambda: _is_ready(process, url, folder), START_S, "Prometheus")
        yield prometheus
    finally:
        process.terminate()
        process.wait(START_S)


def _is_ready(process: subprocess.Popen[bytes], url: str, folder: Path) -> bool:
    assert process.poll() is None, (folder / "prometheus.log").read_text()
    try:
        return httpx.get(f"{url}/-/ready", timeout=30).status_code == 200
    except httpx.TransportError:
        return False
