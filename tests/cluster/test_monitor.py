"""Which Ray is scraped, and what is said where that is not clear."""

import re
from pathlib import Path

import pytest
from bakehouse_cluster.monitor import (
    DISCOVERY_FILE,
    RunningRay,
    chosen,
    prometheus_config,
    ray_of,
    scrape_until_interrupted,
    session_folder,
)
from bakehouse_cluster.progress import Stages
from bakehouse_replica.core.errors import StartupError
from rich.console import Console

A = RunningRay(address="127.0.0.1:1000", folder=Path("/tmp/a/ray/session_1"))
B = RunningRay(address="127.0.0.1:2000", folder=Path("/tmp/b/ray/session_2"))


@pytest.mark.parametrize("address", [None, "auto", A.address])
def test_the_only_ray_is_taken(address: str | None) -> None:
    assert chosen([A], address) is A


def test_an_address_chooses_among_several() -> None:
    assert chosen([A, B], B.address) is B


@pytest.mark.parametrize(
    ("rays", "address", "message"),
    [
        ([], None, "no Ray runs on this machine; `bakehouse serve` starts one"),
        (
            [A, B],
            None,
            rf"several Rays .* --session: {A.folder} \(127.0.0.1:1000\), {B.folder} \(127.0.0.1:2000\)",
        ),
        ([A, B], "127.0.0.1:3", "no Ray with the address 127.0.0.1:3 runs on this machine"),
    ],
)
def test_where_it_is_not_clear_which_one_is_meant_the_message_says_what_to_do(
    rays: list[RunningRay], address: str | None, message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        chosen(rays, address)


def test_a_raylet_tells_of_its_ray_within_the_command_of_its_agent() -> None:
    agent = f"python agent.py --temp-dir=/tmp/a/ray --session-dir={A.folder} --gcs-address=127.0.0.1:1000"
    assert ray_of(["raylet", "--store_socket_name=/tmp/x", f"--dashboard_agent_command={agent}"]) == A
    assert ray_of(["raylet"]) is None


@pytest.mark.parametrize(
    ("inside", "session"),
    [
        (".", "session_2"),
        ("ray", "session_2"),
        ("ray/session_latest", "session_2"),
        ("ray/session_latest/logs", "session_2"),
        ("ray/prom_metrics_service_discovery.json", "session_2"),
        ("ray/session_1", "session_1"),
        ("ray/session_1/logs/serve", "session_1"),
    ],
)
def test_a_session_may_be_named_by_any_of_the_folders_that_the_server_prints(
    tmp_path: Path, inside: str, session: str
) -> None:
    for name in ("session_1", "session_2"):
        (tmp_path / "ray" / name / "logs").mkdir(parents=True)
    (tmp_path / "ray" / "session_latest").symlink_to("session_2")
    assert session_folder(tmp_path / inside) == tmp_path / "ray" / session


def test_a_folder_without_a_ray_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=f"--session {tmp_path / 'x'}: no Ray of this machine"):
        session_folder(tmp_path / "x")


def test_this_machine_s_own_address_is_reached_over_loopback_and_others_as_they_are(tmp_path: Path) -> None:
    config = prometheus_config(tmp_path / DISCOVERY_FILE, ["10.0.0.5", "127.0.0.1"])
    jobs = config["scrape_configs"]
    assert isinstance(jobs, list)
    (relabel,) = jobs[0]["relabel_configs"]
    assert re.fullmatch(relabel["regex"], "10.0.0.5:8080")
    assert not re.fullmatch(relabel["regex"], "10.0.0.55:8080")
    assert relabel["replacement"] == "127.0.0.1:$1"


def test_without_prometheus_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartupError, match="no program `prometheus` on PATH: apt-get install prometheus"):
        scrape_until_interrupted(session=tmp_path, address=None, port=None, stages=Stages(Console(quiet=True)))
