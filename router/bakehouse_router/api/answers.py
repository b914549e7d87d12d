"""Turns a generation into an answer: one JSON reply, or a stream of events."""

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from bakehouse_router.api.errors import Problem, problem_of
from bakehouse_router.api.replies import ChoiceChunk, ChoiceMerger, ChoiceWriter, ReplyHead, ReplyShape, usage_json
from bakehouse_router.api.sse import DONE, KEEP_ALIVE, event, to_json
from bakehouse_router.api.token_json import Json
from bakehouse_router.generation import Generation
from bakehouse_router.prompt_run import TextPiece

logger = logging.getLogger(__name__)

Pieces = AsyncGenerator[tuple[TextPiece, ...], None]


class ChunkMaker:
    """Turns the pieces of a generation into the chunks of its reply, each choice by a writer of its own."""

    def __init__(self, generation: Generation, shape: ReplyShape) -> None:
        self._generation = generation
        self._shape = shape
        self._writers: dict[int, ChoiceWriter] = {}

    def chunks(self, pieces: Sequence[TextPiece]) -> list[tuple[int, ChoiceChunk]]:
        """The chunks that these pieces make, with their choices."""
        made = []
        for piece in pieces:
            made += [(piece.choice, chunk) for chunk in self._writer(piece.choice).write(piece)]
        return made

    def _writer(self, choice: int) -> ChoiceWriter:
        if choice not in self._writers:
            self._writers[choice] = self._shape.writer(choice, self._generation.prompt_of(choice))
        return self._writers[choice]


async def whole_reply(generation: Generation, shape: ReplyShape, head: ReplyHead) -> Json:
    """The reply once every choice has ended: its chunks, merged."""
    maker = ChunkMaker(generation, shape)
    mergers: dict[int, ChoiceMerger] = {}
    async with aclosing(generation.pieces()) as pieces:
        async for arrived in pieces:
            for choice, chunk in maker.chunks(arrived):
                if choice not in mergers:
                    mergers[choice] = shape.merger()
                mergers[choice].add(chunk)
    whole = [mergers[choice].whole() for choice in sorted(mergers)]
    reply = head.reply(shape.whole_kind, [chunk.choice for chunk in whole])
    for chunk in whole:
        reply |= chunk.beside
    return reply | {"usage": usage_json(generation.usage)}


def late_problem(error: Exception, request_id: str) -> Problem:
    """How an error is told that came after the status had been sent; the log is told too."""
    problem = problem_of(error, request_id)
    if problem.status == 500:
        logger.error("request %s failed after its stream had begun", request_id, exc_info=error)
    else:
        logger.warning("request %s failed after its stream had begun: %s", request_id, error)
    return problem


class EventWriter:
    """The events of one stream, in OpenAI's order: opening, text and finish of each choice, usage, `[DONE]`.

    What all its events begin and most of them end with is written as JSON once: of a token's cost that is half.
    """

    def __init__(self, generation: Generation, shape: ReplyShape, head: ReplyHead, request_id: str) -> None:
        self._generation = generation
        self._shape = shape
        self._maker = ChunkMaker(generation, shape)
        self._head = head
        self._request_id = request_id
        self._opening = f"data: {to_json(head.reply(shape.chunk_kind, [])).removesuffix(']}')}"
        self._closing = "]}\n\n" if not head.shows_usage else '],"usage":null}\n\n'

    async def frames(self, first: tuple[TextPiece, ...], rest: Pieces) -> AsyncGenerator[bytes, None]:
        """The whole stream; an error ends it with an error event, and then `[DONE]` as always."""
        try:
            async with aclosing(rest):
                yield self._frame(first)
                async for arrived in rest:
                    if frame := self._frame(arrived):
                        yield frame
            if self._head.shows_usage:
                usage = usage_json(self._generation.usage)
                yield event(self._head.reply(self._shape.chunk_kind, []) | {"usage": usage})
        except Exception as error:  # the status has been sent: all that is left is to say so and to end
            yield event(late_problem(error, self._request_id).envelope())
        yield DONE

    def _frame(self, pieces: tuple[TextPiece, ...]) -> bytes:
        if not pieces:
            return KEEP_ALIVE
        return "".join([self._event(chunk) for _, chunk in self._maker.chunks(pieces)]).encode()

    def _event(self, chunk: ChoiceChunk) -> str:
        return f"{self._opening}{to_json(chunk.choice)}{self._closing_of(chunk.beside)}"

    def _closing_of(self, beside: Json) -> str:
        if self._head.counts_along:
            beside = {**beside, "usage": usage_json(self._generation.usage)}
        elif beside and self._head.shows_usage:
            beside = {**beside, "usage": None}
        return f"],{to_json(beside)[1:]}\n\n" if beside else self._closing
