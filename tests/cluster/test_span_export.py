"""Which spans leave a Serve process, and what is asked of it before."""

import sys

import pytest
from bakehouse_cluster.checks import check_before_start
from bakehouse_cluster.config import parse_config
from bakehouse_cluster.serve_config import serve_config
from bakehouse_cluster.span_export import OfRequests, require_exporter, to_otlp
from bakehouse_replica.core.errors import ConfigError
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from ray._common.utils import import_attr
from ray.serve.schema import ServeDeploySchema

EXPORTER = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"


def test_what_belongs_to_no_request_is_left_out() -> None:
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(OfRequests(SimpleSpanProcessor(kept)))
    tracer = provider.get_tracer("serve")
    for name in ("replica_handle_request Replica status", "route_to_replica Replica subscribe"):
        tracer.start_span(name).end()
    probes = [{"route": path} for path in ("/ready", "/metrics", "/", "/console/main.js", "/v1/replicas")]
    for asked in (*probes, {"route": "bakehouse", "call_method": "Check"}):
        tracer.start_span("replica_handle_request Gateway __call__", attributes=asked).end()
    with tracer.start_as_current_span(
        "proxy_http_request Gateway GET /ready", attributes={"http.route": "/ready"}
    ):
        for name in ("route_to_replica Gateway __call__", "replica_handle_request Gateway __call__"):
            tracer.start_span(name, attributes={"route": "/ready"}).end()
    tracer.start_span("proxy_grpc_request Gateway Check", attributes={"rpc.method": "Check"}).end()
    assert kept.get_finished_spans() == ()
    with tracer.start_as_current_span(
        "replica_handle_request Gateway __call__", attributes={"route": "/v1/models"}
    ):
        tracer.start_span("replica_handle_request Replica serve").end()
    assert len(kept.get_finished_spans()) == 2


def test_the_document_of_serve_deploy_names_an_exporter_that_is_there() -> None:
    for exporter in ("files", "otlp"):
        tree = {"tracing": {"enabled": True, "exporter": exporter, "sampling_ratio": 0.25}}
        document = serve_config(tree, "kubernetes")
        assert document["tracing_config"] == {
            "enabled": True,
            "exporter_import_path": f"bakehouse_cluster.span_export:to_{exporter}",
            "sampling_ratio": 0.25,
        }
        tracing = ServeDeploySchema.model_validate(document).tracing_config
        assert tracing is not None
        assert callable(import_attr(tracing.exporter_import_path))
    # Serve's controller keeps what the last document has said, unless this one says it.
    for untraced in ({}, {"tracing": {"exporter": "otlp"}}):
        assert serve_config(untraced, "kubernetes")["tracing_config"] == {"enabled": False}


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        ({"sampling_ratio": 1.5}, "tracing.sampling_ratio: input should be less than or equal to 1, not 1.5"),
        ({"exporter": "jaeger"}, "tracing.exporter: input should be 'files' or 'otlp', not 'jaeger'"),
        ({"exporter": "otlp", "endpoint": "collector:4317"}, "tracing.endpoint: string should match pattern"),
        ({"endpoint": "http://c:4317"}, "tracing: endpoint is 'http://c:4317', but exporter is 'files'"),
    ],
)
def test_bad_values_are_refused_by_their_keys(tree: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config({"tracing": tree})
    assert str(raised.value).startswith(complaint)


def test_a_bare_off_is_a_form_of_the_request_log() -> None:
    config = parse_config({"gateway": {"request_log": False}})
    assert config.gateway_settings().request_log == "off"
    with pytest.raises(
        ConfigError, match=r"^gateway\.request_log: input should be 'off', 'text' or 'json', not 'on'"
    ):
        parse_config({"gateway": {"request_log": True}})


def test_without_the_extra_the_start_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, EXPORTER, None)  # as where it is not installed
    config = parse_config({"tracing": {"enabled": True, "exporter": "otlp"}})
    for refuse in (require_exporter, to_otlp, lambda: check_before_start(config)):
        with pytest.raises(ConfigError) as raised:
            refuse()
        assert str(raised.value).startswith("tracing.exporter: otlp needs the package")
        assert "bakehouse[otel]" in str(raised.value)
        assert "\n" not in str(raised.value)
    check_before_start(parse_config({"tracing": {"exporter": "otlp"}}))
