"""One request from its arrival to its end, whatever becomes of it; then its report goes to the log and the trace.

    with records.open("http", "chat", request_id, headers) as record:   # it has arrived; the end reports it, once
        record.begin(call, call_id)                                     # it can be understood
        record.follow(generation)                                       # it runs
        record.fail(error)                                              # it was refused, or broke

What a record knows of its generation it reads at the end: nothing here happens per token.
"""

import time
from collections.abc import Mapping
from types import TracebackType

from bakehouse_replica.core.metric_table import CANCELLED
from starlette.requests import ClientDisconnect

from bakehouse_router.api.errors import problem_of
from bakehouse_router.calls import Call
from bakehouse_router.explanations import Explanations
from bakehouse_router.generation import Generation
from bakehouse_router.request_log import RequestLog
from bakehouse_router.request_report import Face, Kind, PromptAttempts, RequestReport
from bakehouse_router.tracing import RequestSpan, Tracing


class RequestRecord:
    """Collects what becomes of one request; a context manager, whose end reports it.

    `tenant` is whose key it came with. `span` None: it is not traced.
    """

    def __init__(
        self,
        face: Face,
        kind: Kind,
        request_id: str,
        log: RequestLog,
        span: RequestSpan | None,
        open_records: "set[RequestRecord]",
        explanations: Explanations | None = None,
    ) -> None:
        self.tenant = ""
        self.span = span
        self.keeps_text = log.has_prompts
        self._face: Face = face
        self._kind: Kind = kind
        self._request_id = request_id
        self._log = log
        self._open_records = open_records
        self._explanations = explanations
        self._received_at = time.monotonic()
        self._call_id: str | None = None
        self._call: Call | None = None
        self._generation: Generation | None = None
        self._error: Exception | None = None

    def begin(self, call: Call, call_id: str) -> None:
        """The request has been understood as this call."""
        self._call, self._call_id = call, call_id
        self.tenant = call.options.tenant
        if self._explanations is not None:
            self._explanations.begin(self.tenant, (self._request_id, call_id), self.report)

    def follow(self, generation: Generation) -> None:
        """The call runs; how that ends counts, unless `fail` says more."""
        self._generation = generation

    def fail(self, error: Exception) -> None:
        """The request is answered by this error."""
        self._error = error

    def __enter__(self) -> "RequestRecord":
        self._open_records.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open_records.discard(self)
        if isinstance(error, Exception):
            self.fail(error)
        report = self.report()
        self._log.write(report)
        if self._explanations is not None and self._call_id is not None:
            ids = (self._request_id, self._call_id)
            self._explanations.end(self.tenant, ids, self.report, report)
        if self.span is not None:
            self.span.end(report)

    def report(self) -> RequestReport:
        """What has become of it so far."""
        generation = self._generation
        error, outcome = self._error, CANCELLED
        if generation is not None:
            error, outcome = error or generation.error, generation.outcome or CANCELLED
        problem = None
        if isinstance(error, ClientDisconnect):
            outcome = CANCELLED
        elif error is not None:
            problem = problem_of(error, self._request_id)
            outcome = problem.code or str(problem.status)
        return RequestReport(
            request_id=self._request_id,
            face=self._face,
            kind=self._kind,
            received_at=self._received_at,
            ended_at=time.monotonic(),
            outcome=outcome,
            tenant=self.tenant,
            call_id=self._call_id,
            call=self._call,
            problem=problem,
            usage=None if generation is None else generation.usage,
            cost=None if generation is None else generation.cost,
            queued_at=None if generation is None else generation.queued_at,
            finishes=() if generation is None else generation.finishes,
            first_token_at=None if generation is None else generation.first_token_at,
            prompts=() if generation is None else _prompts(generation),
            texts=() if generation is None else generation.texts,
        )


class Records:
    """Opens the records of one gateway. `tracing` None: nothing is traced; `explanations` None: nor explained."""

    def __init__(
        self, log: RequestLog, tracing: Tracing | None = None, explanations: Explanations | None = None
    ) -> None:
        self._log = log
        self._tracing = tracing
        self._explanations = explanations
        self._open: set[RequestRecord] = set()

    @property
    def n_open(self) -> int:
        """Requests that have arrived and whose answer has not been sent whole."""
        return len(self._open)

    def open(self, face: Face, kind: Kind, request_id: str, carrier: Mapping[str, str]) -> RequestRecord:
        """The record of a request that has arrived; `carrier`: its headers, by names in lower case."""
        span = None if self._tracing is None else self._tracing.begin(carrier)
        return RequestRecord(face, kind, request_id, self._log, span, self._open, self._explanations)


def _prompts(generation: Generation) -> tuple[PromptAttempts, ...]:
    attempts_and_counts = zip(generation.attempts, generation.completion_tokens, strict=True)
    return tuple(
        PromptAttempts(made=tuple(each.made), n_tokens=n_tokens) for each, n_tokens in attempts_and_counts
    )
