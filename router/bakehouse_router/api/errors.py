"""One table: each of our errors → HTTP status, gRPC status, OpenAI error type and code; and the envelope.

{"error": {"message": …, "type": …, "param": …, "code": …}}
"""

import math
from dataclasses import dataclass
from http import HTTPStatus

from bakehouse_replica.core.errors import (
    BakehouseError,
    ContextTooLong,
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    Overloaded,
    RequestTooLarge,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    UnknownRequest,
)
from bakehouse_replica.core.metric_table import INTERNAL_ERROR
from starlette.exceptions import HTTPException

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
_RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An error as a client sees it."""

    status: int
    grpc_status: str
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None

    def envelope(self) -> dict[str, object]:
        """The body, or the last event of a stream that had begun."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """What the status needs besides the body."""
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


# The first row whose class fits counts, so subclasses stand before their bases.
# gRPC statuses are the names of `grpc.StatusCode`.
_TABLE: tuple[tuple[type[BakehouseError], int, str, str, str], ...] = (
    (UnknownModel, 404, "NOT_FOUND", INVALID_REQUEST, "model_not_found"),
    (UnknownRequest, 404, "NOT_FOUND", INVALID_REQUEST, "request_not_found"),
    (RequestTooLarge, 413, "INVALID_ARGUMENT", INVALID_REQUEST, "request_too_large"),
    (ContextTooLong, 400, "INVALID_ARGUMENT", INVALID_REQUEST, "context_length_exceeded"),
    (InvalidRequest, 400, "INVALID_ARGUMENT", INVALID_REQUEST, "invalid_request"),
    (Unauthenticated, 401, "UNAUTHENTICATED", "authentication_error", "invalid_api_key"),
    (Overloaded, 429, "RESOURCE_EXHAUSTED", "rate_limit_error", "overloaded"),
    (DeadlineExceeded, 408, "DEADLINE_EXCEEDED", "timeout_error", "deadline_exceeded"),
    (EngineDead, 503, "UNAVAILABLE", SERVER_ERROR, "engine_dead"),
    (Unavailable, 503, "UNAVAILABLE", SERVER_ERROR, "unavailable"),
)

_HTTP_ADVICE = {
    404: "there is no such route here; /openapi.json lists all, and OpenAI's begin with /v1",
    405: "this route takes other methods; see the header allow, or /openapi.json",
}
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 415: "unsupported_media_type"}


def error_code(error: Exception) -> str:
    """The code by which clients and metrics know one of our errors; all others have one together."""
    return next((code for kind, _, _, _, code in _TABLE if isinstance(error, kind)), INTERNAL_ERROR)


def _retry_after_s(error: BakehouseError) -> int | None:
    if isinstance(error, Overloaded):
        return max(1, math.ceil(error.retry_after_s))
    return _RETRY_AFTER_S if isinstance(error, Unavailable) else None


def problem_of(error: Exception, request_id: str) -> Problem:
    """How `error` is told to the client. What is not one of ours is told by the request id only."""
    if isinstance(error, BakehouseError):
        for kind, status, grpc_status, type_, code in _TABLE:
            if isinstance(error, kind):
                return Problem(
                    status=status,
                    grpc_status=grpc_status,
                    message=error.message,
                    type=type_,
                    code=code,
                    param=error.param if isinstance(error, InvalidRequest) else None,
                    retry_after_s=_retry_after_s(error),
                )
    if isinstance(error, HTTPException):
        return Problem(
            status=error.status_code,
            grpc_status="INVALID_ARGUMENT",
            message=_HTTP_ADVICE.get(error.status_code) or error.detail or HTTPStatus(error.status_code).phrase,
            type=INVALID_REQUEST,
            code=_HTTP_CODES.get(error.status_code),
        )
    return Problem(
        status=500,
        grpc_status="INTERNAL",
        message=f"an internal error ended this request; the log tells more under its id {request_id}",
        type=SERVER_ERROR,
        code=INTERNAL_ERROR,
    )
