"""What `grpc_ingress` puts around the handlers of a server of Ray Serve: a real one, with handlers made here."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import pytest
from bakehouse_router.grpc_ingress import HEALTH, SERVES_OWN_CHECK, add_services
from bakehouse_router.proto import inference_pb2 as pb
from bakehouse_router.proto.inference_pb2_grpc import InferenceServicer, InferenceStub
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from ray.serve._private.grpc_util import gRPCGenericServer

TICK_S = 0.01
LARGE = pb.GenerateReply(text="x" * 2**20).SerializeToString()  # fills the window that a client has opened


class Context(Protocol):
    """What the handlers here use of the server's context."""

    def set_code(self, code: grpc.StatusCode) -> None: ...
    def set_details(self, details: str) -> None: ...
    def set_trailing_metadata(self, metadata: list[tuple[str, str]]) -> None: ...


@dataclass
class Gateway:
    """Makes handlers as Serve does, that play `messages` and write down what they see; drains after `healths`."""

    messages: list[bytes] = field(default_factory=list)
    repeats: bool = False
    code: grpc.StatusCode | None = None
    healths: list[HealthCheckResponse.ServingStatus | grpc.StatusCode] = field(default_factory=list)
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    n_open: int = 0
    is_cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    def handler(self, service_method: str, streaming_type: object) -> Callable[..., object]:
        if service_method == SERVES_OWN_CHECK:
            return self.tell_drain
        return self.check if service_method == f"/{HEALTH}/Check" else self.stream

    async def stream(self, request: pb.GenerateRequest, context: Context) -> AsyncGenerator[bytes, None]:
        self.requests.append(request)
        try:
            while True:
                for message in self.messages:
                    yield message
                    await asyncio.sleep(0)  # Serve waits here for the gateway
                if not self.repeats:
                    break
        except asyncio.CancelledError:
            self.is_cancelled.set()
            raise
        if self.code is not None:
            context.set_code(self.code)
            context.set_details("why")
            context.set_trailing_metadata([("bakehouse-error-param", "n")])

    async def tell_drain(self, request: object, context: Context) -> bytes:
        if not self.healths:
            context.set_code(grpc.StatusCode.UNAVAILABLE)
        return b""

    async def check(self, request: HealthCheckRequest, context: Context) -> bytes:
        health = self.healths.pop(0)
        if isinstance(health, grpc.StatusCode):
            context.set_code(health)
            return b""
        return HealthCheckResponse(status=health).SerializeToString()


@asynccontextmanager
async def behind_serve(gateway: Gateway) -> AsyncGenerator[grpc.aio.Channel, None]:
    server = gRPCGenericServer(gateway.handler)
    add_services(InferenceServicer(), server, watch_period_s=TICK_S)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def replies(channel: grpc.aio.Channel, request: pb.GenerateRequest, timeout_s: float | None) -> int:
    return len([reply async for reply in InferenceStub(channel).Generate(request, timeout=timeout_s)])


@pytest.mark.parametrize(
    ("given_s", "deadline_s", "least_s", "most_s"),
    [(None, 50, 45, 55), (100, 50, 45, 55), (10, 50, 10, 10), (10, None, 10, 10), (10, 10**6, 10, 10)],
)
async def test_a_deadline_becomes_the_time_limit_of_the_call(
    given_s: float | None, deadline_s: float | None, least_s: float, most_s: float
) -> None:
    gateway = Gateway([LARGE])
    async with behind_serve(gateway) as channel:
        await replies(channel, pb.GenerateRequest(timeout_s=given_s), deadline_s)
    assert least_s <= gateway.requests[0].timeout_s <= most_s


@pytest.mark.parametrize("deadline_s", [None, 10**6])
async def test_without_a_deadline_or_with_one_beyond_all_limits_there_is_no_time_limit(
    deadline_s: float | None,
) -> None:
    gateway = Gateway([LARGE])
    async with behind_serve(gateway) as channel:
        await replies(channel, pb.GenerateRequest(), deadline_s)
    assert not gateway.requests[0].HasField("timeout_s")


@pytest.mark.parametrize("n_read", [0, 1, 3])
async def test_a_cancel_while_a_message_is_being_sent_cancels_the_call(n_read: int) -> None:
    gateway = Gateway([LARGE], repeats=True)
    async with behind_serve(gateway) as channel:
        call = InferenceStub(channel).Generate(pb.GenerateRequest())
        for _ in range(n_read):
            await call.read()
        async with asyncio.timeout(60):
            while not gateway.requests:
                await asyncio.sleep(TICK_S)
            await asyncio.sleep(10 * TICK_S)  # the client reads no more, so the server is stuck in sending
            call.cancel()
            await gateway.is_cancelled.wait()


async def test_a_client_that_disappears_cancels_the_call() -> None:
    gateway = Gateway([LARGE], repeats=True)
    async with behind_serve(gateway) as channel:
        await InferenceStub(channel).Generate(pb.GenerateRequest()).read()
        await channel.close()
        async with asyncio.timeout(60):
            await gateway.is_cancelled.wait()


async def test_an_error_is_told_with_its_metadata_and_without_an_empty_message() -> None:
    gateway = Gateway([LARGE, b""], code=grpc.StatusCode.INVALID_ARGUMENT)
    async with behind_serve(gateway) as channel:
        call = InferenceStub(channel).Generate(pb.GenerateRequest())
        await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
    assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "why")
    assert dict(raised.value.trailing_metadata()) == {"bakehouse-error-param": "n"}


async def watch(channel: grpc.aio.Channel) -> AsyncGenerator[HealthCheckResponse.ServingStatus, None]:
    method = channel.unary_stream(
        f"/{HEALTH}/Watch",
        request_serializer=HealthCheckRequest.SerializeToString,
        response_deserializer=HealthCheckResponse.FromString,
    )
    async for answer in method(HealthCheckRequest()):
        yield answer.status


async def test_a_watch_tells_every_change_and_ends_when_the_gateway_drains() -> None:
    serving, not_serving = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
    gateway = Gateway(healths=[serving, serving, not_serving, not_serving, serving])
    async with behind_serve(gateway) as channel, asyncio.timeout(60):
        told = [status async for status in watch(channel)]
    assert told == [serving, not_serving, serving, not_serving]


async def test_a_watch_of_an_unknown_service_says_so_and_goes_on() -> None:
    gateway = Gateway(healths=[grpc.StatusCode.NOT_FOUND, HealthCheckResponse.SERVING])
    async with behind_serve(gateway) as channel, asyncio.timeout(60), aclosing(watch(channel)) as statuses:
        told = [await anext(statuses) for _ in range(2)]
    assert told == [HealthCheckResponse.SERVICE_UNKNOWN, HealthCheckResponse.SERVING]
