"""The ways into a local server that are not the default: Serve's proxy and HAProxy, before two gateways."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from servers import START_TIMEOUT_S, STOP_TIMEOUT_S, Server, command, free_port, gone, running, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

N_TOKENS = 40
SCRIPT = {
    "pieces": ["</s>", "bread"],
    "eos": 0,
    "replies": [{"when": "tell", "pieces": ["bread"] * 50 * N_TOKENS}],  # takes 40 s
    "default": {"pieces": ["bread"] * N_TOKENS},
    "step_ms": 20,
}
BODY = {"model": "scripted", "prompt": "hi", "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What names the scripted model on the command line."""
    script = tmp_path_factory.mktemp("script") / "bread.json"
    script.write_text(json.dumps(SCRIPT))
    return [f"scripted:{script}", "--served-model-name", "scripted"]


@contextmanager
def behind(way: list[str], folder: Path, model: list[str]) -> Iterator[Server]:
    """A server with two gateways that both serve."""
    path = folder / "gateways.yaml"
    path.write_text("server: {gateways: 2}\n")
    with running(folder / "log", *model, "--config", str(path), "--ingress", *way) as server:
        # `running` has heard from one of them; a new connection may reach the other.
        wait_until(
            lambda: all(httpx.get(f"{server.url}/ready", timeout=60).is_success for _ in range(8)),
            30,
            "both gateways serve",
        )
        yield server


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory, model: list[str]) -> Iterator[Server]:
    way = ["proxy", "--grpc-port", str(free_port())]
    with behind(way, tmp_path_factory.mktemp("proxy"), model) as server:
        yield server


def n_running(server: Server) -> int:
    replicas = httpx.get(f"{server.url}/health", timeout=60).json()["replicas"]
    return sum(int(replica["load"]["n_running"]) for replica in replicas)


def test_serves_proxy_listens_on_loopback_only(proxied: Server) -> None:
    listening = {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in proxied.tree()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_serves_proxy_before_two_gateways_streams_cancels_and_drains(proxied: Server) -> None:
    """The last test of this server."""
    assert_streams_cancels_and_drains(proxied)


def test_haproxy_before_two_gateways_streams_cancels_and_drains(tmp_path: Path, model: list[str]) -> None:
    with behind(["haproxy", "--allow-unauthenticated"], tmp_path, model) as server:
        assert_streams_cancels_and_drains(server)


def assert_streams_cancels_and_drains(server: Server) -> None:
    processes = server.tree()
    gateways = [process for process in processes if any("Gateway" in part for part in process.cmdline())]
    assert len(gateways) == 2
    hidden = {"x-request-timeout-seconds": "0.001", "x-request-id": "loaf-1"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=BODY, headers=hidden, timeout=60) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert answer.headers.get_list("x-request-id") == ["loaf-1"]
    texts = [choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"]]
    assert ("".join(texts), lines[-1]) == ("bread" * N_TOKENS, "[DONE]")
    long = BODY | {"prompt": "tell", "n": 4, "max_tokens": 50 * N_TOKENS}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=long, timeout=60):
        wait_until(lambda: n_running(server) == 4, 30, "a long request runs")
    wait_until(lambda: n_running(server) == 0, 10, "the request of a client that went is cancelled")
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.process.wait(STOP_TIMEOUT_S) == 0
    assert gone(processes)
    assert "Traceback" not in server.log.read_text()


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
