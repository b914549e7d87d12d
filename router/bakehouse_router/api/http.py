"""The HTTP face: routes, and what surrounds them (request ids, error envelopes, clients that go away)."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable
from typing import TypeVar

from bakehouse_replica.core.errors import BakehouseError
from bakehouse_replica.core.types import ReplicaStatus
from fastapi import FastAPI, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bakehouse_router.api.answers import EventWriter, whole_reply
from bakehouse_router.api.bodies import chat_call, completion_call
from bakehouse_router.api.errors import Problem, problem_of
from bakehouse_router.api.json_body import parse_object, read_body
from bakehouse_router.api.replies import ChatShape, CompletionShape, Json, ReplyHead, ReplyShape
from bakehouse_router.api.schema import ChatBody, CompletionBody, GenerationBody, parse_body
from bakehouse_router.api.sse import EventStream, wait_for_disconnect
from bakehouse_router.calls import Call
from bakehouse_router.gateway import Gateway
from bakehouse_router.generation import Generation

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
REPLICA_HEADER = "x-bakehouse-replica"
_MAX_REQUEST_ID_CHARS = 128
_CLIENT_CLOSED_REQUEST = 499  # nginx's; only access logs see it

Result = TypeVar("Result")


def _request_id(headers: Headers) -> str:
    """The client's own id where it is one that may stand in a log line; otherwise a new one."""
    given = headers.get(REQUEST_ID_HEADER, "")
    if 0 < len(given) <= _MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return f"req-{secrets.token_hex(16)}"


class Surround:
    """What holds for every request: an id, in `request.state.request_id` and (where it `tells_request_id`) in a
    header of the response, and an envelope around what nobody else has caught.
    """

    def __init__(self, app: ASGIApp, *, tells_request_id: bool) -> None:
        self._app = app
        self._tells_request_id = tells_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope))
        scope.setdefault("state", {})["request_id"] = request_id
        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                if self._tells_request_id:
                    MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if has_begun:
                raise
            logger.exception("request %s failed", request_id)
            await _error_response(problem_of(error, request_id))(scope, receive, send_with_id)


def _error_response(problem: Problem) -> Response:
    return JSONResponse(problem.envelope(), problem.status, headers=problem.headers())


async def _tell_error(request: Request, error: Exception) -> Response:
    return _error_response(problem_of(error, request.state.request_id))


async def _nobody_left(request: Request, error: Exception) -> Response:
    logger.info("request %s: the client went before its answer", request.state.request_id)
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client goes; raises `ClientDisconnect` then."""
    working = asyncio.ensure_future(work)
    listening = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        listening.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)


async def _streamed(request: Request, generation: Generation, shape: ReplyShape, head: ReplyHead) -> Response:
    """A stream whose status is decided by its first delivery, unless that takes longer than a keep-alive pause."""
    pieces = generation.pieces()
    try:
        first = await _unless_gone(request, anext(pieces))
    except BaseException:
        await pieces.aclose()
        raise
    writer = EventWriter(generation, shape, head, request.state.request_id)
    return EventStream(writer.frames(first, pieces), pieces, _replica_headers(generation))


def _replica_headers(generation: Generation) -> dict[str, str]:
    return {} if generation.replica_id is None else {REPLICA_HEADER: generation.replica_id}


def _replica_json(status: ReplicaStatus) -> Json:
    """One replica of the health body; its load is a snapshot, at most a status period old."""
    card, load = status.card, status.load
    return {
        "id": card.replica_id,
        "serves": status.problem is None,
        "problem": status.problem,
        "block_size": card.block_size,
        "n_blocks": card.n_blocks,
        "kv_bytes": card.kv_bytes,
        "max_model_len": card.max_model_len,
        "load": {
            "n_running": load.n_running,
            "n_waiting": load.n_waiting,
            "waiting_tokens": load.waiting_tokens,
            "n_free_blocks": load.n_free_blocks,
            "n_cached_blocks": load.n_cached_blocks,
            "n_held_blocks": load.n_held_blocks,
        },
    }


class Routes:
    """The handlers, over one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._started_at = int(time.time())

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        body = parse_body(ChatBody, await self._fields(request))
        return await self._answer(request, body, chat_call(body), ChatShape(), "chatcmpl")

    async def complete(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        body = parse_body(CompletionBody, await self._fields(request))
        return await self._answer(request, body, completion_call(body), CompletionShape(), "cmpl")

    async def models(self) -> Json:
        """`GET /v1/models`."""
        return {"object": "list", "data": [await self._model_json()]}

    async def model(self, name: str) -> Json:
        """`GET /v1/models/{name}`."""
        self._gateway.check_model(name)
        return await self._model_json()

    async def health(self) -> Response:
        """`GET /health`: 200 while at least one replica serves; the body says which do not, and why."""
        statuses = await self._gateway.statuses()
        replicas = [_replica_json(status) for status in statuses]
        serves = any(status.problem is None for status in statuses)
        return JSONResponse(
            {"status": "ok" if serves else "unavailable", "replicas": replicas}, 200 if serves else 503
        )

    async def ready(self) -> Json:
        """`GET /ready`: 200 once the model has answered and as long as a replica serves."""
        await self._gateway.check_ready()
        return {"status": "ready", "model": self._gateway.model_name}

    async def _fields(self, request: Request) -> dict[str, object]:
        limit = self._gateway.settings.max_body_bytes
        return parse_object(await read_body(request.stream(), request.headers, limit))

    async def _answer(
        self, request: Request, body: GenerationBody, call: Call, shape: ReplyShape, id_prefix: str
    ) -> Response:
        call_id = f"{id_prefix}-{secrets.token_hex(16)}"
        logger.info("request %s is call %s", request.state.request_id, call_id)
        generation = await self._gateway.start(call, call_id)
        head = ReplyHead(
            reply_id=call_id,
            created=int(time.time()),
            model=self._gateway.model_name,
            shows_usage=bool(body.stream_options and body.stream_options.include_usage),
        )
        if body.stream:
            return await _streamed(request, generation, shape, head)
        reply = await _unless_gone(request, whole_reply(generation, shape, head))
        return JSONResponse(reply, headers=_replica_headers(generation))

    async def _model_json(self) -> Json:
        try:
            max_model_len = (await self._gateway.serving_card()).max_model_len
        except BakehouseError:
            max_model_len = None
        return {
            "id": self._gateway.model_name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "bakehouse",
            "max_model_len": max_model_len,
        }


def build_api(gateway: Gateway, *, tells_request_id: bool = True) -> FastAPI:
    """The ASGI application over `gateway`.

    `tells_request_id`: False behind a server that adds the header itself, as Ray Serve does; it would come twice.
    """
    # Bodies are parsed by hand, so generated API docs would be empty: there are none.
    app = FastAPI(title="bakehouse", openapi_url=None, redirect_slashes=False)
    routes = Routes(gateway)
    app.add_api_route("/v1/chat/completions", routes.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/completions", routes.complete, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", routes.models, methods=["GET"], response_model=None)
    app.add_api_route("/v1/models/{name:path}", routes.model, methods=["GET"], response_model=None)
    app.add_api_route("/health", routes.health, methods=["GET"], response_model=None)
    app.add_api_route("/ready", routes.ready, methods=["GET"], response_model=None)
    for kind in (BakehouseError, HTTPException):
        app.add_exception_handler(kind, _tell_error)
    app.add_exception_handler(ClientDisconnect, _nobody_left)
    app.add_middleware(Surround, tells_request_id=tells_request_id)
    return app
