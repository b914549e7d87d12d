"""A real Prometheus scrapes a live cluster while ten requests are served, preempted and aborted."""

import json
import re
import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path

import httpx
import pytest
from bakehouse_replica.core.metric_table import METRICS, Kind, Source
from bakehouse_replica.core.vllm_table import VLLM_METRICS
from prometheus import Prometheus, scraping
from prometheus_client.parser import text_string_to_metric_families
from ray.dashboard.modules.metrics.dashboards.common import Panel, Row
from ray.dashboard.modules.metrics.dashboards.serve_llm_dashboard_panels import serve_llm_dashboard_config
from servers import Server, running, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SLOTS = 3
# The long ones take 40 s: so much time have two clients to wait and leave, and three more to come in between.
N_PROMPT, N_LONG, N_URGENT, N_SHORT = 20, 800, 60, 4
N_PROBES = 1  # with which the gateway found that the model answers: a prompt of one token, and one token out
N_TOKENS = 3 * N_LONG + 3 * N_URGENT + 2 * N_SHORT
STEP_MS = 50
SCRIPT = {"pieces": ["x"], "default": {"ids": [0]}, "step_ms": STEP_MS}
CONFIG = {"replica": {"max_sequences": SLOTS}, "metrics": {"vllm_names": True}}
# Replicas hand their counts over each second, Ray exports them after 10, and Prometheus asks each second.
SEEN_S = 200.0


