"""Where the spans of a Serve process go; Serve calls one of these functions in each, by its path.

Serve makes a span of whatever it carries. Left out is what belongs to nobody's request: the polls of each
replica's status, two a second for each gateway; subscriptions; whoever asks a gateway whether it lives; and the
console page with its polls, one a second.
"""

import os
from importlib import import_module

from bakehouse_replica.core.errors import ConfigError
from bakehouse_router.api.auth import METRICS_PATH, OPEN_PATHS, REPLICAS_PATH
from bakehouse_router.console.pages import CONSOLE_PATHS
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

_EXPORTER = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
_BETWEEN_OURS = ("replica_handle_request Replica ", "route_to_replica Replica ")
_PROBES = {*OPEN_PATHS, *CONSOLE_PATHS, METRICS_PATH, REPLICAS_PATH, "Check"}
# By which Serve's gateways, and the proxies in Python before them, say what is asked.
_ASKED = ("route", "call_method", "http.route", "rpc.method")


class OfRequests(SpanProcessor):
    """Passes on to `inner` what belongs to a request."""

    def __init__(self, inner: SpanProcessor) -> None:
        self._inner = inner

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing is known yet of what the span will be."""
        self._inner.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        """What has a parent is wanted by whoever made that, but for the gateway's part of a proxy's probe."""
        if not _is_probe(span) and (span.parent is not None or not span.name.startswith(_BETWEEN_OURS)):
            self._inner.on_end(span)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


def _is_probe(span: ReadableSpan) -> bool:
    asked = span.attributes or {}
    return any(asked.get(name) in _PROBES for name in _ASKED)


def to_files() -> list[SpanProcessor]:
    """A file for each process in the folder `spans` beside Serve's logs, one JSON object after the other."""
    # Where Serve sets up its tracing it has loaded this; a process that only reads a configuration has not.
    from ray.serve._private.tracing_utils import default_tracing_exporter

    return [OfRequests(inner) for inner in default_tracing_exporter(f"process_{os.getpid()}.json")]  # type: ignore[no-untyped-call]


def to_otlp() -> list[SpanProcessor]:
    """An OpenTelemetry collector, by OTLP over gRPC, in batches. Raises `ConfigError` without the extra."""
    require_exporter()
    # An optional dependency.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return [OfRequests(BatchSpanProcessor(OTLPSpanExporter()))]


def require_exporter() -> None:
    """Raises `ConfigError` where spans cannot be sent by OTLP."""
    try:
        import_module(_EXPORTER)
    except ImportError as error:
        raise ConfigError(
            f"tracing.exporter: otlp needs the package opentelemetry-exporter-otlp-proto-grpc "
            f"(pip install 'bakehouse[otel]'): {error}"
        ) from None
