"""Turns the text pieces of an answer into the events of a response; pure.

    created ─► in_progress ─► (output_item.added ─► deltas ─► output_item.done)… ─► completed | incomplete
                        └──────────────── at any time ────────────────► error ─► failed

The response in the last event is what a client gets that does not stream, so the two cannot differ. Every answer
has an item: one without any text or call is a message of no text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

from bakehouse_replica.core.types import FinishReason

from bakehouse_router.api.errors import Problem
from bakehouse_router.api.parsed_answer import parsed_deltas
from bakehouse_router.api.responses.output import ItemStatus, OpenCall, OpenMessage
from bakehouse_router.api.responses.reply import ResponseHead
from bakehouse_router.api.token_json import Json, TokenReport, chat_logprobs
from bakehouse_router.generation import CallUsage
from bakehouse_router.prompt_run import TextPiece
from bakehouse_router.text.stream import OutputToken
from bakehouse_router.text.tools.parser import CallDelta, ContentDelta, ParsedDelta, ToolCallParser


class ResponseWriter:
    """The events of one response.

    Tokens are told with their text, or with the next where it was held back; those up to the end of a call's
    arguments have no place in this API.
    """

    def __init__(self, head: ResponseHead, report: TokenReport, parser: ToolCallParser | None) -> None:
        self._head = head
        self._report = report
        self._parser = parser
        self._n_events = 0
        self._n_chars = 0
        self._done: list[Json] = []
        self._open: OpenMessage | OpenCall | None = None
        self._untold: list[OutputToken] = []
        self._finish: FinishReason | None = None

    def begin(self) -> list[Json]:
        """The events before any output."""
        response = self._head.response("in_progress", [])
        kinds = ("response.created", "response.in_progress")
        return self._numbered([{"type": kind, "response": response} for kind in kinds])

    def write(self, piece: TextPiece) -> list[Json]:
        """The events of one piece."""
        events: list[Json] = []
        for part in self._by_token(piece):
            self._untold += part.tokens
            for parsed in parsed_deltas(self._parser, part):
                events += self._take(parsed)
        if piece.finish is not None:
            self._finish = piece.finish
            events += self._end_output()
        return self._numbered(events)

    def end(self, usage: CallUsage, completed_at: int) -> Json:
        """The last event, after the last piece."""
        assert self._finish is not None, "a response ends after its last piece"
        if self._finish is FinishReason.LENGTH:
            response = self._head.response("incomplete", self._done, usage=usage)
        else:
            response = self._head.response("completed", self._done, usage=usage, completed_at=completed_at)
        (event,) = self._numbered([{"type": f"response.{response['status']}", "response": response}])
        return event

    def fail(self, problem: Problem) -> list[Json]:
        """The last events, instead of any others, once the answer has failed."""
        output = self._done if self._open is None else [*self._done, self._open.item("incomplete")]
        error: Json = {"type": "error", "code": problem.code, "message": problem.message, "param": problem.param}
        response = self._head.response("failed", output, problem=problem)
        return self._numbered([error, {"type": "response.failed", "response": response}])

    def _numbered(self, events: Sequence[Json]) -> list[Json]:
        first = self._n_events
        self._n_events += len(events)
        return [{**event, "sequence_number": first + index} for index, event in enumerate(events)]

    def _by_token(self, piece: TextPiece) -> Iterator[TextPiece]:
        """The piece cut at its tokens, so that which of them are told with a text does not depend on how they
        arrived.
        """
        if self._parser is None or not piece.tokens:
            yield piece
            return
        begin = self._n_chars
        self._n_chars += len(piece.text)
        starts = [max(token.text_offset - begin, 0) for token in piece.tokens]
        for index, token in enumerate(piece.tokens):
            is_last = index == len(starts) - 1
            start = 0 if index == 0 else starts[index]
            text = piece.text[start:] if is_last else piece.text[start : starts[index + 1]]
            yield replace(piece, text=text, tokens=(token,), finish=piece.finish if is_last else None)

    def _take(self, parsed: ParsedDelta) -> list[Json]:
        if isinstance(parsed, ContentDelta):
            events = [] if isinstance(self._open, OpenMessage) else self._open_message()
            return [*events, self._say(parsed.text)]
        self._untold.clear()
        events = [] if parsed.name is None else self._open_call(parsed, parsed.name)
        assert isinstance(self._open, OpenCall), "a call's name comes before its arguments"
        return [*events, self._open.add(parsed.arguments)] if parsed.arguments else events

    def _say(self, text: str) -> Json:
        tokens, self._untold = self._untold, []
        logprobs = chat_logprobs(self._report, tokens)
        assert isinstance(self._open, OpenMessage), "text belongs to a message"
        return self._open.add(text, [] if logprobs is None else cast("list[object]", logprobs["content"]))

    def _open_message(self) -> list[Json]:
        closed = self._close("completed")
        self._open = OpenMessage(item_id=self._item_id("msg"), index=len(self._done))
        return [*closed, *self._open.opening()]

    def _open_call(self, call: CallDelta, name: str) -> list[Json]:
        closed = self._close("completed")
        assert call.call_id is not None, "a call's id comes with its name"
        self._open = OpenCall(item_id=self._item_id("fc"), index=len(self._done), call_id=call.call_id, name=name)
        return [*closed, *self._open.opening()]

    def _end_output(self) -> list[Json]:
        """Closes what is open; tokens without a text of their own, as the last one, are told with no text."""
        events: list[Json] = []
        if self._open is None:
            events += self._open_message()
        if isinstance(self._open, OpenMessage) and self._untold and self._report.n_top is not None:
            events.append(self._say(""))
        return events + self._close("incomplete" if self._finish is FinishReason.LENGTH else "completed")

    def _close(self, status: ItemStatus) -> list[Json]:
        closing, self._open = self._open, None
        if closing is None:
            return []
        self._done.append(closing.item(status))
        return closing.closing(status)

    def _item_id(self, prefix: str) -> str:
        """Of the response's id, which is unique, and the item's place."""
        return f"{prefix}_{self._head.response_id.removeprefix('resp_')}{len(self._done):04x}"
