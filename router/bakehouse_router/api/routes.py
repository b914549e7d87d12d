"""The handlers of the OpenAI routes and of those beside them, over one gateway."""

import asyncio
import time

from bakehouse_replica.core.errors import BakehouseError
from bakehouse_replica.core.metric_table import OUTCOMES
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bakehouse_router.api.bodies import chat_call, completion_call, tokenize_call
from bakehouse_router.api.chat_reply import ChatShape
from bakehouse_router.api.completion_reply import CompletionShape
from bakehouse_router.api.fleet import fleet_json, replica_json
from bakehouse_router.api.generating import Answering, token_report
from bakehouse_router.api.parse import Body
from bakehouse_router.api.reading import Read, in_thread_if, read_as, read_origin, receive, tenant_of
from bakehouse_router.api.responses.answer import respond
from bakehouse_router.api.responses.body import ResponseBody
from bakehouse_router.api.responses.call import response_call
from bakehouse_router.api.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChatBody,
    TokenizeTextBody,
)
from bakehouse_router.api.token_json import Json, TokenReport
from bakehouse_router.gateway import Gateway
from bakehouse_router.settings import GatewaySettings
from bakehouse_router.tenants import Used


def _used_json(used: Used) -> Json:
    return {
        "requests": {outcome: used.outcomes[outcome] for outcome in OUTCOMES if used.outcomes[outcome]},
        "block_seconds": used.block_seconds,
        "prompt_tokens": {
            "computed": used.computed_tokens,
            "cached": used.cached_tokens,
            "recomputed": used.recomputed_tokens,
        },
        "generated_tokens": used.generated_tokens,
    }


class Routes:
    """The handlers. `gateway_id`: by which the log knows this gateway, where it is known."""

    def __init__(self, gateway: Gateway, gateway_id: str | None = None) -> None:
        self._gateway = gateway
        self._gateway_id = gateway_id
        self._started_at = int(time.time())

    @property
    def _settings(self) -> GatewaySettings:
        """Anew for each call: its limits may change."""
        return self._gateway.settings

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        received_at = asyncio.get_running_loop().time()
        read = await self._read(ChatBody, request)
        origin = read_origin(request)
        call = await in_thread_if(read.is_long, chat_call, read.body, self._settings, origin)
        shape = ChatShape(token_report(call, self._gateway), self._gateway.new_parser(call))
        return await self._answering(request, read, received_at).answer(read.body, call, shape, "chatcmpl")

    async def complete(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        received_at = asyncio.get_running_loop().time()
        read = await self._read(CompletionBody, request)
        origin = read_origin(request)
        call = await in_thread_if(read.is_long, completion_call, read.body, self._settings, origin)
        shape = CompletionShape(token_report(call, self._gateway))
        return await self._answering(request, read, received_at).answer(read.body, call, shape, "cmpl")

    async def respond(self, request: Request) -> Response:
        """`POST /v1/responses`."""
        received_at = asyncio.get_running_loop().time()
        read = await self._read(ResponseBody, request)
        origin = read_origin(request)
        asked = await in_thread_if(read.is_long, response_call, read.body, self._settings, origin)
        return await respond(self._answering(request, read, received_at), read.body, asked)

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`: the ids of a text, or of a conversation as the chat template writes it."""
        received = await receive(request, self._settings)
        read: Read[TokenizeChatBody] | Read[TokenizeTextBody]
        if "messages" in received.fields:
            read = await read_as(TokenizeChatBody, received, self._settings)
        else:
            read = await read_as(TokenizeTextBody, received, self._settings)
        body = read.body
        call = await in_thread_if(read.is_long, tokenize_call, body, self._gateway.model_name)
        adds_special_tokens = body.add_special_tokens is not False
        token_ids = await self._gateway.tokenize(call, adds_special_tokens=adds_special_tokens)
        report = TokenReport(names=self._gateway.vocabulary)
        reply = {
            "count": len(token_ids),
            "max_model_len": (await self._gateway.serving_card()).max_model_len,
            "tokens": token_ids,
            "token_strs": list(map(report.text_of, token_ids)) if body.return_token_strs else None,
        }
        return JSONResponse(reply, headers=read.headers())

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`: the text of ids, special tokens left out."""
        read = await self._read(DetokenizeBody, request)
        if read.body.model:
            self._gateway.check_model(read.body.model)
        text = await self._gateway.detokenize(read.body.tokens)
        return JSONResponse({"prompt": text}, headers=read.headers())

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return JSONResponse({"object": "list", "data": [await self._model_json()]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{name}`."""
        self._gateway.check_model(request.path_params["name"])
        return JSONResponse(await self._model_json())

    async def replicas(self, request: Request) -> Response:
        """`GET /v1/replicas`: how each replica and this gateway are doing."""
        fleet = fleet_json(self._gateway, await self._gateway.statuses(), self._gateway_id)
        return JSONResponse(fleet, headers={"cache-control": "no-store"})

    async def explain(self, request: Request) -> Response:
        """`GET /v1/requests/{id}/explain`: of a request of whoever has the key, by its id or its reply's."""
        explained = await self._gateway.explanations.explain(tenant_of(request), request.path_params["id"])
        return JSONResponse(explained)

    async def health(self, request: Request) -> Response:
        """`GET /health`: 200 while at least one replica serves; the body says which do not, and why."""
        statuses = await self._gateway.statuses()
        replicas = [replica_json(status) for status in statuses]
        serves = any(status.problem is None for status in statuses)
        return JSONResponse(
            {"status": "ok" if serves else "unavailable", "replicas": replicas}, 200 if serves else 503
        )

    async def ready(self, request: Request) -> Response:
        """`GET /ready`: 200 once the model has answered and as long as a replica serves."""
        await self._gateway.check_ready()
        return JSONResponse({"status": "ready", "model": self._gateway.model_name})

    async def _read(self, model: type[Body], request: Request) -> Read[Body]:
        return await read_as(model, await receive(request, self._settings), self._settings)

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`: this gateway's counters and its replicas' loads, as Prometheus reads them.

        Whoever comes with a key sees what is counted by tenant of its own tenant only.
        """
        metrics, tenant = self._gateway.metrics, tenant_of(request)
        shown = metrics.exposition(await self._gateway.statuses(), only_tenant=tenant or None)
        return Response(shown, media_type=metrics.content_type)

    async def usage(self, request: Request) -> Response:
        """`GET /v1/usage`: what the caller's tenant, and no other, has used of this gateway since it started."""
        tenants, tenant = self._gateway.metrics.tenants, tenant_of(request)
        head: Json = {
            "object": "usage",
            "tenant": tenant,
            "gateway": self._gateway_id,
            "since": tenants.since,
        }
        return JSONResponse(head | _used_json(tenants.told(tenant)))

    async def tokenizer_info(self, request: Request) -> Response:
        """`GET /tokenizer_info`: what a client must know to use `/tokenize` as its tokenizer, as lm-eval does."""
        return JSONResponse(self._gateway.tokenizer_info)

    def _answering(
        self,
        request: Request,
        read: Read[ChatBody] | Read[CompletionBody] | Read[ResponseBody],
        received_at: float,
    ) -> Answering:
        headers = read.headers()
        return Answering(gateway=self._gateway, request=request, received_at=received_at, headers=headers)

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
            "context_length": max_model_len,
        }
