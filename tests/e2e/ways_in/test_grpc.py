"""gRPC through Ray Serve's ingress, and what Serve does to HTTP before our application sees it."""

import asyncio
import random
import re
from pathlib import Path

import grpc
import httpx
import proxied_cluster
import psutil
import pytest
from bakehouse_router.proto import inference_pb2 as pb
from bakehouse_router.proto.inference_pb2_grpc import InferenceStub
from collector import attributes
from faces import MODEL, Faces, served
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from servers import STOP_TIMEOUT_S, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

FREE_TIMEOUT_S = 10.0
SPANS_TIMEOUT_S = 60.0  # exporters send every 5 s
LOG_TIMEOUT_S = 30.0
AUTHORITY = ("application", "bakehouse")  # which application is meant, where a proxy serves several


def asked(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(**({"model": MODEL, "text": "tell", **fields}))  # type: ignore[arg-type]


def channel_to(faces: Faces) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(faces.grpc_address)


def check_of(channel: grpc.Channel, service: str) -> HealthCheckResponse:
    method = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=HealthCheckRequest.SerializeToString,
        response_deserializer=HealthCheckResponse.FromString,
    )
    return method(HealthCheckRequest(service=service), timeout=10)


# --- Answers, errors, health ------------------------------------------------------------------------------------


