"""What a tool-call parser makes of one choice's pieces, the same for every face."""

from collections.abc import Iterator

from bakehouse_replica.core.types import FinishReason

from bakehouse_router.prompt_run import TextPiece
from bakehouse_router.text.tools.parser import ContentDelta, ParsedDelta, ToolCallParser


def parsed_deltas(parser: ToolCallParser | None, piece: TextPiece) -> Iterator[ParsedDelta]:
    """The content and calls that a piece makes known; without a parser all of it is content."""
    if parser is None:
        if piece.text:
            yield ContentDelta(text=piece.text)
        return
    if piece.text:
        yield from parser.feed(piece.text)
    if piece.finish is not None:
        yield from parser.finish()


def finish_reason(parser: ToolCallParser | None, reason: FinishReason) -> str:
    """Why a choice ended, calls told apart; a truncated answer says so, whatever it contains."""
    has_calls = parser is not None and parser.n_calls > 0
    return "tool_calls" if has_calls and reason is FinishReason.STOP else str(reason)
