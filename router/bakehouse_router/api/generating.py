"""Starts a call and answers with its generation, streamed or whole, for as long as the client is there."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from bakehouse_router.api.answers import EventWriter, Pieces, whole_reply
from bakehouse_router.api.recorded import record_of
from bakehouse_router.api.replies import ReplyHead, ReplyShape
from bakehouse_router.api.schema import GenerationBody
from bakehouse_router.api.sse import EventStream, wait_for_disconnect
from bakehouse_router.api.token_json import Json, TokenReport
from bakehouse_router.calls import Call, CompletionCall
from bakehouse_router.gateway import Gateway
from bakehouse_router.generation import Generation
from bakehouse_router.prompt_run import TextPiece

REPLICA_HEADER = "x-bakehouse-replica"
ROUTE_HEADER = "x-bakehouse-route"

Result = TypeVar("Result")
# What a stream consists of, by the first pieces of a generation and the rest of them.
Frames = Callable[[tuple[TextPiece, ...], Pieces], AsyncGenerator[bytes, None]]


def token_report(call: Call, gateway: Gateway) -> TokenReport:
    """What the call wants to see of the tokens."""
    return TokenReport(
        names=gateway.vocabulary,
        n_top=call.options.logprobs,
        n_prompt_top=call.options.prompt_logprobs,
        shows_ids=call.options.reports_tokens,
        echoes=isinstance(call, CompletionCall) and call.echoes,
    )


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """Answers one request, which came at `received_at` by the event loop's clock.

    `headers` are those of the response besides the replica's.
    """

    gateway: Gateway
    request: Request
    received_at: float
    headers: Mapping[str, str]

    async def answer(self, body: GenerationBody, call: Call, shape: ReplyShape, id_prefix: str) -> Response:
        """The response, or the head of a stream of it. Raises a `BakehouseError` before either."""
        call_id = f"{id_prefix}-{secrets.token_hex(16)}"
        generation = await self.start(call, call_id)
        options = body.stream_options
        head = ReplyHead(
            reply_id=call_id,
            created=int(time.time()),
            model=self.gateway.model_name,
            shows_usage=bool(options and options.include_usage),
            counts_along=bool(options and options.continuous_usage_stats),
        )
        if body.stream:
            writer = EventWriter(generation, shape, head, self.request.state.request_id)
            return await self.streamed(generation, writer.frames)
        return await self.whole(generation, whole_reply(generation, shape, head))

    async def start(self, call: Call, call_id: str) -> Generation:
        """The call's generation. Raises as `Gateway.start` does."""
        return await self.gateway.start(call, call_id, self.received_at, record_of(self.request.scope))

    async def whole(self, generation: Generation, reply: Awaitable[Json]) -> Response:
        """The reply, once it is known."""
        content = await unless_gone(self.request, reply)
        return JSONResponse(content, headers=self._all_headers(generation))

    async def streamed(self, generation: Generation, frames: Frames) -> Response:
        """A stream whose status its first delivery decides, unless that takes longer than a keep-alive pause."""
        pieces = generation.pieces()
        try:
            first = await unless_gone(self.request, anext(pieces))
        except BaseException:
            await pieces.aclose()
            raise
        return EventStream(frames(first, pieces), pieces, self._all_headers(generation))

    def _all_headers(self, generation: Generation) -> dict[str, str]:
        told = {REPLICA_HEADER: generation.replica_id, ROUTE_HEADER: generation.route}
        return {**self.headers, **{name: value for name, value in told.items() if value is not None}}
