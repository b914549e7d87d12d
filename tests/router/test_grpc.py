"""The gRPC face on a plain `grpc.aio` server, without Ray, over scripted dispatchers and a real engine."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import httpx
import pytest
from bakehouse_replica.core.metric_table import REJECTIONS
from bakehouse_replica.core.types import Failure, FailureKind, FinishReason
from bakehouse_replica.engine import Engine
from bakehouse_router.api.grpc import InferenceService
from bakehouse_router.api.grpc_fields import generate_fields
from bakehouse_router.api.schema import ChatBody, CompletionBody
from bakehouse_router.dispatch import Dispatcher
from bakehouse_router.gateway import Gateway
from bakehouse_router.generation import RequestDispatcher
from bakehouse_router.keys import KeyRing
from bakehouse_router.proto import inference_pb2 as pb
from bakehouse_router.proto.inference_pb2_grpc import InferenceStub, add_InferenceServicer_to_server
from bakehouse_router.settings import GatewaySettings
from bakehouse_router.text.model_text import ModelText
from gateways import (
    MODEL,
    TEMPLATE,
    ScriptedDispatcher,
    delta,
    fake_engine,
    ids_of,
    served,
    settings,
    status,
    text_in,
    tiny_card,
    write_tiny_tokenizer,
)
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

ROOT = Path(__file__).parents[2]
Context = grpc.aio.ServicerContext[object, object]


@asynccontextmanager
async def grpc_served(
    text: ModelText,
    dispatcher: RequestDispatcher | Engine,
    gateway_settings: GatewaySettings | None = None,
    keys: KeyRing | None = None,
) -> AsyncGenerator[InferenceStub, None]:
    """A client of a real server over `dispatcher`, or over an engine by the real dispatcher."""
    if isinstance(dispatcher, Engine):
        dispatcher = Dispatcher(dispatcher, resume_wait_s=0.0)
    gateway = Gateway(gateway_settings or settings(), dispatcher, text)
    async with grpc_served_by(gateway, keys) as stub:
        yield stub


@asynccontextmanager
async def grpc_served_by(gateway: Gateway, keys: KeyRing | None = None) -> AsyncGenerator[InferenceStub, None]:
    """A client of a real server over `gateway`."""
    server = grpc.aio.server()
    add_InferenceServicer_to_server(InferenceService(gateway, keys), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield InferenceStub(channel)
    finally:
        await server.stop(None)


def asked(**fields: object) -> pb.GenerateRequest:
    """A request for the text `x`, unless told otherwise."""
    inputs = {"text", "token_ids", "prompts", "chat"}
    given = {"model": MODEL, **fields} if inputs & fields.keys() else {"model": MODEL, "text": "x", **fields}
    return pb.GenerateRequest(**given)  # type: ignore[arg-type]


def said(*contents: str, **fields: object) -> pb.Chat:
    """A conversation of user messages."""
    messages = [pb.ChatMessage(role="user", content=content) for content in contents or ("hi",)]
    return pb.Chat(messages=messages, **fields)  # type: ignore[arg-type]


async def replies(stub: InferenceStub, request: pb.GenerateRequest) -> list[pb.GenerateReply]:
    return [reply async for reply in stub.Generate(request)]


async def refusal(stub: InferenceStub, request: pb.GenerateRequest) -> tuple[grpc.StatusCode, str, str]:
    """Status, code and param of the error that answers `request`."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await replies(stub, request)
    metadata = dict(raised.value.trailing_metadata())
    code, param = metadata.get("bakehouse-error-code", ""), metadata.get("bakehouse-error-param", "")
    return raised.value.code(), str(code), str(param)


def joined(messages: Sequence[pb.GenerateReply], choice: int = 0) -> str:
    return "".join(reply.text for reply in messages if reply.HasField("choice") and reply.choice == choice)


# --- The interface --------------------------------------------------------------------------------------------


def without_versions(generated: Path) -> list[str]:
    """A generated module's types or descriptor; the rest of it depends on the version that made it."""
    lines = generated.read_text().splitlines()
    return [line for line in lines if line.startswith(("DESCRIPTOR =", "class ")) or "FIELD_NUMBER" in line]


def test_the_generated_code_is_that_of_the_proto_file(tmp_path: Path) -> None:
    name = Path(pb.DESCRIPTOR.name)
    source = f"{name.parent}={ROOT / 'router/proto/bakehouse/v1'}"
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I", source, *outputs, str(name)], check=True)
    for ending in ("_pb2.py", "_pb2.pyi"):
        generated = name.with_name(name.stem + ending)
        assert without_versions(tmp_path / generated) == without_versions(ROOT / "router" / generated)


