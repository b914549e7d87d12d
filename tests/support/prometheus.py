"""A real Prometheus that scrapes the Ray of a running server, and what it has found."""

import shutil
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
START_S = 60.0


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


@contextmanager
def scraping(server: Server, folder: Path) -> Iterator[Prometheus]:
    """A Prometheus that keeps its data in `folder`, and finds the metrics of the server's Ray each second."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs the program prometheus (Debian's package of that name)")
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