async def test_grpc_and_http_say_the_same(faces: Faces) -> None:
    body = {"model": MODEL, "prompt": "greet", "max_tokens": 2, "logprobs": 1}
    answer = httpx.post(f"{faces.url}/v1/completions", json=body, timeout=60).json()
    async with channel_to(faces) as channel:
        call = InferenceStub(channel).Generate(asked(text="greet", max_tokens=2, logprobs=1))
        replies = [reply async for reply in call]

    (choice,) = answer["choices"]
    assert "".join(reply.text for reply in replies) == choice["text"] == "Hello world"
    assert [reply.finish_reason for reply in replies if reply.finish_reason] == [choice["finish_reason"]]
    told = [row.logprob for reply in replies for row in reply.logprobs]
    assert told == pytest.approx(choice["logprobs"]["token_logprobs"])
    usage = replies[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (answer["usage"]["prompt_tokens"], 2)


async def test_an_error_has_its_status_and_says_which_field_is_wrong(faces: Faces) -> None:
    async with channel_to(faces) as channel:
        stub = InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Generate(asked(max_tokens=-1), metadata=[("x-request-id", "loaf-1")]).read()
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.Tokenize(pb.TokenizeRequest(model="rye", text="x"))
    told = dict(raised.value.trailing_metadata())
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "max_tokens is -1" in (raised.value.details() or "")
    assert (told["bakehouse-error-param"], told["x-request-id"]) == ("max_tokens", "loaf-1")
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    assert dict(unknown.value.trailing_metadata())["bakehouse-error-code"] == "model_not_found"


async def test_a_request_over_the_limit_of_a_body_is_refused(faces: Faces) -> None:
    async with channel_to(faces) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await InferenceStub(channel).Generate(asked(text="x" * 9 * 2**20)).read()
    assert dict(raised.value.trailing_metadata())["bakehouse-error-code"] == "request_too_large"


async def test_texts_are_tokenized_and_back(faces: Faces) -> None:
    async with channel_to(faces) as channel:
        stub = InferenceStub(channel)
        ids = (await stub.Tokenize(pb.TokenizeRequest(text="Hello world"))).token_ids
        text = (await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text
        (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
    assert (list(ids), text) == ([3, 4], "Hello world")
    assert (model.id, model.max_model_len) == (MODEL, 4096)


def test_the_server_describes_itself_and_tells_its_health(faces: Faces) -> None:
    with grpc.insecure_channel(faces.grpc_address) as channel:
        services = set(ProtoReflectionDescriptorDatabase(channel).get_services())
        for service in ("", "bakehouse.v1.Inference"):
            assert check_of(channel, service).status == HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as raised:
            check_of(channel, "rye")
    assert {"bakehouse.v1.Inference", "grpc.health.v1.Health"} <= services
    assert isinstance(raised.value, grpc.Call)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


# --- Deadlines and cancels --------------------------------------------------------------------------------------


async def test_a_deadline_ends_the_call_on_both_sides(faces: Faces) -> None:
    async with channel_to(faces) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in InferenceStub(channel).Generate(asked(), timeout=0.5):
                pass
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: faces.n_held_blocks() == 0, FREE_TIMEOUT_S, "blocks free after the deadline")


async def cancel_many(address: str, n_calls: int, n_at_once: int) -> None:
    """Reads a few messages of each call and cancels it; none has a deadline. When is drawn from a fixed seed."""
    drawn, turns = random.Random(7), asyncio.Semaphore(n_at_once)
    async with grpc.aio.insecure_channel(address) as channel:

        async def call_and_cancel(index: int) -> None:
            async with turns:
                call = InferenceStub(channel).Generate(asked(text=f"tale {index}"), metadata=[AUTHORITY])
                for _ in range(drawn.randint(0, 20)):
                    assert await call.read() is not grpc.aio.EOF
                call.cancel()

        await asyncio.gather(*map(call_and_cancel, range(n_calls)))


async def test_cancelled_streams_without_a_deadline_leave_no_block_held(faces: Faces) -> None:
    await cancel_many(faces.grpc_address, n_calls=60, n_at_once=15)
    wait_until(lambda: faces.n_held_blocks() == 0, FREE_TIMEOUT_S, "blocks free after 60 cancels")


@pytest.mark.slow
async def test_200_cancelled_streams_leave_no_block_held(faces: Faces) -> None:
    await cancel_many(faces.grpc_address, n_calls=200, n_at_once=20)
    wait_until(lambda: faces.n_held_blocks() == 0, FREE_TIMEOUT_S, "blocks free after 200 cancels")


@pytest.mark.slow
async def test_200_cancelled_streams_behind_serves_proxy_leave_no_block_held(model: str) -> None:
    """Serve's Python proxy loses cancels: of these 200 eleven, with the services that protoc generates."""
    with proxied_cluster.running(model, MODEL) as (url, grpc_address):
        await cancel_many(grpc_address, n_calls=200, n_at_once=20)
        faces = Faces(url=url, grpc_address=grpc_address)
        wait_until(lambda: faces.n_held_blocks() == 0, FREE_TIMEOUT_S, "blocks free after 200 cancels")


@pytest.mark.slow
def test_a_watch_of_the_health_does_not_delay_the_end(tmp_path: Path, model: str) -> None:
    with served(tmp_path, model) as faces, grpc.insecure_channel(faces.grpc_address) as channel:
        assert faces.server is not None
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )(HealthCheckRequest())
        assert next(watch).status == HealthCheckResponse.SERVING
        faces.server.process.terminate()
        assert next(watch).status == HealthCheckResponse.NOT_SERVING
        faces.server.process.wait(STOP_TIMEOUT_S)
        lines = faces.server.log.read_text().splitlines()
    (drained,) = [line for line in lines if line.startswith("✓ drained")]
    assert float(drained.rsplit("(", 1)[1].split()[0]) < 10


# --- Around our application -------------------------------------------------------------------------------------


def test_grpc_listens_on_loopback_only(faces: Faces) -> None:
    assert faces.server is not None
    listening = {
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for process in faces.server.tree()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {host for host, _ in listening} == {"127.0.0.1"}
    assert int(faces.grpc_address.rpartition(":")[2]) in {port for _, port in listening}


@pytest.mark.parametrize("header", ["x-request-id", "serve_multiplexed_model_id", "x-session-id", "traceparent"])
def test_a_header_that_is_not_ascii_is_no_error(faces: Faces, header: str) -> None:
    answer = httpx.get(
        f"{faces.url}/v1/models", headers=[(header.encode(), "brötchen".encode("latin-1"))], timeout=60
    )
    assert answer.status_code == 200
    assert answer.headers["x-request-id"].isascii()


def test_serves_own_time_limit_cuts_nothing_off(faces: Faces) -> None:
    body = {"model": MODEL, "prompt": "tell", "max_tokens": 150, "stream": True}
    headers = {"x-request-timeout-seconds": "0.1"}
    answer = httpx.post(f"{faces.url}/v1/completions", json=body, headers=headers, timeout=30)
    assert answer.text.endswith("data: [DONE]\n\n")


# --- Traces and the request log -------------------------------------------------------------------------------

FROM_HTTP, FROM_GRPC, UNSAMPLED = "a" * 32, "b" * 32, "c" * 32
CLIENTS_SPAN = "00f067aa0ba902b7"


def ask_over_http(faces: Faces, traceparent: str) -> str | None:
    body = {"model": MODEL, "prompt": "tell", "max_tokens": 5}
    headers = {"traceparent": traceparent, "x-request-id": f"id-{traceparent[3:9]}"}
    reply = httpx.post(f"{faces.url}/v1/completions", json=body, headers=headers, timeout=30)
    assert reply.status_code == 200
    traced: str | None = reply.headers.get("traceparent")
    return traced


async def ask_over_grpc(faces: Faces, traceparent: str) -> str | None:
    metadata = (("traceparent", traceparent), ("x-request-id", f"id-{traceparent[3:9]}"))
    async with channel_to(faces) as channel:
        call = InferenceStub(channel).Generate(asked(max_tokens=5), metadata=metadata)
        assert [reply async for reply in call]
        told = dict(await call.trailing_metadata())
    traced = told.get("traceparent")
    return None if traced is None else str(traced)


async def test_a_trace_goes_from_the_client_through_gateway_and_replica(faces: Faces) -> None:
    collector = faces.collector
    assert collector is not None
    assert ask_over_http(faces, f"00-{UNSAMPLED}-{CLIENTS_SPAN}-00") is None
    assert await ask_over_grpc(faces, "00-nonsense") is not None, "a trace of its own"
    told = {
        FROM_HTTP: ask_over_http(faces, f"00-{FROM_HTTP}-{CLIENTS_SPAN}-01"),
        FROM_GRPC: await ask_over_grpc(faces, f"00-{FROM_GRPC}-{CLIENTS_SPAN}-01"),
    }
    for trace_id, method in ((FROM_HTTP, "__call__"), (FROM_GRPC, "Generate")):
        first = f"replica_handle_request Gateway {method}"
        names = {first, "gateway", "queue", "prefill", "decode"}
        names |= {"route_to_replica Replica serve", "replica_handle_request Replica serve"}
        wait_until(lambda: collector.trace(trace_id).keys() == names, SPANS_TIMEOUT_S, f"spans {names}")  # noqa: B023
        spans = collector.trace(trace_id)
        assert spans[first].parent_span_id.hex() == CLIENTS_SPAN
        assert spans["gateway"].parent_span_id == spans[first].span_id
        assert told[trace_id] == f"00-{trace_id}-{spans['gateway'].span_id.hex()}-01"
        for name in ("queue", "prefill", "decode", "route_to_replica Replica serve"):
            assert spans[name].parent_span_id == spans["gateway"].span_id, name
        assert (
            spans["replica_handle_request Replica serve"].parent_span_id
            == spans["route_to_replica Replica serve"].span_id
        )
        n_prompt = attributes(spans["gateway"])["gen_ai.usage.input_tokens"]
        assert n_prompt == attributes(spans["prefill"])["gen_ai.usage.input_tokens"] == len("tell")
        assert attributes(spans["decode"])["gen_ai.usage.output_tokens"] == 5
    assert collector.trace(UNSAMPLED) == {}
    strays = [span.name for span in collector.spans if not span.parent_span_id and "Replica" in span.name]
    assert strays == [], "polls and subscriptions belong to no request"


async def test_each_request_leaves_a_line_in_the_log_of_its_gateway(faces: Faces) -> None:
    assert faces.server is not None
    ask_over_http(faces, f"00-{'d' * 32}-{CLIENTS_SPAN}-00")
    await ask_over_grpc(faces, f"00-{'e' * 32}-{CLIENTS_SPAN}-00")
    (folder,) = re.findall(r"^  logs +(.+)$", faces.server.log.read_text(), re.MULTILINE)

    def lines_of(request_id: str) -> list[str]:
        return [
            line
            for log in Path(folder).glob("serve/replica_bakehouse_Gateway_*.log")
            for line in log.read_text().splitlines()
            if f"request id={request_id} " in line
        ]

    for request_id, face in (("id-dddddd", "http"), ("id-eeeeee", "grpc")):
        # It is written after the last byte of the answer.
        wait_until(lambda: len(lines_of(request_id)) > 0, LOG_TIMEOUT_S, f"the line of {request_id}")  # noqa: B023
        (line,) = lines_of(request_id)
        assert re.search(
            rf"face={face} kind=completion model={MODEL} outcome=complete finish=length prompt_tokens=4 "
            r"cached_tokens=0 generated_tokens=5 block_s=[0-9.e-]+ queue_s=[0-9.e-]+ (waited=\S+ )?"
            r"first_token_s=[0-9.]+ total_s=[0-9.]+ replicas=\w+$",
            line,
        )
