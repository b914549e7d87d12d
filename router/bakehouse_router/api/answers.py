"""Turns a generation into an answer: one JSON reply, or a stream of events."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from bakehouse_replica.core.types import FinishReason

from bakehouse_router.api.errors import problem_of
from bakehouse_router.api.replies import Json, ReplyHead, ReplyShape, usage_json
from bakehouse_router.api.sse import DONE, KEEP_ALIVE, event
from bakehouse_router.generation import Generation, TextPiece

logger = logging.getLogger(__name__)

Pieces = AsyncGenerator[tuple[TextPiece, ...], None]


async def whole_reply(generation: Generation, shape: ReplyShape, head: ReplyHead) -> Json:
    """The reply once every choice has ended."""
    texts: dict[int, list[str]] = {}
    reasons: dict[int, FinishReason] = {}
    async with aclosing(generation.pieces()) as pieces:
        async for arrived in pieces:
            for piece in arrived:
                texts.setdefault(piece.choice, []).append(piece.text)
                if piece.finish is not None:
                    reasons[piece.choice] = piece.finish
    choices = [shape.whole(choice, "".join(texts[choice]), reasons[choice]) for choice in sorted(reasons)]
    return head.reply(shape.whole_kind, choices) | {"usage": usage_json(generation.usage)}


class EventWriter:
    """The events of one stream, in OpenAI's order: opening, text and finish of each choice, usage, `[DONE]`."""

    def __init__(self, generation: Generation, shape: ReplyShape, head: ReplyHead, request_id: str) -> None:
        self._generation = generation
        self._shape = shape
        self._head = head
        self._request_id = request_id
        self._opened: set[int] = set()

    async def frames(self, first: tuple[TextPiece, ...], rest: Pieces) -> AsyncGenerator[bytes, None]:
        """The whole stream; an error ends it with an error event, and then `[DONE]` as always."""
        try:
            async with aclosing(rest):
                yield self._frame(first)
                async for arrived in rest:
                    yield self._frame(arrived)
            if self._head.shows_usage:
                usage = usage_json(self._generation.usage)
                yield event(self._head.reply(self._shape.chunk_kind, []) | {"usage": usage})
        except Exception as error:  # the status has been sent: all that is left is to say so and to end
            problem = problem_of(error, self._request_id)
            if problem.status == 500:
                logger.exception("request %s failed after its stream had begun", self._request_id)
            else:
                logger.warning("request %s failed after its stream had begun: %s", self._request_id, error)
            yield event(problem.envelope())
        yield DONE

    def _frame(self, pieces: tuple[TextPiece, ...]) -> bytes:
        if not pieces:
            return KEEP_ALIVE
        return b"".join(map(self._chunk, self._choices(pieces)))

    def _choices(self, pieces: tuple[TextPiece, ...]) -> list[Json]:
        choices = []
        for piece in pieces:
            if piece.choice not in self._opened:
                self._opened.add(piece.choice)
                if opening := self._shape.opening(piece.choice):
                    choices.append(opening)
            if piece.text:
                choices.append(self._shape.text(piece.choice, piece.text))
            if piece.finish is not None:
                choices.append(self._shape.finish(piece.choice, piece.finish))
        return choices

    def _chunk(self, choice: Json) -> bytes:
        reply = self._head.reply(self._shape.chunk_kind, [choice])
        return event(reply | {"usage": None} if self._head.shows_usage else reply)
