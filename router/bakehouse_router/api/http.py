"""The HTTP face as one ASGI application: its routes, and what surrounds them."""

import logging
from collections.abc import Awaitable, Callable
from functools import partial

from bakehouse_replica.core.errors import BakehouseError, Unauthenticated
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from bakehouse_router.api.auth import METRICS_PATH, OPEN_PATHS, REPLICAS_PATH, KeyGuard
from bakehouse_router.api.generating import REPLICA_HEADER, ROUTE_HEADER
from bakehouse_router.api.openapi import openapi_document
from bakehouse_router.api.reading import IGNORED_FIELDS_HEADER
from bakehouse_router.api.recorded import Recorded, note_error
from bakehouse_router.api.routes import Routes
from bakehouse_router.api.surround import REQUEST_ID_HEADER, Surround, error_response, refuse
from bakehouse_router.console.pages import CONSOLE_PATHS, console_handlers
from bakehouse_router.gateway import Gateway
from bakehouse_router.keys import KeyRing
from bakehouse_router.metrics import GatewayMetrics
from bakehouse_router.request_report import Kind
from bakehouse_router.tracing import TRACEPARENT

logger = logging.getLogger(__name__)

_CLIENT_CLOSED_REQUEST = 499  # nginx's; only access logs see it
# What the scripts of a web page may read besides the body.
_TOLD_TO_PAGES = (
    REQUEST_ID_HEADER,
    REPLICA_HEADER,
    ROUTE_HEADER,
    IGNORED_FIELDS_HEADER,
    TRACEPARENT,
    "retry-after",
)
_RECORDED: dict[str, Kind] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/responses": "response",
}

Handler = Callable[[Request], Awaitable[Response]]


async def _tell_error(metrics: GatewayMetrics, request: Request, error: Exception) -> Response:
    note_error(request.scope, error)
    if isinstance(error, BakehouseError) and request.method == "POST":
        metrics.reject(error)
    return error_response(error, request.state.request_id)


async def _refuse(
    metrics: GatewayMetrics, error: Unauthenticated, scope: Scope, receive: Receive, send: Send
) -> None:
    if scope["method"] == "POST":
        metrics.reject(error)
    await refuse(error, scope, receive, send)


async def _nobody_left(request: Request, error: Exception) -> Response:
    logger.info("request %s: the client went before its answer", request.state.request_id)
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


def _routes(routes: Routes) -> list[tuple[str, str, Handler]]:
    """Method, path and handler; a route that takes GET takes HEAD too."""
    return [
        ("POST", "/v1/chat/completions", routes.chat),
        ("POST", "/v1/completions", routes.complete),
        ("POST", "/v1/responses", routes.respond),
        ("POST", "/tokenize", routes.tokenize),
        ("POST", "/v1/tokenize", routes.tokenize),
        ("POST", "/detokenize", routes.detokenize),
        ("POST", "/v1/detokenize", routes.detokenize),
        ("GET", "/v1/usage", routes.usage),
        ("GET", "/v1/models", routes.models),
        ("GET", "/v1/models/{name:path}", routes.model),
        ("GET", REPLICAS_PATH, routes.replicas),
        # `:path`, as an id may hold a slash; what it may not, it never is.
        ("GET", "/v1/requests/{id:path}/explain", routes.explain),
        ("GET", "/health", routes.health),
        ("GET", "/ready", routes.ready),
        ("GET", METRICS_PATH, routes.metrics),
        ("GET", "/tokenizer_info", routes.tokenizer_info),
    ]


def build_api(
    gateway: Gateway,
    *,
    keys: KeyRing | None = None,
    tells_request_id: bool = True,
    gateway_id: str | None = None,
) -> FastAPI:
    """The ASGI application over `gateway`, which the log knows by `gateway_id`.

    `keys` None asks nobody for a key. `tells_request_id`: False behind a server that adds the header itself, as
    Ray Serve does; it would come twice.
    """
    # FastAPI would describe handlers by their signatures; ours parse by hand and are described by hand.
    # Where it traces by itself, its spans begin a second trace beside Serve's, unless the client has begun one.
    app = FastAPI(
        title="bakehouse",
        openapi_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    for method, path, handler in _routes(Routes(gateway, gateway_id)):
        app.add_route(path, handler, methods=[method])
    document = openapi_document((gateway.model_name, gateway.settings.source.model))
    app.add_route("/openapi.json", partial(_describe, document), methods=["GET"])
    for path, serve_file in console_handlers().items():
        app.add_route(path, serve_file, methods=["GET"])
    for kind in (BakehouseError, HTTPException):
        app.add_exception_handler(kind, partial(_tell_error, gateway.metrics))
    app.add_exception_handler(ClientDisconnect, _nobody_left)
    if keys is not None:
        open_paths = OPEN_PATHS | CONSOLE_PATHS
        if gateway.settings.opens_metrics:
            open_paths |= {METRICS_PATH}
        app.add_middleware(KeyGuard, keys=keys, open_paths=open_paths, refuse=partial(_refuse, gateway.metrics))
    app.add_middleware(Recorded, records=gateway.records, kinds=_RECORDED)
    app.add_middleware(Surround, tells_request_id=tells_request_id, on_failure=gateway.metrics.reject)
    if gateway.settings.cors_origins:  # outermost: a page may read errors too, and asks without a key first
        app.add_middleware(
            CORSMiddleware,
            allow_origins=gateway.settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=_TOLD_TO_PAGES,
        )
    return app


async def _describe(document: dict[str, object], request: Request) -> Response:
    return JSONResponse(document)
