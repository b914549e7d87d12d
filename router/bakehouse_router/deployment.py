"""The gateway as a Serve deployment: answers HTTP, gRPC and handle calls, over a handle of the replicas."""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bakehouse_replica.core.errors import ConfigError
from bakehouse_replica.core.metric_table import METRICS, Source
from bakehouse_replica.core.types import Cost
from bakehouse_replica.logs import write_to_serve_log
from bakehouse_replica.ray_metrics import RayMetrics, log_end, push_for_ever
from fastapi import FastAPI
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from bakehouse_router.admission import WaitingQueue
from bakehouse_router.dispatch import Dispatcher
from bakehouse_router.proto.inference_pb2 import (
    DetokenizeReply,
    DetokenizeRequest,
    GenerateReply,
    GenerateRequest,
    ListModelsReply,
    ListModelsRequest,
    TokenizeReply,
    TokenizeRequest,
)
from bakehouse_router.ray_client import RayCalls
from bakehouse_router.settings import GatewaySettings
from bakehouse_router.subscription_client import SubscriptionClient

if TYPE_CHECKING:  # these load transformers and torch, 3.5 s that a process which only deploys need not wait for
    from bakehouse_router.api.deltas import Fields, Kind
    from bakehouse_router.api.grpc import InferenceService
    from bakehouse_router.gateway import Gateway
    from bakehouse_router.handle_messages import Delta, ModelEntry, Tokenized

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Faces:
    """What a gateway process answers by."""

    gateway: "Gateway"
    http: FastAPI
    grpc: "InferenceService"


