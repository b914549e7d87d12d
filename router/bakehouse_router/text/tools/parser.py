"""What every tool-call format is read by: a state machine from text pieces to content and calls.

The same machine reads a stream and a whole answer, so both see the same calls, whatever the pieces were.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentDelta:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """News of tool call `index`: `call_id` and `name` come once, first; `arguments` is JSON text to be joined."""

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""


ParsedDelta = ContentDelta | CallDelta


class ToolCallParser(Protocol):
    """Reads one choice's text. However the text is cut, the joined content and arguments are the same."""

    @property
    def n_calls(self) -> int:
        """Calls that have been announced."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the rest of the answer is of no interest: the one call that was allowed is whole."""
        ...

    def feed(self, text: str) -> list[ParsedDelta]:
        """What these further characters make known."""
        ...

    def finish(self) -> list[ParsedDelta]:
        """What was held back, as content, at the end of the answer."""
        ...
