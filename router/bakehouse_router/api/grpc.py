"""The gRPC face: `bakehouse.v1.Inference` and `grpc.health.v1.Health` over one gateway.

The same methods serve a plain `grpc.aio` server and, as methods of the gateway deployment, Serve's. An error sets
the status on the context and ends the call without an answer: exceptions would lose their metadata on the way
through Serve (`bakehouse_router.grpc_ingress`).
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar
from urllib.parse import quote

import grpc
from bakehouse_replica.core.errors import BakehouseError, RequestTooLarge
from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from bakehouse_router.api.bodies import Origin
from bakehouse_router.api.deltas import Kind, stream_deltas
from bakehouse_router.api.errors import problem_of
from bakehouse_router.api.grpc_fields import detokenize_fields, generate_fields, tokenize_fields
from bakehouse_router.api.grpc_replies import generate_reply
from bakehouse_router.api.surround import REQUEST_ID_HEADER, usable_request_id
from bakehouse_router.api.tokens import detokenized, served_models, tokenized
from bakehouse_router.gateway import Gateway
from bakehouse_router.grpc_ingress import CallContext
from bakehouse_router.keys import KeyRing
from bakehouse_router.proto.inference_pb2 import (
    DESCRIPTOR,
    DetokenizeReply,
    DetokenizeRequest,
    GenerateReply,
    GenerateRequest,
    ListModelsReply,
    ListModelsRequest,
    Model,
    TokenizeReply,
    TokenizeRequest,
)
from bakehouse_router.tracing import TRACEPARENT, RequestSpan

logger = logging.getLogger(__name__)

SERVICE = DESCRIPTOR.services_by_name["Inference"].full_name
AUTHORIZATION_KEY = "authorization"
# Of the status message, which travels in an HTTP/2 header block of at most 8 KiB, percent-encoded.
_MAX_DETAILS_CHARS = 1024

Asked = TypeVar("Asked", bound=Message)
Answer = TypeVar("Answer")


class InferenceService:
    """The methods of both services; named as the `.proto` files name them, which is how Serve finds them.

    `keys` None asks nobody for a key. The health is told to everybody, as `/health` is.
    """

    def __init__(self, gateway: Gateway, keys: KeyRing | None = None) -> None:
        self._gateway = gateway
        self._keys = keys

    async def Generate(
        self, request: GenerateRequest, context: CallContext
    ) -> AsyncGenerator[GenerateReply, None]:
        """The answer in pieces; closing the generator cancels the call."""
        call = _Call(context)
        kind: Kind = "chat" if request.HasField("chat") else "completion"
        with self._gateway.records.open("grpc", kind, call.request_id, call.metadata) as record:
            call.name_span(record.span)
            try:
                origin = self._admit(request, call)
                record.tenant = origin.tenant
                kind, fields = generate_fields(request)
                fields = {"model": self._gateway.model_name, **fields}
                deltas = stream_deltas(self._gateway, kind, fields, origin=origin, record=record)
                async with aclosing(deltas):
                    async for delta in deltas:
                        yield generate_reply(delta, request)
            except Exception as error:
                record.fail(error)
                call.fail(error)

    async def Tokenize(self, request: TokenizeRequest, context: CallContext) -> TokenizeReply:
        """The ids that the model would be given."""
        return await self._answered(request, context, self._tokenize, TokenizeReply())

    async def Detokenize(self, request: DetokenizeRequest, context: CallContext) -> DetokenizeReply:
        """The text of ids."""
        return await self._answered(request, context, self._detokenize, DetokenizeReply())

    async def ListModels(self, request: ListModelsRequest, context: CallContext) -> ListModelsReply:
        """The one model that is served here."""
        return await self._answered(request, context, self._list_models, ListModelsReply())

    async def Check(self, request: HealthCheckRequest, context: CallContext) -> HealthCheckResponse:
        """Whether a replica serves, as `GET /health` says."""
        if request.service not in ("", SERVICE):
            context.set_code(grpc.StatusCode.NOT_FOUND)
            context.set_details(f"there is no service {request.service[:100]!r} here; {SERVICE} is")
            return HealthCheckResponse()
        serves = any(status.problem is None for status in await self._gateway.statuses())
        return HealthCheckResponse(
            status=HealthCheckResponse.SERVING if serves else HealthCheckResponse.NOT_SERVING
        )

    async def _tokenize(self, request: TokenizeRequest) -> TokenizeReply:
        kind, fields = tokenize_fields(request)
        answer = await tokenized(self._gateway, kind, fields)
        return TokenizeReply(
            token_ids=answer.token_ids, max_model_len=answer.max_model_len, token_strs=answer.token_strs
        )

    async def _detokenize(self, request: DetokenizeRequest) -> DetokenizeReply:
        return DetokenizeReply(text=await detokenized(self._gateway, detokenize_fields(request)))

    async def _list_models(self, request: ListModelsRequest) -> ListModelsReply:
        models = await served_models(self._gateway)
        return ListModelsReply(
            models=[Model(id=model.name, max_model_len=model.max_model_len or 0) for model in models]
        )

    def _admit(self, request: Message, call: "_Call") -> Origin:
        """Who asks. Raises `Unauthenticated`, or `RequestTooLarge` beyond the limit of an HTTP body."""
        limit = self._gateway.settings.max_body_bytes
        try:
            if request.ByteSize() > limit:
                raise RequestTooLarge(f"the request has {request.ByteSize()} bytes; the limit is {limit}")
            return Origin(tenant="" if self._keys is None else self._keys.tenant_of(call.authorization))
        except BakehouseError as error:
            self._gateway.metrics.reject(error)
            raise

    async def _answered(
        self,
        request: Asked,
        context: CallContext,
        work: Callable[[Asked], Awaitable[Answer]],
        nothing: Answer,
    ) -> Answer:
        """What `work` makes of the request; `nothing`, which grpc does not send, where it fails."""
        call = _Call(context)
        try:
            self._admit(request, call)
            return await work(request)
        except Exception as error:
            call.fail(error)
            return nothing


class _Call:
    """One call's id and how it fails."""

    def __init__(self, context: CallContext) -> None:
        self._context = context
        self.metadata = dict(context.invocation_metadata())
        self.request_id = usable_request_id(self.metadata.get(REQUEST_ID_HEADER, ""))
        self.authorization = self.metadata.get(AUTHORIZATION_KEY)
        self._told = {REQUEST_ID_HEADER: self.request_id}
        context.set_trailing_metadata(list(self._told.items()))

    def name_span(self, span: RequestSpan | None) -> None:
        """Tells the client under which span it is traced, if it is."""
        if span is not None:
            self._told[TRACEPARENT] = span.traceparent
            self._context.set_trailing_metadata(list(self._told.items()))

    def fail(self, error: Exception) -> None:
        """The status that the table of errors gives, and what else there is to say in the trailing metadata."""
        problem = problem_of(error, self.request_id)
        if problem.status == 500:
            logger.exception("request %s failed", self.request_id)
        self._context.set_code(grpc.StatusCode[problem.grpc_status])
        self._context.set_details(problem.message[:_MAX_DETAILS_CHARS])
        told = {**self._told, **problem.headers()}
        if problem.code is not None:
            told["bakehouse-error-code"] = quote(problem.code)
        if problem.param is not None:
            told["bakehouse-error-param"] = quote(problem.param, safe="[]._")
        self._context.set_trailing_metadata(list(told.items()))