def fields_of(*bodies: type[ChatBody | CompletionBody]) -> set[str]:
    """The fields that ask for something: not those that are accepted only with the value that does nothing."""
    properties = [
        (name, schema)
        for body in bodies
        for name, schema in body.model_json_schema()["properties"].items()
        if not set(schema) & {"enum"}
    ]
    return {name for name, _ in properties}


def test_every_parameter_of_the_http_bodies_can_be_given() -> None:
    of_grpc = {
        name.removesuffix("_json")
        for message in (pb.GenerateRequest, pb.Chat)
        for name in message.DESCRIPTOR.fields_by_name
    }
    told_otherwise = {
        "prompt",  # text, token_ids, prompts
        "stream",  # always
        "stream_options",  # usage always, continuous_usage_stats
        "max_completion_tokens",  # another name of max_tokens
        "top_logprobs",  # the number in logprobs
        "tool_choice",  # tool_choice_mode, tool_choice_function
    }
    assert fields_of(ChatBody, CompletionBody) - of_grpc == told_otherwise


def test_scalars_that_are_not_set_are_not_given() -> None:
    kind, fields = generate_fields(asked())
    assert (kind, set(fields)) == ("completion", {"model", "stream", "stream_options", "prompt"})


def test_every_parameter_becomes_the_field_of_its_name() -> None:
    request = asked(
        text="hi",
        n=2,
        temperature=0.0,
        seed=0,
        stop=["a"],
        logit_bias={5: 1.5},
        allowed_token_ids=pb.TokenIds(ids=[]),
        response_format_json='{"type": "json_object"}',
        logprobs=3,
        continuous_usage_stats=True,
    )
    _, fields = generate_fields(request)
    assert fields == {
        "model": MODEL,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "prompt": "hi",
        "n": 2,
        "temperature": 0.0,
        "seed": 0,
        "stop": ["a"],
        "logit_bias": {"5": 1.5},
        "allowed_token_ids": [],
        "response_format": {"type": "json_object"},
        "logprobs": 3,
    }


def test_a_chat_becomes_the_body_of_one() -> None:
    chat = said(
        "hi",
        tools=[pb.Tool(name="oven", parameters_json='{"type": "object", "maxProperties": 2}')],
        tool_choice_function="oven",
        parallel_tool_calls=False,
    )
    chat.messages.add(role="assistant", tool_calls=[pb.ToolCall(id="1", name="oven", arguments="{}")])
    chat.messages.add(role="tool", content="hot", tool_call_id="1")
    kind, fields = generate_fields(asked(chat=chat, logprobs=2))
    call = {"id": "1", "type": "function", "function": {"name": "oven", "arguments": "{}"}}
    assert kind == "chat"
    assert fields["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "hot", "tool_call_id": "1"},
    ]
    parameters = {"type": "object", "maxProperties": 2}  # integers stay integers
    assert fields["tools"] == [{"type": "function", "function": {"name": "oven", "parameters": parameters}}]
    assert fields["tool_choice"] == {"type": "function", "function": {"name": "oven"}}
    assert (fields["logprobs"], fields["top_logprobs"]) == (True, 2)


# --- Answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"text": "ab"},
        {"token_ids": pb.TokenIds(ids=ids_of("ab"))},
        {"prompts": pb.Prompts(prompts=[pb.Prompt(text="ab")])},
    ],
    ids=lambda given: next(iter(given)),
)
async def test_text_and_ids_are_continued(text: ModelText, given: dict[str, object]) -> None:
    dispatcher = ScriptedDispatcher(["Hel", "lo"])
    async with grpc_served(text, dispatcher) as stub:
        messages = await replies(stub, asked(max_tokens=5, **given))

    assert [reply.text for reply in messages] == ["Hel", "lo", "", ""]
    assert messages[2].finish_reason == "length"
    assert not messages[3].HasField("choice")
    (request,) = dispatcher.requests
    assert request.prompt_ids[-2:] == ids_of("ab")
    assert messages[3].usage == pb.Usage(prompt_tokens=len(request.prompt_ids), completion_tokens=5)
    assert len({reply.id for reply in messages}) == 1


