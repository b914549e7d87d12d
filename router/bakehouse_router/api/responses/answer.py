"""Answers a response's body: one JSON object, or a stream of named events.

A stream ends with `response.completed`, `response.incomplete` or `response.failed`; there is no `[DONE]`, which
this API of OpenAI's does not have.
"""

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from bakehouse_replica.core.errors import InvalidRequest
from starlette.responses import Response

from bakehouse_router.api.answers import Pieces, late_problem
from bakehouse_router.api.generating import Answering, token_report
from bakehouse_router.api.responses.body import ResponseBody
from bakehouse_router.api.responses.call import ResponseCall
from bakehouse_router.api.responses.events import ResponseWriter
from bakehouse_router.api.responses.reply import head_of
from bakehouse_router.api.sse import KEEP_ALIVE, event
from bakehouse_router.api.token_json import Json
from bakehouse_router.generation import Generation
from bakehouse_router.prompt_run import TextPiece


def _named(events: list[Json]) -> bytes:
    return b"".join(event(one, str(one["type"])) for one in events)


class ResponseAnswer:
    """Writes the response to one generation, either way; use it once."""

    def __init__(self, generation: Generation, writer: ResponseWriter, request_id: str) -> None:
        self._generation = generation
        self._writer = writer
        self._request_id = request_id

    async def whole(self) -> Json:
        """The response once the answer has ended."""
        async with aclosing(self._generation.pieces()) as pieces:
            async for arrived in pieces:
                self._events(arrived)
        response = self._last_event()["response"]
        assert isinstance(response, dict), "the last event holds the whole response"
        return response

    async def frames(self, first: tuple[TextPiece, ...], rest: Pieces) -> AsyncGenerator[bytes, None]:
        """The whole stream."""
        try:
            async with aclosing(rest):
                yield _named(self._writer.begin())
                yield self._frame(first)
                async for arrived in rest:
                    if frame := self._frame(arrived):
                        yield frame
            yield _named([self._last_event()])
        except Exception as error:  # the status has been sent: all that is left is to say so and to end
            yield _named(self._writer.fail(late_problem(error, self._request_id)))

    def _frame(self, arrived: tuple[TextPiece, ...]) -> bytes:
        return _named(self._events(arrived)) if arrived else KEEP_ALIVE

    def _events(self, arrived: tuple[TextPiece, ...]) -> list[Json]:
        return [one for piece in arrived for one in self._writer.write(piece)]

    def _last_event(self) -> Json:
        return self._writer.end(self._generation.usage, int(time.time()))


async def respond(answering: Answering, body: ResponseBody, asked: ResponseCall) -> Response:
    """The HTTP response to a body that asks for this call. Raises a `BakehouseError` before its first byte."""
    gateway, request_id = answering.gateway, answering.request.state.request_id
    response_id = f"resp_{secrets.token_hex(16)}"
    try:
        generation = await answering.start(asked.call, response_id)
    except InvalidRequest as error:
        raise asked.in_body_terms(error) from error
    head = head_of(
        body,
        asked.echo,
        gateway.defaults,
        response_id=response_id,
        created_at=int(time.time()),
        model=gateway.model_name,
    )
    new_parser = gateway.new_parser(asked.call)
    report = token_report(asked.call, gateway)
    writer = ResponseWriter(head, report, None if new_parser is None else new_parser())
    answer = ResponseAnswer(generation, writer, request_id)
    if body.stream:
        return await answering.streamed(generation, answer.frames)
    return await answering.whole(generation, answer.whole())
