"""The spans of requests: whose trace they belong to, what they measure, and that none is in a request's way."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import httpx
import pytest
from bakehouse_replica.core.errors import EngineDead, Unavailable, UnknownModel
from bakehouse_replica.core.story import ToldStory
from bakehouse_replica.core.types import Delivery, FinishReason, Request, TokenDelta, Usage
from bakehouse_router.api.grpc import InferenceService
from bakehouse_router.api.http import build_api
from bakehouse_router.attempts import Attempts
from bakehouse_router.dispatch import Dispatcher
from bakehouse_router.gateway import Gateway
from bakehouse_router.generation import RequestDispatcher
from bakehouse_router.proto import inference_pb2 as pb
from bakehouse_router.request_log import RequestLog
from bakehouse_router.request_record import Records
from bakehouse_router.text.model_text import ModelText
from bakehouse_router.tracing import Tracing
from gateways import MODEL, ScriptedDispatcher, completion, fake_engine, settings, status, tiny_card
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from recording import GrpcCall

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01"
UNSAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-00"
COMPLETIONS = "/v1/completions"
BODY: dict[str, object] = {"model": MODEL, "prompt": "secret", "max_tokens": 4}


class Traced:
    """Gateways that trace into memory."""

    def __init__(self, text: ModelText) -> None:
        self._text = text
        self._kept = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._kept))

    def gateway(self, dispatcher: RequestDispatcher) -> Gateway:
        return Gateway(settings(), dispatcher, self._text, tracing=Tracing(self.provider.get_tracer("test")))

    async def post(
        self, dispatcher: RequestDispatcher, traceparent: str | None = None, **fields: object
    ) -> httpx.Response:
        transport = httpx.ASGITransport(app=build_api(self.gateway(dispatcher)))
        headers = {} if traceparent is None else {"traceparent": traceparent}
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            return await http.post(COMPLETIONS, json={**BODY, **fields}, headers=headers)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._kept.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_time or 0)

    def only(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


@pytest.fixture
def traced(text: ModelText) -> Traced:
    return Traced(text)


def value(span: ReadableSpan, name: str) -> object:
    assert span.attributes is not None
    return span.attributes[name]


def duration_s(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


async def test_a_request_has_four_spans_in_the_trace_of_its_client(traced: Traced) -> None:
    async with fake_engine() as engine:
        reply = await traced.post(Dispatcher(engine), SAMPLED)
    assert reply.status_code == 200
    assert sorted(span.name for span in traced.spans) == ["decode", "gateway", "prefill", "queue"]
    gateway = traced.only("gateway")
    assert {f"{span.context.trace_id:032x}" for span in traced.spans if span.context} == {TRACE_ID}
    assert gateway.parent is not None
    assert f"{gateway.parent.span_id:016x}" == SPAN_ID
    for name in ("queue", "prefill", "decode"):
        assert traced.only(name).parent == gateway.context
    usage = reply.json()["usage"]
    assert value(gateway, "gen_ai.usage.input_tokens") == usage["prompt_tokens"]
    assert value(gateway, "gen_ai.usage.output_tokens") == usage["completion_tokens"] == 4
    assert value(traced.only("prefill"), "gen_ai.usage.input_tokens") == usage["prompt_tokens"]
    assert value(traced.only("decode"), "gen_ai.usage.output_tokens") == 4
    assert value(gateway, "bakehouse.computed_tokens") == usage["prompt_tokens"]
    assert value(gateway, "bakehouse.recomputed_tokens") == 0
    block_s = value(gateway, "bakehouse.block_seconds")
    assert isinstance(block_s, float)
    assert block_s > 0
    assert value(gateway, "bakehouse.replicas") == value_list(traced.only("queue"), "bakehouse.replica")
    assert "secret" not in "".join(span.to_json() for span in traced.spans)


def value_list(span: ReadableSpan, name: str) -> tuple[object, ...]:
    return (value(span, name),)


async def test_the_parts_follow_each_other_without_gaps_inside_the_whole(traced: Traced) -> None:
    async with fake_engine() as engine:
        await traced.post(Dispatcher(engine), SAMPLED)
    gateway, queue, prefill, decode = map(traced.only, ("gateway", "queue", "prefill", "decode"))
    assert queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time
    moments = (gateway.start_time, queue.start_time, decode.end_time, gateway.end_time)
    assert list(moments) == sorted(moments, key=lambda moment: moment or 0)


async def test_the_response_names_the_span_over_http_and_grpc(traced: Traced) -> None:
    reply = await traced.post(ScriptedDispatcher(["ab"]), SAMPLED)
    assert reply.headers["traceparent"] == traceparent_of(traced.only("gateway"))

    call = GrpcCall({"traceparent": SAMPLED})
    service = InferenceService(traced.gateway(ScriptedDispatcher(["ab"])))
    assert [one async for one in service.Generate(pb.GenerateRequest(text="x"), call)]
    assert call.told["traceparent"] == traceparent_of(traced.named("gateway")[1])


def traceparent_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"


async def test_an_error_keeps_the_trace_in_grpc_metadata(traced: Traced) -> None:
    call = GrpcCall({"traceparent": SAMPLED})
    service = InferenceService(traced.gateway(ScriptedDispatcher([EngineDead("lost")])))
    assert not [one async for one in service.Generate(pb.GenerateRequest(text="x"), call)]
    assert call.told["traceparent"].startswith(f"00-{TRACE_ID}-")
    assert (traced.only("gateway").status.status_code, value(traced.only("gateway"), "bakehouse.outcome")) == (
        StatusCode.ERROR,
        "engine_dead",
    )


@pytest.mark.parametrize(
    "given",
    [
        None,
        UNSAMPLED,
        "",
        "nonsense",
        f"00-{TRACE_ID}-{SPAN_ID}",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
        "00-" + "z" * 32 + f"-{SPAN_ID}-01",
        "é" * 20,
        "x" * 8000,
    ],
)
async def test_what_nobody_has_decided_to_trace_is_answered_without_spans(
    traced: Traced, given: str | None
) -> None:
    transport = httpx.ASGITransport(app=build_api(traced.gateway(ScriptedDispatcher(["ab"]))))
    headers = [] if given is None else [(b"traceparent", given.encode("latin-1"))]
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        reply = await http.post(COMPLETIONS, json=BODY, headers=headers)
    assert (reply.status_code, "traceparent" in reply.headers) == (200, False)
    assert traced.spans == ()


async def test_the_current_span_is_the_parent_whatever_the_client_says(traced: Traced) -> None:
    """Ray Serve has read the header before, and made a span of its own."""
    with traced.provider.get_tracer("serve").start_as_current_span("serve") as serve_span:
        await traced.post(ScriptedDispatcher(["ab"]), SAMPLED)
    assert traced.only("gateway").parent == serve_span.get_span_context()


@pytest.mark.parametrize(
    ("changes", "script", "outcome", "code"),
    [
        ({"max_tokens": -1}, ["ab"], "invalid_request", StatusCode.UNSET),
        ({"model": "other"}, ["ab"], "model_not_found", StatusCode.UNSET),
        ({}, [Unavailable("nobody serves")], "unavailable", StatusCode.ERROR),
    ],
)
async def test_only_failures_of_ours_are_errors_of_a_span(
    traced: Traced, changes: dict[str, object], script: list[str], outcome: str, code: StatusCode
) -> None:
    await traced.post(ScriptedDispatcher(script), SAMPLED, **changes)
    gateway = traced.only("gateway")
    assert (value(gateway, "error.type"), gateway.status.status_code) == (outcome, code)


async def test_a_name_that_is_no_text_costs_no_other_span(traced: Traced) -> None:
    """Of a batch that cannot be encoded, a collector gets nothing."""
    name = "\ud800" + "x" * 5000  # as a handle call may bring it
    gateway = traced.gateway(ScriptedDispatcher(["ab"]))
    with gateway.records.open("handle", "completion", "r", {"traceparent": SAMPLED}) as record:
        with pytest.raises(UnknownModel):
            await gateway.start(replace(completion(), model=name), "call", record=record)
        record.tenant = name
    encode_spans(traced.spans).SerializeToString()
    assert len(str(value(traced.only("gateway"), "gen_ai.request.model"))) <= 200


async def test_each_prompt_has_its_own_parts(traced: Traced) -> None:
    async with fake_engine() as engine:
        await traced.post(Dispatcher(engine), SAMPLED, prompt=["one", "three"])
    counts = sorted(str(value(span, "gen_ai.usage.input_tokens")) for span in traced.named("prefill"))
    assert (len(traced.named("queue")), len(traced.named("decode"))) == (2, 2)
    assert counts == ["4", "6"], "their letters and the token before each text"


class TwoAttempts:
    """The first replica is lost after two tokens, of which it says that they were queued; the second goes on."""

    def __init__(self) -> None:
        self.n_calls = 0

    async def statuses(self) -> tuple[object, ...]:
        return (status(tiny_card("first")), status(tiny_card("second")))

    async def explain(self, request_ids: Sequence[str]) -> tuple[ToldStory, ...]:
        return ()

    async def close(self) -> None: ...

    async def generate(self, request: Request) -> AsyncGenerator[Delivery, None]:
        self.n_calls += 1
        start = len(request.prior_output)
        if self.n_calls == 1:
            yield Delivery(replica_id="first", deltas=(told(request, start, (70, 71), queue_s=0.0),))
            raise EngineDead("the engine of this replica has failed")
        yield Delivery(replica_id="second", deltas=(told(request, start, (72,), queue_s=0.01),))
        yield Delivery(
            replica_id="second",
            deltas=(told(request, start + 1, (73,), queue_s=0.01, finish=FinishReason.LENGTH),),
        )


def told(
    request: Request, start: int, token_ids: tuple[int, ...], *, queue_s: float, finish: FinishReason | None = None
) -> TokenDelta:
    usage = Usage(prompt_tokens=len(request.prompt_ids), cached_tokens=0, completion_tokens=start, queue_s=queue_s)
    return TokenDelta(
        request_id=request.request_id, choice=0, start=start, token_ids=token_ids, usage=usage, finish=finish
    )


async def test_a_resumed_stream_has_the_parts_of_both_replicas(traced: Traced) -> None:
    reply = await traced.post(Dispatcher(TwoAttempts()), SAMPLED)  # type: ignore[arg-type]
    assert reply.json()["usage"]["completion_tokens"] == 4
    lost, last = traced.named("decode")
    assert (value(lost, "bakehouse.replica"), value(lost, "gen_ai.usage.output_tokens")) == ("first", 2)
    assert (value(last, "bakehouse.replica"), value(last, "gen_ai.usage.output_tokens")) == ("second", 2)
    assert (lost.status.status_code, last.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
    assert value(last, "bakehouse.resumed_after_tokens") == 2
    assert value(traced.only("gateway"), "bakehouse.resumed") == 1
    assert value(traced.only("gateway"), "bakehouse.replicas") == ("first", "second")
    assert [duration_s(span) <= 0.011 for span in traced.named("queue")] == [True, True]
    assert (lost.end_time or 0) <= (traced.named("queue")[1].start_time or 0)


async def test_what_a_request_sends_to_its_replica_belongs_to_its_span(traced: Traced) -> None:
    seen: list[int] = []

    class Noting(ScriptedDispatcher):
        async def stream(
            self, request: Request, attempts: Attempts | None = None
        ) -> AsyncGenerator[Delivery, None]:
            async for delivery in super().stream(request, attempts):
                seen.append(trace.get_current_span().get_span_context().span_id)
                yield delivery

    await traced.post(Noting(["a", "b"]), SAMPLED)
    context = traced.only("gateway").context
    assert context is not None
    assert set(seen) == {context.span_id}
    assert not trace.get_current_span().get_span_context().is_valid, "and nothing else does"


async def test_a_gateway_that_does_not_trace_ignores_the_header(text: ModelText) -> None:
    records = Records(RequestLog("off"))
    assert records.open("http", "chat", "r", {"traceparent": SAMPLED}).span is None
