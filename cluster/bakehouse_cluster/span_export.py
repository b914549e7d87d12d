"""Where the spans of a Serve process go; Serve calls one of these functions in each, by its path.

Of what Serve traces by itself, the polls of a replica's status and the subscriptions to it are left out: they
belong to no request, and there are two polls a second for each gateway and replica.
"""

import os
from importlib import import_module

from bakehouse_replica.core.errors import ConfigError
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

_EXPORTER = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
_OF_NO_REQUEST = ("replica_handle_request Replica ", "route_to_replica Replica ")


class OfRequests(SpanProcessor):
    """Passes on to `inner` what belongs to a request."""

    def __init__(self, inner: SpanProcessor) -> None:
        self._inner = inner

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing is known yet of what the span will be."""
        self._inner.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        """Whoever sends a request to a replica has a span; where there is none, there is no request."""
        if span.parent is not None or not span.name.startswith(_OF_NO_REQUEST):
            self._inner.on_end(span)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


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
