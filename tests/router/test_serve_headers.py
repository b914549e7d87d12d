"""Which request headers reach Ray Serve."""

import pytest
from bakehouse_router.serve_headers import middlewares
from starlette.types import ASGIApp, Receive, Scope, Send


async def passed(*headers: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """Those of `headers` that an application behind the middlewares is given."""
    seen: list[Scope] = []

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)

    app: ASGIApp = serve
    for middleware in middlewares():
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    await app({"type": "http", "headers": list(headers)}, None, None)  # type: ignore[arg-type]
    return list(seen[0]["headers"])


@pytest.mark.parametrize(
    "name",
    [
        b"x-request-timeout-seconds",
        b"X-Request-Timeout-Seconds",
        b"x-request-disconnect-disabled",
        b"serve_multiplexed_model_id",
        b"serve-multiplexed-model-id",
        b"x-session-id",
    ],
)
async def test_what_serve_would_act_on_is_hidden(name: bytes) -> None:
    kept = (b"authorization", b"Bearer key")
    assert await passed(kept, (name, b"1")) == [kept]


@pytest.mark.parametrize(("value", "passes"), [(b"loaf-1", True), ("ü".encode(), False), (b"a\tb", False)])
async def test_a_request_id_passes_where_it_is_plain_text(value: bytes, passes: bool) -> None:
    assert bool(await passed((b"x-request-id", value))) is passes


@pytest.mark.parametrize("name", [b"traceparent", b"TraceState"])
@pytest.mark.parametrize(("value", "passes"), [(b"nonsense", True), (b"\xff\xfe", False)])
async def test_a_trace_context_passes_where_serve_can_read_it(name: bytes, value: bytes, passes: bool) -> None:
    assert bool(await passed((name, value))) is passes