def body(index: int, max_tokens: int, priority: int) -> dict[str, object]:
    """A prompt that has no block in common with the others."""
    prompt = [1 + index, *(1 + position for position in range(N_PROMPT - 1))]
    return {"model": "x", "prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "priority": priority}


def own_metrics(server: Server) -> dict[tuple[str, ...], float]:
    """What the gateway shows itself, by name and label values."""
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=60).text)
    return {
        (sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples
    }


class Requests:
    """Ten requests to a server with three slots: three are preempted, two leave before their first token."""

    def __init__(self, server: Server, pool: ThreadPoolExecutor) -> None:
        self._server = server
        self._pool = pool
        self._n_begun = 0

    def serve_all(self) -> None:
        long = [self._pool.submit(self._stream, body(index, N_LONG, 5)) for index in range(SLOTS)]
        wait_until(lambda: self._n_begun == SLOTS, 60, "as many streams as slots")
        self._leave_early()
        urgent = [self._ask(body(5 + index, N_URGENT, -1)) for index in range(3)]  # each takes another one's slot
        for answer in urgent:
            assert answer.result().status_code == 200
        for stream in long:
            assert stream.result() == N_LONG
        rest = [self._ask(body(8 + index, N_SHORT, 0)) for index in range(2)]
        for answer in rest:
            assert answer.result().status_code == 200

    def _leave_early(self) -> None:
        """Two requests, of whose clients both go while they wait."""
        connections = [self._sent(body(index, N_SHORT, 9)) for index in (3, 4)]
        wait_until(lambda: own_metrics(self._server)["bakehouse_queued_requests",] == 2, 60, "two in the queue")
        for connection in connections:
            connection.close()
        cancelled = ("bakehouse_requests_total", "completion", "cancelled")
        wait_until(lambda: own_metrics(self._server)[cancelled] == 2, 60, "both have left")

    def _sent(self, asked: dict[str, object]) -> socket.socket:
        """A connection on which a request has been sent."""
        url = httpx.URL(self._server.url)
        content = json.dumps(asked).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {url.host}\r\ncontent-type: application/json\r\n"
        connection = socket.create_connection((url.host, url.port or 80), timeout=60)
        connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        return connection

    def _ask(self, asked: dict[str, object]) -> Future[httpx.Response]:
        return self._pool.submit(httpx.post, f"{self._server.url}/v1/completions", json=asked, timeout=120)

    def _stream(self, asked: dict[str, object]) -> int:
        """How many tokens have come."""
        n_tokens = 0
        with httpx.stream(
            "POST", f"{self._server.url}/v1/completions", json=asked | {"stream": True}, timeout=120
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):  # neither the end nor a comment, which comes while it is preempted
                    n_before = n_tokens
                    n_tokens += len(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                    self._n_begun += n_tokens > n_before == 0
        return n_tokens


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """After the ten requests, once their end has been scraped."""
    folder: Path = tmp_path_factory.mktemp("metrics")
    (folder / "x.json").write_text(json.dumps(SCRIPT))
    config = CONFIG | {"model": {"source": f"scripted:{folder / 'x.json'}", "served_name": "x"}}
    (folder / "config.yaml").write_text(json.dumps(config))
    with (
        running(folder / "log", "--config", str(folder / "config.yaml")) as server,
        scraping(server, folder) as prometheus,
        ThreadPoolExecutor() as pool,
    ):
        started = "count(ray_bakehouse_requests_total) and on() count(ray_bakehouse_step_seconds_count)"
        wait_until(lambda: prometheus.value(started) is not None, SEEN_S, "series of gateway and replica")
        Requests(server, pool).serve_all()
        ended = "sum(ray_bakehouse_requests_total) + on() sum(ray_vllm_request_success_total)"
        wait_until(
            lambda: prometheus.value(ended) == 20 + N_PROBES, SEEN_S, "the end of ten requests on both sides"
        )
        yield prometheus


def test_all_targets_are_up(scraped: Prometheus) -> None:
    assert scraped.targets()
    assert set(scraped.targets().values()) == {"up"}, scraped.targets()


def test_every_metric_of_the_table_is_there_with_all_its_series_and_nothing_else_is(scraped: Prometheus) -> None:
    for metric in (*METRICS, *VLLM_METRICS):
        # Without keys there is one tenant.
        n_label_sets = prod(len(label.values) if label.values else 1 for label in metric.labels)
        n_series = n_label_sets * (len(metric.bounds) + 1 if metric.kind is Kind.HISTOGRAM else 1)
        found = scraped.query(f"ray_{metric.series_names[0]}")
        assert len(found) == n_series, metric.name
        deployment = {Source.GATEWAY: "Gateway", Source.REPLICA: "Replica"}[metric.source]
        assert {labels["deployment"] for labels, _ in found} == {deployment}, metric.name
        assert {labels["application"] for labels, _ in found} == {"bakehouse"}
    names = {name for metric in (*METRICS, *VLLM_METRICS) for name in metric.series_names}
    present = scraped.query('count by (__name__) ({__name__=~"ray_(bakehouse|vllm)_.*"})')
    assert {labels["__name__"] for labels, _ in present} == {f"ray_{name}" for name in names}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ('sum(ray_bakehouse_requests_total{kind="completion", outcome="complete"})', 8),
        ('sum(ray_bakehouse_requests_total{kind="completion", outcome="cancelled"})', 2),
        ("sum(ray_bakehouse_requests_total)", 10),
        ("sum(ray_bakehouse_rejections_total)", 0),
        ("sum(ray_bakehouse_time_to_first_token_seconds_count)", 8),
        ("sum(ray_bakehouse_request_duration_seconds_count)", 10),
        ("sum(ray_bakehouse_generated_tokens_total)", N_TOKENS),
        ('sum(ray_bakehouse_prompt_tokens_total{source="computed"})', 8 * N_PROMPT),
        ('sum(ray_bakehouse_prompt_tokens_total{source="cached"})', 0),
        ("sum(ray_bakehouse_tenant_generated_tokens_total)", N_TOKENS),
        ('sum(ray_bakehouse_tenant_requests_total{outcome="complete"})', 8),
        ("sum(ray_bakehouse_tenant_requests_total)", 10),
        ('sum(ray_bakehouse_tenant_prompt_tokens_total{source="computed"})', 8 * N_PROMPT),
        ('sum(ray_bakehouse_tenant_prompt_tokens_total{source="cached"})', 0),
        ("sum(ray_bakehouse_queued_requests)", 0),
        ('sum(ray_bakehouse_routing_decisions_total{reason=~"only_one|all_busy"})', 10 + N_PROBES),
        ("sum(ray_bakehouse_routing_decisions_total)", 10 + N_PROBES),
        ("sum(ray_bakehouse_preemptions_total)", 3),
        ("sum(ray_bakehouse_queue_time_seconds_count)", 8 + N_PROBES),
        ("sum(ray_bakehouse_prefix_queried_tokens_total)", 8 * N_PROMPT + N_PROBES),
        ("sum(ray_bakehouse_prefix_hit_tokens_total)", 0),
        ("sum(ray_bakehouse_running_sequences)", 0),
        ("sum(ray_bakehouse_waiting_sequences)", 0),
        ('sum(ray_bakehouse_kv_blocks{state="held"})', 0),
        ("ray_bakehouse_kv_consistent", 1),
        ("ray_bakehouse_replica_serves", 1),
        ("sum(ray_vllm_time_to_first_token_seconds_count)", 8 + N_PROBES),
        ("sum(ray_vllm_generation_tokens_total)", N_TOKENS + N_PROBES),
        ('sum(ray_vllm_request_success_total{model_name="x", finished_reason="length"})', 8 + N_PROBES),
        ('sum(ray_vllm_request_success_total{model_name="x", finished_reason="abort"})', 2),
    ],
)
def test_c63_ten_requests_of_which_three_are_preempted_and_two_leave_early_are_counted_exactly(
    scraped: Prometheus, expression: str, expected: float
) -> None:
    assert scraped.value(expression) == expected


