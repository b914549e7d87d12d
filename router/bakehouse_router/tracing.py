"""The spans of a request, beside those that Ray Serve makes of its own parts.

    gateway               from the request's arrival to its end
    ├── queue             at a replica, until it is admitted to the batch
    ├── prefill           until its first token
    └── decode            until its last one

Each prompt of a request has the three of its own, and those again for each further attempt: where a replica was
lost, they end there, and others follow. Whether a request is traced has been decided before it comes here: by the
client's `traceparent`, or by Serve, whose span is then the current one. Spans carry counts and names, no text.
"""

import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context, attach, get_current
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes

from bakehouse_router.attempts import Attempt
from bakehouse_router.request_log import MAX_NAME_CHARS
from bakehouse_router.request_report import PromptAttempts, RequestReport

TRACEPARENT = "traceparent"
_PROPAGATOR = TraceContextTextMapPropagator()
_NS = 1_000_000_000
# What Serve does of its own accord, or for a request that is not traced: else it would decide anew, for a trace
# that begins in the middle.
UNTRACED = trace.set_span_in_context(
    trace.NonRecordingSpan(trace.SpanContext(trace_id=1, span_id=1, is_remote=False)), Context()
)


class Tracing:
    """Begins the spans of one gateway's requests; `tracer` None takes the one that Serve has set up."""

    def __init__(self, tracer: trace.Tracer | None = None) -> None:
        self._tracer = trace.get_tracer("bakehouse") if tracer is None else tracer

    def begin(self, carrier: Mapping[str, str]) -> "RequestSpan | None":
        """The span of a request with these headers; None where it is not to be traced."""
        parent = get_current()
        if not _span_context(parent).is_valid:
            # What cannot be read as one is as if it were not there.
            parent = _PROPAGATOR.extract(carrier, context=Context())
        if not _span_context(parent).trace_flags.sampled:
            return None
        return RequestSpan(self._tracer, parent)


class RequestSpan:
    """One request's span; `end` it once."""

    def __init__(self, tracer: trace.Tracer, parent: Context) -> None:
        # The two clocks' difference: spans have wall clock times, everything here is measured by the other one.
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._tracer = tracer
        self._span = tracer.start_span("gateway", context=parent)
        self._context = trace.set_span_in_context(self._span, parent)

    @property
    def traceparent(self) -> str:
        """This span in W3C's form."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, context=self._context)
        return carrier[TRACEPARENT]

    def enter(self) -> None:
        """Makes it the current span for the rest of this task."""
        attach(self._context)

    def end(self, report: RequestReport) -> None:
        """The request is over; so are the parts that its report tells of."""
        for prompt in report.prompts:
            self._add_attempts(prompt, report.ended_at)
        self._span.set_attributes(_attributes(report))
        if report.failed_here and report.problem is not None:
            self._span.set_status(trace.StatusCode.ERROR, report.problem.message)
        self._span.end(self._ns(report.ended_at))

    def _add_attempts(self, prompt: PromptAttempts, ended_at: float) -> None:
        ends = [attempt.n_before for attempt in prompt.made[1:]] + [prompt.n_tokens]
        for attempt, n_tokens in zip(prompt.made, ends, strict=True):
            self._add_attempt(attempt, max(0, n_tokens - attempt.n_before), attempt.ended_at or ended_at)

    def _add_attempt(self, attempt: Attempt, n_tokens: int, ended_at: float) -> None:
        shared: dict[str, str | int | float] = {"bakehouse.replica": ",".join(attempt.replica_ids)}
        if attempt.n_before:
            shared["bakehouse.resumed_after_tokens"] = attempt.n_before
        first_at = attempt.first_at
        if first_at is None:
            self._add("queue", attempt.begun_at, ended_at, shared, is_lost=attempt.is_lost)
            return
        admitted_at = min(attempt.begun_at + (attempt.queue_s or 0.0), first_at)
        self._add("queue", attempt.begun_at, admitted_at, shared)
        prompt = {"gen_ai.usage.input_tokens": attempt.n_prompt, "bakehouse.cached_tokens": attempt.n_cached}
        self._add("prefill", admitted_at, first_at, {**shared, **prompt})
        output = {**shared, "gen_ai.usage.output_tokens": n_tokens}
        self._add("decode", first_at, max(first_at, ended_at), output, is_lost=attempt.is_lost)

    def _add(
        self, name: str, begun_at: float, ended_at: float, attributes: Attributes, *, is_lost: bool = False
    ) -> None:
        span = self._tracer.start_span(
            name, context=self._context, start_time=self._ns(begun_at), attributes=attributes
        )
        if is_lost:
            span.set_status(trace.StatusCode.ERROR, "the replica was lost")
        span.end(self._ns(ended_at))

    def _ns(self, moment: float) -> int:
        return self._epoch_ns + int(moment * _NS)


def _span_context(context: Context) -> trace.SpanContext:
    return trace.get_current_span(context).get_span_context()


def _attributes(report: RequestReport) -> dict[str, str | int | float | tuple[str, ...]]:
    """What is known, by OpenTelemetry's names for generative AI where it has one."""
    call, usage, cost = report.call, report.usage, report.cost
    known: dict[str, str | int | float | tuple[str, ...] | None] = {
        "bakehouse.request_id": report.request_id,
        "bakehouse.face": report.face,
        "bakehouse.tenant": _encodable(report.tenant) or None,
        "bakehouse.outcome": report.outcome,
        "bakehouse.replicas": report.replica_ids,
        "bakehouse.resumed": report.n_resumed,
        "bakehouse.preempted": report.n_preempted,
        "bakehouse.cached_tokens": None if usage is None else usage.cached_tokens,
        "bakehouse.block_seconds": None if cost is None else cost.block_seconds,
        "bakehouse.computed_tokens": None if cost is None else cost.computed_tokens,
        "bakehouse.recomputed_tokens": None if cost is None else cost.recomputed_tokens,
        "gen_ai.operation.name": "text_completion" if report.kind == "completion" else "chat",
        "gen_ai.request.model": None if call is None else _encodable(call.model),
        "gen_ai.response.id": report.call_id,
        "gen_ai.response.finish_reasons": tuple(str(finish) for finish in report.finishes),
        "gen_ai.usage.input_tokens": None if usage is None else usage.prompt_tokens,
        "gen_ai.usage.output_tokens": None if usage is None else usage.completion_tokens,
        "error.type": None if report.problem is None else report.outcome,
    }
    return {name: value for name, value in known.items() if value is not None}


def _encodable(name: str) -> str:
    """A name from outside as UTF-8 can have it, and not too long: else all its batch of spans is lost."""
    return name[:MAX_NAME_CHARS].encode(errors="replace").decode()
