"""An OpenTelemetry collector that keeps what it is sent, over real gRPC."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(TraceServiceServicer):
    """`endpoint`: where it listens."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._lock = threading.Lock()
        self._spans: list[Span] = []

    def Export(
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        with self._lock:
            for resource in request.resource_spans:
                self._spans += [span for scope in resource.scope_spans for span in scope.spans]
        return ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Span]:
        """All that have come so far."""
        with self._lock:
            return list(self._spans)

    def trace(self, trace_id: str) -> dict[str, Span]:
        """The spans of a trace, by name."""
        return {span.name: span for span in self.spans if span.trace_id.hex() == trace_id}


@contextmanager
def collecting() -> Iterator[Collector]:
    server, collector = grpc.server(ThreadPoolExecutor(2)), Collector()
    add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def attributes(span: Span) -> dict[str, object]:
    """As plain values; lists are not among those that are asked for."""
    return {each.key: getattr(each.value, str(each.value.WhichOneof("value"))) for each in span.attributes}
