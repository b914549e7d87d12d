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
from collector import Collector, collecting
from servers import START_TIMEOUT_S, STOP_TIMEOUT_S, Server, command, free_port, gone, running, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

N_TOKENS = 40
SPANS_TIMEOUT_S = 30.0  # they are sent every 5 s
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
def behind(
    way: list[str], folder: Path, model: list[str], tracing: dict[str, object] | None = None
) -> Iterator[Server]:
    """A server with two gateways that both serve."""
    path = folder / "gateways.yaml"
    path.write_text(json.dumps({"server": {"gateways": 2}, "tracing": tracing or {}}))
    with running(folder / "log", *model, "--config", str(path), "--ingress", *way) as server:
        # `running` has heard from one of them; a new connection may reach the other.
        wait_until(
            lambda: all(httpx.get(f"{server.url}/ready", timeout=60).is_success for _ in range(8)),
            30,
            "both gateways serve",
        )
        yield server


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory, model: list[str], collector: Collector) -> Iterator[Server]:
    way = ["proxy", "--grpc-port", str(free_port())]
    tracing = {"enabled": True, "exporter": "otlp", "endpoint": collector.endpoint}
    with behind(way, tmp_path_factory.mktemp("proxy"), model, tracing) as server:
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


def test_serves_proxy_takes_part_in_a_clients_trace_and_makes_none_of_probes(
    proxied: Server, collector: Collector
) -> None:
    """Its probes are those by which `behind` has found both gateways."""
    trace_id, clients_span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    httpx.post(
        f"{proxied.url}/v1/completions",
        json=BODY | {"stream": False},
        headers={"traceparent": f"00-{trace_id}-{clients_span}-01"},
        timeout=60,
    ).raise_for_status()
    chain = (
        "proxy_http_request Gateway POST /v1/completions",
        "route_to_replica Gateway __call__",
        "replica_handle_request Gateway __call__",
        "gateway",
        "decode",
    )
    wait_until(lambda: collector.trace(trace_id).keys() >= set(chain), SPANS_TIMEOUT_S, f"spans {chain}")
    spans, parent = collector.trace(trace_id), clients_span
    for name in chain:
        assert spans[name].parent_span_id.hex() == parent, name
        parent = spans[name].span_id.hex()
    assert [span.name for span in collector.spans if span.name.startswith("proxy_")] == [chain[0]]


def test_serves_proxy_brings_the_console_page_and_its_numbers(proxied: Server) -> None:
    with httpx.Client(base_url=proxied.url, timeout=60) as http:
        page = http.get("/")
        script = http.get("/console/main.js", headers={"accept-encoding": "identity"})
        again = http.get("/console/main.js", headers={"if-none-match": script.headers["etag"]})
        fleet = http.get("/v1/replicas").json()
        unknown = http.get("/console/nothing.js")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    assert (again.status_code, again.content) == (304, b"")
    assert (len(fleet["data"]), fleet["data"][0]["serves"], fleet["gateway"]["model"]) == (1, True, "scripted")
    assert fleet["gateway"]["id"] != fleet["data"][0]["id"]
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")


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
