"""serveConfigV2 is what `bakehouse config render --target kubernetes` prints of the same configuration."""

import json

import pytest
from bakehouse_cluster.config_sections import TracingSection
from bakehouse_cluster.serve_config import serve_config, tracing_environment
from bakehouse_cluster.serve_environment import cluster_environment
from charts import Helm, containers, environment, serve_document, values

PROXY = "config.server.ingress=proxy"


def test_chart_and_command_make_the_same_document(helm: Helm, example: str) -> None:
    document = serve_document(helm.objects(example))
    assert document == serve_config(values(example).get("config", {}), "kubernetes")


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"model": {}, "replica": {}, "gateway": {}, "server": {}},
        {
            "gateway": {"max_queued_tokens": 123456789, "max_choices": 1},
            "replica": {"max_waiting_requests": 1000000},
        },
        {"gateway": {"max_body": 1073741824, "cpus": 0.25, "keep_alive_s": 7.5, "cors_origins": ["https://a.b"]}},
        {"server": {"drain_s": 45.5, "object_store": 1000000000, "grpc_port": 9001, "port": 8001}},
        {"model": {"chat_template": "{% for m in messages %}\n  {{ m.content }}: 'a' \"b\"\n{% endfor %}\n"}},
        {"replica": {"overlap": True, "autoscale": {"min_replicas": 1, "max_replicas": 1, "target_requests": 9}}},
        {"replica": {"autoscale": None, "kv_memory": "512MiB"}, "server": {"grpc_port": None, "replicas": 1}},
        {"tracing": {"enabled": True}, "gateway": {"request_log": False}},
        {"tracing": {"enabled": True, "sampling_ratio": 0}, "model": {}},
        {"tracing": {"enabled": False, "sampling_ratio": 0.5}},
        {"server": {"object_store": "76.3 MiB"}, "gateway": {"max_body": "1KB"}},
        {"server": {"gateways": 2}, "model": {"served_name": "0123", "revision": "1e3"}},
    ],
    ids=json.dumps,
)
def test_numbers_texts_and_nothing_come_through_as_they_are(helm: Helm, tree: dict[str, object]) -> None:
    document = serve_document(helm.objects("minimal-cpu", f"config={json.dumps(tree)}"))
    assert _without_nothing(document) == _without_nothing(serve_config(tree, "kubernetes"))


def _without_nothing(tree: object) -> object:
    """A key that is null is a key that is not there, to helm as to the configuration."""
    if isinstance(tree, dict):
        return {key: _without_nothing(value) for key, value in tree.items() if value is not None}
    return [_without_nothing(item) for item in tree] if isinstance(tree, list) else tree


def test_no_text_of_the_configuration_is_run_as_a_template(helm: Helm) -> None:
    text = "{{ .Release.Name }}"
    document = serve_document(
        helm.objects("minimal-cpu", f"config={json.dumps({'model': {'chat_template': text}})}")
    )
    assert document["applications"][0]["args"]["model"]["chat_template"] == text


@pytest.mark.parametrize(("ingress", "haproxy"), [("direct", True), ("haproxy", True), ("proxy", False)])
def test_head_and_workers_are_told_what_a_cluster_needs(helm: Helm, ingress: str, haproxy: bool) -> None:
    for drain_s in (30.0, 45.5, 120.0):
        objects = helm.objects(
            "minimal-cpu", f"config.server.ingress={ingress}", f"config.server.drain_s={drain_s}"
        )
        expected = cluster_environment(drain_s=drain_s, haproxy=haproxy)
        for container in containers(objects).values():
            told = environment(container)
            assert {name: told.get(name) for name in expected} == expected
            assert {name for name in told if name.startswith("RAY_")} <= set(expected)


@pytest.mark.parametrize(
    "section",
    [
        {"enabled": True},
        {"enabled": True, "sampling_ratio": 0.25},
        {"enabled": True, "sampling_ratio": 0.00001, "exporter": "otlp", "endpoint": "http://collector:4317"},
    ],
    ids=json.dumps,
)
def test_serves_own_proxies_are_told_what_to_trace_and_where_it_goes(
    helm: Helm, section: dict[str, object]
) -> None:
    expected = tracing_environment(TracingSection.model_validate(section))
    tracing = f"config.tracing={json.dumps(section)}"
    for container in containers(helm.objects("minimal-cpu", PROXY, tracing)).values():
        assert expected.items() <= environment(container).items()
    for untold in ((tracing,), (PROXY,)):  # HAProxy makes no spans
        for container in containers(helm.objects("minimal-cpu", *untold)).values():
            assert not expected.keys() & environment(container).keys()
