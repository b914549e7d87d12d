"""What the gRPC servers of Ray Serve, its proxies' and a gateway's own, offer for us, and mends how they do it.

Named in Serve's `grpc_servicer_functions`. A server of Serve replaces each handler by one that sends the call to a
gateway; around these this puts what Serve leaves out:

* A deadline reaches the gateway, as `timeout_s` of the call.
* A cancel reaches it, always. Serve's handler hears one only while it waits for the gateway; one that came while a
  message was being sent was lost, and its generation ran on to its end (11 of 200 cancels, measured on Ray 2.60).
* An error has trailing metadata: it travels on an empty message, which is dropped here (Serve carries the metadata
  of messages, but not that of exceptions).
* A watch of the health asks the gateway every second; as a call of its own it would last for hours, and a drain
  would wait for it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from enum import Enum
from typing import NoReturn, Protocol, cast

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from bakehouse_router.calls import MAX_TIMEOUT_S
from bakehouse_router.proto.inference_pb2 import GenerateRequest
from bakehouse_router.proto.inference_pb2_grpc import add_InferenceServicer_to_server

HEALTH = "grpc.health.v1.Health"
CHECK, WATCH = f"/{HEALTH}/Check", f"/{HEALTH}/Watch"
# Fails from the beginning of a drain on; calls of ours are served until its end.
SERVES_OWN_CHECK = "/ray.serve.RayServeAPIService/Healthz"
WATCH_PERIOD_S = 1.0
# A deadline that has passed while the call was on its way still is one: `timeout_s` must be above 0.
MIN_TIMEOUT_S = 0.001


class CallContext(Protocol):
    """What is used of `grpc.aio.ServicerContext`, and of what Serve passes to a gateway in its place."""

    def invocation_metadata(self) -> Sequence[tuple[str, str]]: ...
    def set_code(self, code: grpc.StatusCode, /) -> None: ...
    def set_details(self, details: str, /) -> None: ...
    def set_trailing_metadata(self, metadata: list[tuple[str, str]], /) -> None: ...


class ServerContext(CallContext, Protocol):
    """What is used besides by those who have the connection."""

    def time_remaining(self) -> float | None: ...
    def write(self, message: bytes) -> Awaitable[None]: ...


Unary = Callable[[object, object], Awaitable[bytes]]
Stream = Callable[[object, object], AsyncIterator[bytes]]


class ServeServer(Protocol):
    """What is used of Serve's `gRPCGenericServer`: it asks this factory for each method's handler."""

    service_handler_factory: Callable[..., object]


def add_services(servicer: object, server: object, *, watch_period_s: float = WATCH_PERIOD_S) -> None:
    """Register our services and gRPC's health service at a server of Serve, which makes the handlers itself."""
    serve_server = cast(ServeServer, server)
    make_handler = serve_server.service_handler_factory

    def handler(*, service_method: str, streaming_type: Enum) -> object:
        """Serve asks for handlers of all four kinds for each method; those that do not apply are never called."""
        made = make_handler(service_method=service_method, streaming_type=streaming_type)
        if streaming_type.name != "UNARY_STREAM":
            return made
        if service_method == WATCH:
            unary = type(streaming_type)["UNARY_UNARY"]
            lives = cast(Unary, make_handler(service_method=SERVES_OWN_CHECK, streaming_type=unary))
            check = cast(Unary, make_handler(service_method=CHECK, streaming_type=unary))
            return _watching(lives, check, watch_period_s)
        return _streaming(cast(Stream, made))

    serve_server.service_handler_factory = handler
    add_InferenceServicer_to_server(servicer, cast(grpc.aio.Server, server))
    cast(grpc.aio.Server, server).add_generic_rpc_handlers((_health_handlers(),))


def _health_handlers() -> grpc.GenericRpcHandler:
    """The health service without its newer method `List`; Serve replaces what the handlers do."""
    request, response = HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
    return grpc.method_handlers_generic_handler(
        HEALTH,
        {
            "Check": grpc.unary_unary_rpc_method_handler(_replaced, request, response),
            "Watch": grpc.unary_stream_rpc_method_handler(_replaced, request, response),
        },
    )


def _replaced(request: object, context: object) -> NoReturn:
    raise AssertionError("Serve makes the handlers")


def _streaming(serve: Stream) -> Callable[[object, ServerContext], Awaitable[None]]:
    async def stream(request: object, context: ServerContext) -> None:
        if isinstance(request, GenerateRequest):
            _shorten(request, context.time_remaining())
        messages = serve(request, context)
        try:
            async for message in messages:
                if message:
                    await context.write(message)
        except BaseException:
            await _unbroken(_cancel(messages))
            raise

    return stream


def _shorten(request: GenerateRequest, remaining_s: float | None) -> None:
    """The time left becomes the request's own limit, unless that is shorter or no limit could be so long."""
    if remaining_s is None or remaining_s > MAX_TIMEOUT_S:
        return
    if not request.HasField("timeout_s") or request.timeout_s > remaining_s:
        request.timeout_s = max(remaining_s, MIN_TIMEOUT_S)


async def _unbroken(work: Coroutine[object, object, None]) -> None:
    """Does `work` to its end, although grpc may cancel this task again meanwhile.

    A handler that returned before would take the connection's data with it, which Serve's handler still reads: the
    proxy died of a segmentation fault then.
    """
    working = asyncio.ensure_future(work)
    while not working.done():
        with suppress(asyncio.CancelledError):
            await asyncio.shield(working)


async def _cancel(messages: AsyncIterator[bytes]) -> None:
    """Cancel Serve's handler while it waits for a message, where it hears it; it may have one ready first."""
    while True:
        waiting = asyncio.ensure_future(_next(messages))
        await asyncio.sleep(0)  # it now waits, unless a message was there
        waiting.cancel()
        try:
            await waiting
        except BaseException:  # cancelled, or ended: whatever it says, nobody is left to be told
            return


async def _next(messages: AsyncIterator[bytes]) -> bytes:
    return await anext(messages)


class _CheckContext:
    """Stands in for the context of a `Check` that a watch makes; what Serve writes on it stays here."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._code: grpc.StatusCode | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._context, name)

    def code(self) -> grpc.StatusCode | None:
        return self._code

    def details(self) -> str:
        return ""

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, metadata: list[tuple[str, str]]) -> None: ...


def _watching(lives: Unary, check: Unary, period_s: float) -> Callable[[object, ServerContext], Awaitable[None]]:
    async def watch(request: object, context: ServerContext) -> None:
        """The health, whenever it is another than before. Ends where this server drains."""
        told: int | None = None
        drains = False
        while not drains:
            answered = _CheckContext(context)
            await lives(request, answered)
            drains = answered.code() not in (None, grpc.StatusCode.OK)
            status = HealthCheckResponse.NOT_SERVING if drains else await _status(check, request, context)
            if status != told:
                await context.write(HealthCheckResponse(status=status).SerializeToString())
                told = status
            if not drains:
                await asyncio.sleep(period_s)

    return watch


async def _status(check: Unary, request: object, context: ServerContext) -> HealthCheckResponse.ServingStatus:
    answered = _CheckContext(context)
    answer = HealthCheckResponse.FromString(await check(request, answered))
    match answered.code():
        case None | grpc.StatusCode.OK:
            return answer.status
        case grpc.StatusCode.NOT_FOUND:
            return HealthCheckResponse.SERVICE_UNKNOWN
    return HealthCheckResponse.NOT_SERVING
