"""What Prometheus scrapes and Grafana shows."""

import json

import chart_files
import yaml
from charts import CHART, Helm, containers, of_kind


def test_the_pod_monitor_scrapes_every_port_of_metrics(helm: Helm) -> None:
    objects = helm.objects("full")
    (monitor,) = of_kind(objects, "PodMonitor")
    scraped = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    assert scraped == {"metrics", "dash-metrics", "as-metrics", "haproxy"}
    assert scraped <= {port["name"] for port in containers(objects)["head"]["ports"]}
    assert monitor["spec"]["selector"]["matchLabels"]["ray.io/is-ray-node"] == "yes"
    assert {endpoint["interval"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} == {"10s"}
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


def test_without_autoscaler_and_haproxy_their_ports_are_not_scraped(helm: Helm) -> None:
    (monitor,) = of_kind(helm.objects("multi-node", "monitoring.podMonitor.enabled=true"), "PodMonitor")
    assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} == {"metrics", "dash-metrics"}


def test_rules_come_through_as_they_are_in_their_file(helm: Helm) -> None:
    (rules,) = of_kind(helm.objects("full"), "PrometheusRule")
    assert rules["spec"] == yaml.safe_load((CHART / "files" / "rules.yaml").read_text())
    assert rules["metadata"]["labels"]["release"] == "prometheus"


def test_each_dashboard_is_a_config_map_that_grafanas_sidecar_finds(helm: Helm) -> None:
    maps = of_kind(helm.objects("full"), "ConfigMap")
    shown = {key: json.loads(text) for one in maps for key, text in one["data"].items()}
    assert shown == {path.name: json.loads(path.read_text()) for path in CHART.glob("files/dashboards/*.json")}
    assert all(one["metadata"]["labels"]["grafana_dashboard"] == "1" for one in maps)
    assert all(one["metadata"]["annotations"] == {"grafana_folder": "Bakehouse"} for one in maps)


def test_the_dashboards_are_those_that_the_table_of_metrics_gives() -> None:
    found = {path: path.read_text() for path in chart_files.DASHBOARDS.iterdir()}
    assert found == chart_files.dashboard_files(), "run python helm/tools/chart_files.py"


def test_nothing_of_it_is_there_unless_it_is_asked_for(helm: Helm) -> None:
    kinds = {one["kind"] for one in helm.objects("minimal-cpu")}
    assert not kinds & {"PodMonitor", "PrometheusRule", "ConfigMap"}
