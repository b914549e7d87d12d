"""Keeps from Ray Serve the request headers that it would act on before our application sees them.

Named in the environment variable RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH of whatever runs Serve. Serve's own
time limit cuts a stream off without a word; a header that is not UTF-8 ends in a plain-text 500. An `x-request-id`
that our application would not take is left out, so that Serve makes one.
"""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

HIDDEN = frozenset(
    {
        b"x-request-timeout-seconds",
        b"x-request-disconnect-disabled",
        b"x-session-id",
        b"serve-multiplexed-model-id",
    }
)
REQUEST_ID = b"x-request-id"
# Serve reads them where it traces; as anything but text they would end in that 500, too.
TRACE_CONTEXT = frozenset({b"traceparent", b"tracestate"})


class HideServeHeaders:
    """An ASGI middleware that comes before Serve."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "headers" in scope:
            scope["headers"] = [(name, value) for name, value in scope["headers"] if _may_pass(name, value)]
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """What Serve asks for."""
    return [Middleware(HideServeHeaders)]


def _may_pass(name: bytes, value: bytes) -> bool:
    name = name.lower().replace(b"_", b"-")
    if name == REQUEST_ID:
        return value.isascii() and value.decode("ascii").isprintable()
    if name in TRACE_CONTEXT:
        return value.isascii()
    return name not in HIDDEN