def test_what_the_tenant_pays_for_is_what_the_replica_has_held_but_for_the_probe(scraped: Prometheus) -> None:
    held = scraped.value('sum(ray_bakehouse_kv_block_seconds_total{state="held"})')
    paid = scraped.value("sum(ray_bakehouse_tenant_block_seconds_total)")
    assert held is not None
    assert paid is not None
    # The probe is one step of one block; the others are hundreds of steps of a dozen.
    assert 0.98 * held < paid < held
    recomputed = scraped.value('sum(ray_bakehouse_tenant_prompt_tokens_total{source="recomputed"})')
    assert recomputed is not None
    assert recomputed > 0, "three were preempted"


def test_each_step_gives_one_sample_to_each_of_its_parts(scraped: Prometheus) -> None:
    counts = {value for _, value in scraped.query("ray_bakehouse_step_seconds_count")}
    assert counts == {scraped.value("ray_bakehouse_batch_fill_ratio_count")}
    assert counts == {scraped.value("ray_bakehouse_step_tokens_count")}
    execute_s = scraped.value('ray_bakehouse_step_seconds_sum{phase="execute"}')
    assert execute_s is not None
    assert execute_s > counts.pop() * STEP_MS / 1000


def panels(parts: Iterable[Row | Panel]) -> Iterator[Panel]:
    for part in parts:
        if isinstance(part, Row):
            yield from panels(part.panels)
        else:
            yield part


# Grafana's variables; and of the whole minutes of a day, this server may have seen none.
_FILLED_IN = (("$interval", "5m"), ("$deployment", ".*"), ("$workerid", ".*"), ("[24h:1m]", "[1h:1s]"))


def test_ray_s_serve_llm_dashboard_fills(scraped: Prometheus) -> None:
    """All but the panels of features that bakehouse lacks."""
    config = serve_llm_dashboard_config
    empty, n_asked = [], 0
    for panel in panels([*(config.rows or ()), *(config.panels or ())]):
        for target in panel.targets:
            if "ray_vllm_" not in target.expr or re.search(r"nixl|kv_offload|external_prefix", target.expr):
                continue
            expression = target.expr.format(global_filters="")
            for name, value in _FILLED_IN:
                expression = expression.replace(name, value)
            n_asked += 1
            if not scraped.query(expression.replace("$vllm_model_name", "x")):
                empty.append((panel.title, expression))
    assert n_asked > 25
    assert not empty