async def test_a_model_that_is_not_named_is_the_one_that_is_served(text: ModelText) -> None:
    async with grpc_served(text, ScriptedDispatcher(["Hi"])) as stub:
        assert joined(await replies(stub, pb.GenerateRequest(text="x"))) == "Hi"
        assert (await stub.Tokenize(pb.TokenizeRequest(text="x"))).token_ids


async def test_a_chat_is_answered(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher(["Hello"])
    async with grpc_served(text, dispatcher) as stub:
        messages = await replies(stub, asked(chat=said("hi")))
    assert joined(messages) == "Hello"


async def test_choices_and_prompts_are_told_apart(text: ModelText) -> None:
    script = (
        (delta(1, "one"), delta(0, "zero")),
        (delta(0, "", FinishReason.STOP), delta(1, "", FinishReason.STOP)),
    )
    async with grpc_served(text, ScriptedDispatcher(script)) as stub:
        prompts = pb.Prompts(prompts=[pb.Prompt(text="a"), pb.Prompt(token_ids=pb.TokenIds(ids=[5, 6]))])
        messages = await replies(stub, asked(prompts=prompts, n=2))
    assert [joined(messages, choice) for choice in range(4)] == ["zero", "one", "zero", "one"]
    assert messages[-1].usage.completion_tokens == 14


async def test_ids_and_logprobs_are_reported_where_they_are_asked_for(text: ModelText) -> None:
    async with grpc_served(text, ScriptedDispatcher(["ab"])) as stub:
        request = asked(token_ids=pb.TokenIds(ids=[7, 8]), logprobs=1, prompt_logprobs=1, return_token_ids=True)
        first, *_ = await replies(stub, request)
        (plain, *_) = await replies(stub, asked())

    ids = ids_of("ab")
    assert tuple(first.token_ids) == ids
    assert [(row.token_id, row.logprob, row.rank, row.text_offset) for row in first.logprobs] == [
        (ids[0], -ids[0], 1, 0),
        (ids[1], -ids[1], 1, 1),
    ]
    assert [top.token_id for top in first.logprobs[0].top] == [ids[0]]
    assert list(first.prompt.token_ids) == [7, 8]
    assert [(row.token_id, row.logprob) for row in first.prompt.logprobs] == [(8, -8)]
    assert not plain.token_ids
    assert not plain.logprobs
    assert not plain.HasField("prompt")


async def test_an_echoed_prompt_comes_first_and_its_ids_are_no_output(text: ModelText) -> None:
    async with grpc_served(text, ScriptedDispatcher(["cd"])) as stub:
        messages = await replies(stub, asked(text="ab", echo=True, return_token_ids=True))
    assert joined(messages) == "abcd"
    assert [token for reply in messages for token in reply.token_ids] == list(ids_of("cd"))


async def test_usage_comes_with_every_message_where_it_is_asked_for(text: ModelText) -> None:
    async with grpc_served(text, ScriptedDispatcher(["a", "bc"])) as stub:
        messages = await replies(stub, asked(continuous_usage_stats=True))
    assert [reply.usage.completion_tokens for reply in messages] == [1, 3, 3, 3]


CALLED = '<tool_call>\n{"name": "oven", "arguments": {"heat": 200}}\n</tool_call>'


async def test_tool_calls_are_the_same_as_over_http(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    text = text_in(tmp_path, template=TEMPLATE + "{% if tools %}{{ tools | tojson }}{% endif %}")
    chosen = GatewaySettings(served_name=MODEL, tool_format="hermes")
    script = ["I bake. ", *CALLED, (delta(0, "", FinishReason.STOP),)]
    function = {"name": "oven", "parameters": {"type": "object"}}
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "bake"}],
        "tools": [{"type": "function", "function": function}],
    }
    tools = [pb.Tool(name="oven", parameters_json=json.dumps(function["parameters"]))]
    async with grpc_served(text, ScriptedDispatcher(script), chosen) as stub:
        messages = await replies(stub, asked(chat=said("bake", tools=tools)))
    async with served(text, ScriptedDispatcher(script), chosen) as url, httpx.AsyncClient() as http:
        answer = (await http.post(f"{url}/v1/chat/completions", json=body)).json()["choices"][0]

    calls = [call for reply in messages for call in reply.tool_calls]
    (called,) = answer["message"]["tool_calls"]
    assert joined(messages) == answer["message"]["content"]
    assert [call.name for call in calls if call.HasField("name")] == [called["function"]["name"]] == ["oven"]
    assert "".join(call.arguments for call in calls) == called["function"]["arguments"]
    assert messages[-2].finish_reason == answer["finish_reason"] == "tool_calls"


