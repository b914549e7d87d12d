"""Opens a record for each request for an answer of the model, and ends it when the answer has been sent."""

from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bakehouse_router.request_record import Records, RequestRecord
from bakehouse_router.request_report import Kind
from bakehouse_router.tracing import TRACEPARENT


def record_of(scope: Scope) -> RequestRecord | None:
    """The record of the request that this scope is of; None for those that have none."""
    record: RequestRecord | None = scope.get("state", {}).get("record")
    return record


def note_error(scope: Scope, error: Exception) -> None:
    """The request is answered by `error`."""
    record = record_of(scope)
    if record is not None:
        record.fail(error)


class Recorded:
    """Gives the requests of `kinds`, POST to these paths, a record; needs the request's id in the state.

    Where the request is traced, a header of the response names its span.
    """

    def __init__(self, app: ASGIApp, *, records: Records, kinds: Mapping[str, Kind]) -> None:
        self._app = app
        self._records = records
        self._kinds = kinds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = None if scope["type"] != "http" or scope["method"] != "POST" else self._kinds.get(scope["path"])
        if kind is None:
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        with self._records.open("http", kind, state["request_id"], Headers(scope=scope)) as record:
            state["record"] = record
            try:
                await self._app(
                    scope, receive, send if record.span is None else _telling(record.span.traceparent, send)
                )
            finally:
                record.tenant = state.get("tenant", "")


def _telling(traceparent: str, send: Send) -> Send:
    async def send_with_trace(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[TRACEPARENT] = traceparent
        await send(message)

    return send_with_trace
