"""What is watched of a running server: by Prometheus, as `bakehouse monitor` runs it, and in Ray's dashboard."""

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import yaml
from bakehouse_cluster.monitoring.dashboards import dashboards
from bakehouse_cluster.monitoring.grafana import Dashboard, as_json
from bakehouse_cluster.monitoring.rules import rules
from browser import browsing
from matplotlib.image import imread
from prometheus import Prometheus, monitoring
from selenium import webdriver
from servers import Server, gone, running, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SLOTS, STEP_MS = 3, 20
N_PROMPT, N_ENDLESS = 64, 4000
SCRIPT = {"pieces": ["x"], "default": {"ids": [0]}, "step_ms": STEP_MS}
# Replicas hand their counts over each second, Ray exports them after 10, and Prometheus asks every 5.
SEEN_S = 200.0
PAGE_S = 120.0
ALL = dashboards()
# What Grafana puts in place of its variables where everything is shown; the window holds all that the test does.
CHOSEN = {"$cluster": ".*", "$application": ".*", "$deployment": ".*", "$replica": ".*", "$__rate_interval": "10m"}
# What stands on pages of the tab Serve.
PAGES = {
    "ray-serve-tab": ("", (r"bakehouse\s+RUNNING", r"Gateway\s+HEALTHY", r"Replica\s+HEALTHY")),
    "ray-replicas": ("/applications/bakehouse/Replica", (r"Status\s+HEALTHY", r"\b\w{8}\s+RUNNING")),
}
SCREENSHOTS = "BAKEHOUSE_SCREENSHOTS"
MAX_SCREENSHOT_BYTES = 200_000
MIN_COLOURS = 20