async def test_texts_and_ids_are_turned_into_each_other(text: ModelText) -> None:
    async with grpc_served(text, ScriptedDispatcher()) as stub:
        bare = await stub.Tokenize(
            pb.TokenizeRequest(model=MODEL, text="hé", add_special_tokens=False, return_token_strs=True)
        )
        chat = await stub.Tokenize(pb.TokenizeRequest(chat=said("hi")))
        back = await stub.Detokenize(pb.DetokenizeRequest(token_ids=bare.token_ids))
    assert tuple(bare.token_ids) == ids_of("hé")
    assert len(bare.token_strs) == 3
    assert bare.max_model_len == 512
    assert len(chat.token_ids) > 2
    assert back.text == "hé"


async def test_the_model_is_listed_with_its_context_if_a_replica_serves(text: ModelText) -> None:
    async with grpc_served(text, ScriptedDispatcher()) as stub:
        (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
    async with grpc_served(text, ScriptedDispatcher(replicas=())) as stub:
        (nobody,) = (await stub.ListModels(pb.ListModelsRequest())).models
    assert (model.id, model.max_model_len) == (MODEL, 512)
    assert (nobody.id, nobody.max_model_len) == (MODEL, 0)


# --- Errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (asked(max_tokens=-3), "max_tokens"),
        (asked(temperature=-1), "temperature"),
        (asked(temperature=float("nan")), "temperature"),
        (asked(text=""), "prompt"),
        (asked(token_ids=pb.TokenIds(ids=[10**6])), "prompt"),
        (asked(prompts=pb.Prompts()), "prompt"),
        (asked(prompts=pb.Prompts(prompts=[pb.Prompt(text="a"), pb.Prompt()])), "prompt"),
        (pb.GenerateRequest(model=MODEL), "input"),
        (asked(response_format_json="{"), "response_format_json"),
        (asked(chat=said(tools=[pb.Tool(name="a", parameters_json="[]")])), "parameters_json"),
        (asked(chat=pb.Chat()), "messages"),
        (asked(chat=said(), echo=True), "echo"),
        (asked(chat=said(tool_choice_mode="maybe")), "tool_choice"),
        (asked(n=10**6), "n"),
        (asked(timeout_s=0), "timeout_s"),
        (asked(stop=[""]), "stop"),
        (asked(best_of=3), "best_of"),
        (asked(logit_bias={-1: 1.0}), "logit_bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_cannot_be_served_is_refused_by_the_name_of_the_field(
    text: ModelText, request_: pb.GenerateRequest, param: str
) -> None:
    async with grpc_served(text, ScriptedDispatcher()) as stub:
        assert await refusal(stub, request_) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request", param)


async def test_errors_have_the_status_of_the_table(text: ModelText) -> None:
    failed = Failure(kind=FailureKind.ENGINE, message="the oven is cold")
    broken = ScriptedDispatcher(["a", (delta(0, "", FinishReason.ERROR, failure=failed),)])
    async with grpc_served(text, ScriptedDispatcher()) as stub:
        assert await refusal(stub, pb.GenerateRequest(model="rye", text="x")) == (
            grpc.StatusCode.NOT_FOUND,
            "model_not_found",
            "model",
        )
        too_long = await refusal(stub, asked(max_tokens=600))
        assert too_long[:2] == (grpc.StatusCode.INVALID_ARGUMENT, "context_length_exceeded")
    async with grpc_served(text, ScriptedDispatcher(replicas=())) as stub:
        assert (await refusal(stub, asked()))[:2] == (grpc.StatusCode.UNAVAILABLE, "unavailable")
    async with grpc_served(text, broken) as stub:
        assert (await refusal(stub, asked()))[:2] == (grpc.StatusCode.UNAVAILABLE, "engine_dead")
    async with grpc_served(text, ScriptedDispatcher([RuntimeError("flour")])) as stub:
        assert (await refusal(stub, asked()))[:2] == (grpc.StatusCode.INTERNAL, "internal_error")
    async with grpc_served(text, ScriptedDispatcher(), settings(max_body_bytes=1000)) as stub:
        assert (await refusal(stub, asked(text="x" * 2000)))[:2] == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "request_too_large",
        )