@serve.ingress()
class GatewayDeployment:
    """Wires text, dispatcher and the faces together in a gateway process; `bakehouse_cluster.app` deploys it."""

    def __init__(self, settings: GatewaySettings, replicas: DeploymentHandle[object]) -> None:
        for package in ("bakehouse_router", "bakehouse_replica"):
            write_to_serve_log(package)
        self._settings = settings
        self._has_started = False
        self._calls = RayCalls(replicas)
        self._client = SubscriptionClient(self._calls, status_period_s=settings.status_period_s, pay=self._pay)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve once, after the constructor and in this process: the app holds live objects."""
        self._client.start()
        gateway_id = serve.get_replica_context().replica_id.unique_id
        dispatcher, decisions = Dispatcher(self._client, routed=self._calls.routed), self._calls.decisions
        self._faces = await asyncio.to_thread(_build_faces, self._settings, dispatcher, decisions, gateway_id)
        counted = RayMetrics(metric for metric in METRICS if metric.source is Source.GATEWAY)
        self._pushing = asyncio.create_task(push_for_ever([counted], self._faces.gateway.metrics.series))
        self._pushing.add_done_callback(log_end)
        return self._faces.http

    async def reconfigure(self, user_config: Mapping[str, object]) -> None:
        """Serve calls it once at the start, and whenever the deployment's `user_config` has changed.

        Raises `ConfigError` at the start only: later, Serve would end a gateway for it, with all that it streams.
        """
        try:
            self._faces.gateway.reconfigure(user_config)
        except ConfigError as error:
            if not self._has_started:
                raise
            logger.error("the limits stay as they are: %s", error)

    def _pay(self, tenant: str, cost: Cost) -> None:
        self._faces.gateway.metrics.pay(tenant, cost)

    async def check_health(self) -> None:
        """Of the gateway itself; whether replicas serve is what its `/health` tells."""
        self._has_started = True  # Serve asks for the first time when it has configured the gateway
        self._client.check()

    async def __del__(self) -> None:
        await self._client.close()

    # --- Calls by a handle; their errors are our own, raised here ------------------------------------------------

    async def stream(self, kind: "Kind", fields: "Fields") -> "AsyncGenerator[Delta, None]":
        """The deltas of the answer to an HTTP body's fields; cancelling the call cancels its requests."""
        from bakehouse_router.api.bodies import Origin
        from bakehouse_router.api.deltas import stream_deltas

        gateway, request_id = self._faces.gateway, f"req-{secrets.token_hex(16)}"
        fields = {"model": gateway.model_name, **fields}
        with gateway.records.open("handle", kind, request_id, {}) as record:
            deltas = stream_deltas(gateway, kind, fields, origin=Origin(), record=record)
            async with aclosing(deltas):
                async for delta in deltas:
                    yield delta

    async def tokenize(self, kind: "Kind", fields: "Fields") -> "Tokenized":
        """The answer to the fields of a `/tokenize` body."""
        from bakehouse_router.api.tokens import tokenized

        return await tokenized(self._faces.gateway, kind, fields)

    async def detokenize(self, fields: "Fields") -> str:
        """The answer to the fields of a `/detokenize` body."""
        from bakehouse_router.api.tokens import detokenized

        return await detokenized(self._faces.gateway, fields)

    async def models(self) -> "tuple[ModelEntry, ...]":
        """The models that are served here."""
        from bakehouse_router.api.tokens import served_models

        return await served_models(self._faces.gateway)

    # --- gRPC: Serve calls the method that has the name of the called one ----------------------------------------

    async def Generate(
        self, request: GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[GenerateReply, None]:
        """`bakehouse.v1.Inference/Generate`; an empty message carries the status and metadata of an error."""
        replies = self._faces.grpc.Generate(request, grpc_context)
        async with aclosing(replies):
            async for reply in replies:
                yield reply
        if grpc_context.code():
            yield GenerateReply()

    async def Tokenize(self, request: TokenizeRequest, grpc_context: RayServegRPCContext) -> TokenizeReply:
        """`bakehouse.v1.Inference/Tokenize`."""
        return await self._faces.grpc.Tokenize(request, grpc_context)

    async def Detokenize(self, request: DetokenizeRequest, grpc_context: RayServegRPCContext) -> DetokenizeReply:
        """`bakehouse.v1.Inference/Detokenize`."""
        return await self._faces.grpc.Detokenize(request, grpc_context)

    async def ListModels(self, request: ListModelsRequest, grpc_context: RayServegRPCContext) -> ListModelsReply:
        """`bakehouse.v1.Inference/ListModels`."""
        return await self._faces.grpc.ListModels(request, grpc_context)

    async def Check(self, request: HealthCheckRequest, grpc_context: RayServegRPCContext) -> HealthCheckResponse:
        """`grpc.health.v1.Health/Check`, also for those who watch."""
        return await self._faces.grpc.Check(request, grpc_context)


def _build_faces(
    settings: GatewaySettings,
    dispatcher: Dispatcher,
    decisions: Callable[[], Mapping[str, int]],
    gateway_id: str,
) -> _Faces:
    # They load transformers and torch, 3.5 s that a process which only deploys this class need not wait for.
    from bakehouse_replica.source import open_source

    from bakehouse_router.api.grpc import InferenceService
    from bakehouse_router.api.http import build_api
    from bakehouse_router.gateway import Gateway
    from bakehouse_router.keys import KeyRing
    from bakehouse_router.metrics import GatewayMetrics
    from bakehouse_router.structured import GrammarChecker
    from bakehouse_router.text.model_text import load_model_text
    from bakehouse_router.tracing import Tracing

    text = load_model_text(open_source(settings.source), template_override=settings.chat_template)
    queue = WaitingQueue(max_requests=settings.max_queued_requests, max_tokens=settings.max_queued_tokens)
    grammars = GrammarChecker(text.tokenizer.vocabulary, settings)
    metrics = GatewayMetrics(queue=queue, decisions=decisions)
    tracing = Tracing() if settings.traces else None
    gateway = Gateway(
        settings, dispatcher, text, grammars=grammars, admission=queue, metrics=metrics, tracing=tracing
    )
    keys = None if settings.keys_path is None else KeyRing(settings.keys_path)
    return _Faces(
        gateway=gateway,
        http=build_api(gateway, keys=keys, tells_request_id=False, gateway_id=gateway_id),
        grpc=InferenceService(gateway, keys),
    )
