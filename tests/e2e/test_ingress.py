"""The ways into a local server that are not the default: Serve's proxy and HAProxy, before two gateways."""

import json
import os
import signal
import subprocess
from pathlib import Path

import httpx
import psutil
import pytest
from servers import START_TIMEOUT_S, STOP_TIMEOUT_S, Server, command, free_port, gone, running, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

N_TOKENS = 40
SCRIPT = {
    "pieces": ["</s>", "bread"],
    "eos": 0,
    "default": {"pieces": ["bread"] * N_TOKENS},
    "step_ms": 20,
}
BODY = {"model": "scripted", "prompt": "hi", "temperature": 0, "stream": True}


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    """What names the scripted model on the command line."""
    script = tmp_path / "bread.json"
    script.write_text(json.dumps(SCRIPT))
    return [f"scripted:{script}", "--served-model-name", "scripted"]


def with_two_gateways(tmp_path: Path) -> list[str]:
    path = tmp_path / "gateways.yaml"
    path.write_text("server: {gateways: 2}\n")
    return ["--config", str(path)]


def n_running(server: Server) -> int:
    replicas = httpx.get(f"{server.url}/health").json()["replicas"]
    return sum(int(replica["load"]["n_running"]) for replica in replicas)


@pytest.mark.parametrize("way", [["proxy"], ["haproxy", "--allow-unauthenticated"]], ids=lambda way: way[0])
def test_a_proxy_before_two_gateways_streams_cancels_and_drains(
    tmp_path: Path, model: list[str], way: list[str]
) -> None:
    with running(tmp_path / "log", *model, *with_two_gateways(tmp_path), "--ingress", *way) as server:
        processes = server.tree()
        gateways = [process for process in processes if any("Gateway" in part for part in process.cmdline())]
        assert len(gateways) == 2
        # `running` has heard from one of them; a new connection may reach the other.
        wait_until(
            lambda: all(httpx.get(f"{server.url}/ready").is_success for _ in range(8)), 30, "both gateways serve"
        )
        hidden = {"x-request-timeout-seconds": "0.001", "x-request-id": "loaf-1"}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=BODY, headers=hidden, timeout=60) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert answer.headers.get_list("x-request-id") == ["loaf-1"]
        texts = [choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"]]
        assert ("".join(texts), lines[-1]) == ("bread" * N_TOKENS, "[DONE]")
        with httpx.stream("POST", f"{server.url}/v1/completions", json=BODY | {"n": 4}, timeout=60) as answer:
            next(answer.iter_lines())
        wait_until(lambda: n_running(server) == 0, 10, "the request of a client that went is cancelled")
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(STOP_TIMEOUT_S) == 0
        assert gone(processes)
        assert "Traceback" not in server.log.read_text()


def test_serves_proxy_listens_on_loopback_only(tmp_path: Path, model: list[str]) -> None:
    options = ["--ingress", "proxy", "--grpc-port", str(free_port())]
    with running(tmp_path / "log", *model, *options) as server:
        listening = {
            connection.laddr.ip.removeprefix("::ffff:")
            for process in server.tree()
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
    assert listening == {"127.0.0.1"}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["direct", "proxy"])
def test_of_two_servers_started_at_once_on_one_port_one_says_that_it_is_in_use(
    tmp_path: Path, model: list[str], way: str
) -> None:
    """Both find it free at first: neither listens before its Ray has started."""
    arguments = command("serve", "--port", str(free_port()), *model, "--ingress", way)
    logs = [tmp_path / name for name in ("one", "other")]
    servers = []
    for log in logs:
        with log.open("wb") as output:
            started = subprocess.Popen(arguments, stdout=output, stderr=output, start_new_session=True)
        servers.append(started)
    try:
        wait_until(lambda: any(one.poll() is not None for one in servers), START_TIMEOUT_S, "one has given up")
        (refused,) = [log for log, one in zip(logs, servers, strict=True) if one.poll() is not None]
        assert " is in use; choose another with --port" in refused.read_text().strip().splitlines()[-1]
        (serving,) = [log for log in logs if log != refused]
        wait_until(lambda: "Ctrl-C ends it" in serving.read_text(), START_TIMEOUT_S, "the other serves")
    finally:
        for one in servers:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGINT)
            one.wait(STOP_TIMEOUT_S)