async def test_a_deadline_of_the_request_ends_it(text: ModelText) -> None:
    async with grpc_served(text, ScriptedDispatcher([asyncio.Event()])) as stub:
        status_code, code, _ = await refusal(stub, asked(timeout_s=0.1))
    assert (status_code, code) == (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline_exceeded")


async def test_a_failed_unary_call_is_told_the_same_way(text: ModelText) -> None:
    async with grpc_served(text, ScriptedDispatcher()) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Detokenize(pb.DetokenizeRequest(token_ids=[-1]))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(raised.value.trailing_metadata())["bakehouse-error-param"] == "tokens"


async def test_messages_and_fields_may_be_any_text(text: ModelText) -> None:
    async with grpc_served(text, ScriptedDispatcher()) as stub:
        status_code, _, param = await refusal(stub, asked(structured_outputs_json='{"brötchen\\n": 1}'))
    assert status_code is grpc.StatusCode.INVALID_ARGUMENT
    assert param.isascii()


async def test_the_request_id_is_honoured_and_told(text: ModelText) -> None:
    async with grpc_served(text, ScriptedDispatcher()) as stub:
        call = stub.Generate(asked(), metadata=[("x-request-id", "loaf-1")])
        assert [reply async for reply in call]
        told = await call.trailing_metadata()
    assert dict(told)["x-request-id"] == "loaf-1"


async def test_keys_are_asked_for(text: ModelText, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("tenants: {alice: {keys: [sk-alice-0123456789abcdef]}}")
    dispatcher = ScriptedDispatcher()
    async with grpc_served(text, dispatcher, keys=KeyRing(path)) as stub:
        assert (await refusal(stub, asked()))[:2] == (grpc.StatusCode.UNAUTHENTICATED, "invalid_api_key")
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.ListModels(pb.ListModelsRequest())
        call = stub.Generate(asked(), metadata=[("authorization", "Bearer sk-alice-0123456789abcdef")])
        assert [reply async for reply in call]
    assert [request.tenant for request in dispatcher.requests] == ["alice"]


async def test_what_is_answered_by_a_status_alone_is_counted_by_its_code(text: ModelText, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("tenants: {alice: {keys: [sk-alice-0123456789abcdef]}}")
    gateway = Gateway(settings(), ScriptedDispatcher(), text)
    async with grpc_served_by(gateway, KeyRing(path)) as stub:
        await refusal(stub, asked())
        for n in (0, 1):
            call = stub.Generate(asked(n=n), metadata=[("authorization", "Bearer sk-alice-0123456789abcdef")])
            with suppress(grpc.aio.AioRpcError):
                assert [reply async for reply in call]
    counted = {one.labels[0]: one.value for one in gateway.metrics.series() if one.name == REJECTIONS.name}
    assert {code: n for code, n in counted.items() if n} == {"invalid_api_key": 1, "invalid_request": 1}


# --- Clients that go, and the health --------------------------------------------------------------------------


async def test_a_cancelled_call_frees_its_blocks(text: ModelText) -> None:
    async with fake_engine() as engine, grpc_served(text, engine) as stub:
        for n_read in range(4):
            call = stub.Generate(asked(ignore_eos=True, max_tokens=500))
            for _ in range(n_read):
                await call.read()
            call.cancel()
        async with asyncio.timeout(60):
            while (await engine.statuses())[0].load.n_held_blocks:
                await asyncio.sleep(0)


class _Context:
    """Takes down the status of a call."""

    def __init__(self) -> None:
        self.code = grpc.StatusCode.OK

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return ()

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, metadata: list[tuple[str, str]]) -> None: ...


@pytest.mark.parametrize(
    ("problems", "status_"),
    [
        ((None,), HealthCheckResponse.SERVING),
        (("cold", None), HealthCheckResponse.SERVING),
        (("cold",), HealthCheckResponse.NOT_SERVING),
        ((), HealthCheckResponse.NOT_SERVING),
    ],
)
async def test_the_health_is_that_of_the_replicas(
    text: ModelText, problems: tuple[str | None, ...], status_: HealthCheckResponse.ServingStatus
) -> None:
    replicas = tuple(status(tiny_card(f"replica-{index}"), problem) for index, problem in enumerate(problems))
    service = InferenceService(Gateway(settings(), ScriptedDispatcher(replicas=replicas), text))
    for name in ("", "bakehouse.v1.Inference"):
        assert (await service.Check(HealthCheckRequest(service=name), _Context())).status == status_


async def test_the_health_of_an_unknown_service_is_not_found(text: ModelText) -> None:
    context = _Context()
    service = InferenceService(Gateway(settings(), ScriptedDispatcher(), text))
    await service.Check(HealthCheckRequest(service="rye"), context)
    assert context.code is grpc.StatusCode.NOT_FOUND