def body(first: int, max_tokens: int, **fields: object) -> dict[str, object]:
    """Prompts with different `first` have no block in common."""
    prompt = [first, *range(1, N_PROMPT)]
    return {"model": "x", "prompt": prompt, "temperature": 0, "max_tokens": max_tokens} | fields


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("monitor")
    (folder / "x.json").write_text(json.dumps(SCRIPT))
    model = {"source": f"scripted:{folder / 'x.json'}", "served_name": "x"}
    (folder / "config.yaml").write_text(json.dumps({"model": model, "replica": {"max_sequences": SLOTS}}))
    with running(folder / "log", "--config", str(folder / "config.yaml")) as ready:
        yield ready


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Once it has seen the end of requests: one preempted, three aborted, one cached, one rejected."""
    with monitoring(server, tmp_path_factory.mktemp("prometheus") / "log") as (scraping, _):
        started = "count(ray_bakehouse_requests_total) and on() count(ray_bakehouse_step_seconds_count)"
        wait_until(lambda: scraping.value(started) is not None, SEEN_S, "series of gateway and replica")
        serve_all(server)
        for expression, expected in (
            ("sum(ray_bakehouse_requests_total)", 7),
            ("sum(ray_bakehouse_rejections_total)", 1),
            ("sum(ray_bakehouse_preemptions_total)", 1),
            ("count(ray_bakehouse_prefix_hit_tokens_total > 0)", 1),
        ):
            wait_until(partial(is_value, scraping, expression, expected), SEEN_S, expression)
        recorded = '{__name__=~"bakehouse:.*"}'
        n_recorded = rules().count("- record:")
        wait_until(lambda: len(scraping.labels_of(recorded, "__name__")) == n_recorded, SEEN_S, "recorded series")
        yield scraping


def is_value(scraping: Prometheus, expression: str, expected: float) -> bool:
    return scraping.value(expression) == expected


def serve_all(server: Server) -> None:
    url = f"{server.url}/v1/completions"
    for _ in range(2):  # the second finds its prompt in the cache
        assert httpx.post(url, json=body(1, 4), timeout=120).is_success
    chat = {"model": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=120).is_success
    with ExitStack() as streams:
        for i in range(SLOTS):
            streams.enter_context(endless(server, body(2 + i, N_ENDLESS, stream=True, priority=5)))
        urgent = httpx.post(url, json=body(5, 4, priority=-1), timeout=120)  # takes the slot of one of them
        assert urgent.is_success
    assert httpx.post(url, json=body(6, 4, model="other"), timeout=120).status_code == 404


@contextmanager
def endless(server: Server, asked: dict[str, object]) -> Iterator[None]:
    """A stream that has brought its first token and goes on; its client leaves at the end."""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=120) as stream:
        lines = stream.iter_lines()  # which would close the connection if it were let go
        next(lines)
        yield


def filled_in(expression: str) -> str:
    for variable, value in CHOSEN.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression, expression
    return expression


def test_all_targets_are_up(prometheus: Prometheus) -> None:
    assert prometheus.targets()
    assert set(prometheus.targets().values()) == {"up"}, prometheus.targets()


def without_numbers(prometheus: Prometheus, dashboard: Dashboard) -> list[tuple[str, str, list[float]]]:
    """Title and expression of what a dashboard would draw nothing for, and what it gets instead."""
    empty = []
    for panel in json.loads(as_json(dashboard))["panels"]:
        for target in panel.get("targets", ()):
            values = [value for _, value in prometheus.query(filled_in(target["expr"]))]
            if not values or np.isnan(values).any():
                empty.append((panel["title"], target["expr"], values))
    return empty


@pytest.mark.parametrize("dashboard", ALL, ids=lambda dashboard: dashboard.key)
def test_every_expression_of_a_dashboard_returns_numbers(prometheus: Prometheus, dashboard: Dashboard) -> None:
    # A rate needs two samples, and series by tenant begin with the tenant's first request.
    with suppress(AssertionError):
        wait_until(lambda: not without_numbers(prometheus, dashboard), SEEN_S, "numbers")
    assert without_numbers(prometheus, dashboard) == []


@pytest.mark.parametrize("dashboard", ALL, ids=lambda dashboard: dashboard.key)
def test_a_dashboard_s_variables_offer_what_there_is(prometheus: Prometheus, dashboard: Dashboard) -> None:
    offered = {
        variable.name: prometheus.labels_of(filled_in(variable.of), variable.label)
        for variable in dashboard.variables
    }
    process = "Gateway" if dashboard.key == "router" else "Replica"
    assert offered["cluster"] == set()  # a label of Kubernetes
    assert offered["application"] == {"bakehouse"}
    assert offered["deployment"] == {process}
    assert len(offered["replica"]) == 1


def test_every_rule_is_evaluated_and_none_finds_fault_with_this_server(prometheus: Prometheus) -> None:
    wait_until(
        lambda: all(rule["health"] != "unknown" for rule in prometheus.rules()),
        SEEN_S,
        "an evaluation of each rule",
    )
    found = prometheus.rules()
    assert len(found) == sum(len(group["rules"]) for group in yaml.safe_load(rules())["groups"])
    assert [rule for rule in found if rule["health"] != "ok" or rule.get("lastError")] == []
    assert [rule["name"] for rule in found if rule.get("state") == "firing"] == []


def test_every_name_in_a_dashboard_or_rule_is_in_the_scrape(prometheus: Prometheus) -> None:
    written = "".join(map(as_json, ALL)) + rules()
    names = set(re.findall(r"\bray_(?!io_)\w+", written))
    present = prometheus.labels_of('{__name__=~"ray_.*"}', "__name__")
    assert len(names) > len(ALL)
    assert names <= present


def test_an_interrupt_ends_it_and_leaves_nothing(server: Server, tmp_path: Path) -> None:
    with monitoring(server, tmp_path / "log") as (_, process):
        (child,) = psutil.Process(process.pid).children()
        (data,) = [word.partition("=")[2] for word in child.cmdline() if word.startswith("--storage.tsdb.path=")]
        assert Path(data).is_dir()
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 0
        assert gone([child])
        assert not Path(data).parent.exists()


def is_shown(window: webdriver.Chrome, lines: tuple[str, ...]) -> bool:
    text = window.execute_script("return document.body.innerText")  # whole, where the page is drawn anew meanwhile
    return all(re.search(line, text) for line in lines)


def test_the_serve_tab_of_rays_dashboard_names_our_deployments_and_the_state_of_each_replica(
    server: Server, tmp_path: Path
) -> None:
    """Under load. `BAKEHOUSE_SCREENSHOTS` names the folder in which the pictures are kept."""
    kept = Path(os.environ.get(SCREENSHOTS, tmp_path))
    announced = re.search(r"dashboard +(\S+) \(token: (\S+)\)", server.log.read_text())
    assert announced is not None
    url, token = announced[1], Path(announced[2]).read_text()
    with browsing(tmp_path / "profile") as window, endless(server, body(7, N_ENDLESS, stream=True)):
        window.get(url)
        window.add_cookie({"name": "ray-authentication-token", "value": token, "path": "/"})
        for name, (path, shown) in PAGES.items():
            window.get(f"{url}/#/serve{path}")
            window.refresh()
            wait_until(partial(is_shown, window, shown), PAGE_S, name)
            assert window.save_screenshot(str(kept / f"{name}.png"))
    for name in PAGES:
        picture = kept / f"{name}.png"
        assert picture.stat().st_size < MAX_SCREENSHOT_BYTES
        assert len(np.unique(imread(picture).reshape(-1, 4)[:, :3], axis=0)) > MIN_COLOURS
