"""`bakehouse monitor`: a Prometheus on this machine that scrapes a Ray on it, with the rules and dashboards.

Ray lists its nodes' metrics agents in a file of its session's folder, which Prometheus reads. All that is written
here lies in a folder that goes when the command ends.
"""

import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import AF_INET

import httpx
import psutil
import yaml
from bakehouse_replica.core.errors import StartupError

from bakehouse_cluster.monitoring.dashboards import dashboards
from bakehouse_cluster.monitoring.grafana import as_json
from bakehouse_cluster.monitoring.rules import rules
from bakehouse_cluster.ports import LOOPBACK, free_port, require_free_port
from bakehouse_cluster.progress import Stages, n_of

DISCOVERY_FILE = "prom_metrics_service_discovery.json"
LATEST = "session_latest"  # in each temporary folder of Ray, beside the sessions
# Ray writes the file some 15 s after its start.
DISCOVERY_TIMEOUT_S = 60.0
START_TIMEOUT_S = 60.0
UP_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.1
# Ray's agents have news every 10 s.
SCRAPE_S = 5
# Of what Prometheus says before it ends, the last line is the reason.
MESSAGE = re.compile(r'err="?(?P<message>[^"]+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRay:
    """A Ray on this machine: the address at which programs join it, and its session's folder.

    Several may have a temporary folder in common, as those of `ray start` do, but each has a session of its own.
    """

    address: str
    folder: Path


def scrape_until_interrupted(
    *, session: Path | None, address: str | None, port: int | None, stages: Stages
) -> None:
    """Scrape until interrupted. `session` or else `address` says which Ray, if several run.

    Raises `StartupError` where there is no Prometheus, no such Ray, or the two do not come together.
    """
    program = shutil.which("prometheus")
    if program is None:
        raise StartupError(
            "there is no program `prometheus` on PATH: apt-get install prometheus, brew install prometheus, "
            "or https://prometheus.io/download"
        )
    if port is not None:
        require_free_port(LOOPBACK, port)
    for number in (signal.SIGINT, signal.SIGTERM):  # shells let programs in the background ignore the first
        signal.signal(number, signal.default_int_handler)
    try:
        folder = session_folder(session) if session is not None else chosen(running_rays(), address).folder
        with stages.stage("Ray's list of targets"):
            _wait_for_file(folder / DISCOVERY_FILE)
        with tempfile.TemporaryDirectory(prefix="bakehouse-monitor-") as own:
            _write_files(Path(own), folder / DISCOVERY_FILE)
            _scrape(program, Path(own), port or free_port(), folder, stages)
    except KeyboardInterrupt:
        stages.note("stopped; what was collected is removed")


def running_rays() -> list[RunningRay]:
    """Those of this machine whose processes this user may look at."""
    found = {}
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "raylet" and (ray := ray_of(process.info["cmdline"] or [])):
            found[ray.folder] = ray
    return sorted(found.values(), key=lambda ray: ray.folder)


def ray_of(command: list[str]) -> RunningRay | None:
    """What a raylet's command line says of its Ray."""
    words = " ".join(command)
    address, folder = re.search(r"--gcs-address=(\S+)", words), re.search(r"--session-dir=(\S+)", words)
    if address is None or folder is None:
        return None
    return RunningRay(address=address[1], folder=Path(folder[1]))


def chosen(rays: list[RunningRay], address: str | None) -> RunningRay:
    """The one at `address`, or the only one. Raises `StartupError` where that is none or not one."""
    if address not in (None, "auto"):
        rays = [ray for ray in rays if ray.address == address]
        if not rays:
            raise StartupError(f"no Ray with the address {address} runs on this machine; --session names a folder")
    match rays:
        case []:
            raise StartupError("no Ray runs on this machine; `bakehouse serve` starts one")
        case [ray]:
            return ray
        case _:
            listed = ", ".join(f"{ray.folder} ({ray.address})" for ray in rays)
            raise StartupError(f"several Rays run on this machine, choose one with --session: {listed}")


def session_folder(session: Path) -> Path:
    """A session's folder, given that or one inside it, such as that of its logs; or the latest session's, given
    Ray's temporary folder or the one around it.
    """
    session = session.resolve()
    for folder in (session, session / "ray", *session.parents):
        if (folder / LATEST).exists():
            inside = [part for part in (session, *session.parents) if part.parent == folder]
            is_session = bool(inside) and inside[0].name.startswith("session_")
            return inside[0] if is_session else (folder / LATEST).resolve()
    raise StartupError(f"--session {session}: no Ray of this machine has its session there")


def prometheus_config(discovery_file: Path, own_addresses: list[str]) -> Mapping[str, object]:
    """What Prometheus reads. A Ray that listens on loopback alone lists the machine's own address all the same."""
    here = {
        "source_labels": ["__address__"],
        "regex": rf"(?:{'|'.join(map(re.escape, own_addresses))}):(\d+)",
        "target_label": "__address__",
        "replacement": f"{LOOPBACK}:$1",
    }
    job = {
        "job_name": "ray",
        "file_sd_configs": [{"files": [str(discovery_file)], "refresh_interval": f"{SCRAPE_S}s"}],
        "relabel_configs": [here],
    }
    return {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [job],
    }


def _write_files(own: Path, discovery_file: Path) -> None:
    addresses = [
        each.address for card in psutil.net_if_addrs().values() for each in card if each.family == AF_INET
    ]
    (own / "prometheus.yml").write_text(yaml.safe_dump(prometheus_config(discovery_file, addresses)))
    (own / "rules.yaml").write_text(rules())
    (own / "dashboards").mkdir()
    for dashboard in dashboards():
        (own / "dashboards" / f"{dashboard.key}.json").write_text(as_json(dashboard))


def _scrape(program: str, own: Path, port: int, folder: Path, stages: Stages) -> None:
    url = f"http://{LOOPBACK}:{port}"
    with _prometheus(program, own, port) as process, httpx.Client(base_url=url, trust_env=False) as client:
        with stages.stage("Prometheus"):
            _wait_until_ready(process, client, own)
            targets = _targets(process, client, own)
        n_up = list(targets.values()).count("up")
        stages.note(
            f"\nPrometheus at {url} scrapes {n_of(len(targets), 'target')}, {n_up} up, of the Ray in {folder}\n"
        )
        for target, health in sorted(targets.items()):
            stages.note(f"  {health:9}  {target}")
        stages.note(f"  alerts     {url}/alerts")
        stages.note(f"  Grafana    add {url} as a Prometheus data source, then import {own / 'dashboards'}/*.json")
        stages.note("\nCtrl-C ends it and removes what it has collected.")
        process.wait()
        raise StartupError(f"Prometheus has ended: {_last_message(own)}")


@contextmanager
def _prometheus(program: str, own: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        program,
        f"--config.file={own / 'prometheus.yml'}",
        f"--storage.tsdb.path={own / 'data'}",
        f"--web.listen-address={LOOPBACK}:{port}",
    ]
    with (own / "log").open("wb") as log:
        # In a session of its own: a Ctrl-C on the terminal is for this process, which ends it in order.
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_file(path: Path) -> None:
    deadline_s = time.monotonic() + DISCOVERY_TIMEOUT_S
    while not path.is_file():
        if time.monotonic() > deadline_s:
            raise StartupError(f"Ray has not written {path} within {DISCOVERY_TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)


def _wait_until_ready(process: subprocess.Popen[bytes], client: httpx.Client, own: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            if client.get("/-/ready", timeout=START_TIMEOUT_S).is_success:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        time.sleep(POLL_S)
    raise StartupError(f"Prometheus did not start: {_last_message(own)}")


def _targets(process: subprocess.Popen[bytes], client: httpx.Client, own: Path) -> dict[str, str]:
    """The health of each target once all are up, or what it is by then."""
    targets: dict[str, str] = {}
    deadline_s = time.monotonic() + UP_TIMEOUT_S
    while time.monotonic() < deadline_s and (not targets or set(targets.values()) != {"up"}):
        time.sleep(POLL_S)
        if process.poll() is not None:
            raise StartupError(f"Prometheus has ended: {_last_message(own)}")
        answer = client.get("/api/v1/targets", timeout=START_TIMEOUT_S).json()
        targets = {target["scrapeUrl"]: target["health"] for target in answer["data"]["activeTargets"]}
    return targets


def _last_message(own: Path) -> str:
    lines = (own / "log").read_text().splitlines()
    found = [match["message"] for line in lines if (match := MESSAGE.search(line))]
    return (found or lines or [f"it said nothing within {START_TIMEOUT_S:.0f} s"])[-1]
