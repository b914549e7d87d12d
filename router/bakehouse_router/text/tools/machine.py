"""The part of reading tool calls that all formats share: a machine whose states each consume some text.

What may yet become a call is kept as it was written, from the marker on, until it is known to be one (then it is
announced) or not to be one (then it is content, unchanged). Space around calls is kept apart in the same way: it
is content only if text follows. So no word is lost, however the answer ends.

A state is given the text and a position within it, and returns the position up to which it consumed, or None where
it cannot decide without more text. What it leaves then is shorter than a marker, so each character is looked at a
bounded number of times, however the text is cut.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

from bakehouse_router.text.tools.call_reader import CallReader
from bakehouse_router.text.tools.json_scanner import SPACE
from bakehouse_router.text.tools.parser import CallDelta, ContentDelta, ParsedDelta

State = Callable[[str, int], int | None]


class CallMachine(ABC):
    """A `ToolCallParser`; a format adds its states.

    `names`: the tools; an object that names another is content. `is_parallel` False ends it after one call.
    """

    _needs_arguments = False

    def __init__(self, names: frozenset[str], *, is_parallel: bool = True) -> None:
        self.n_calls = 0
        self.is_complete = False
        self._names = names
        self._is_parallel = is_parallel
        self._state: State = self._read_content
        self._reader: CallReader | None = None
        self._is_announced = False
        self._tail = ""
        self._gap: list[str] = []  # space that may be content
        self._raw: list[str] = []  # what may be a call
        self._has_content = False
        self._deltas: list[ParsedDelta] = []

    def feed(self, text: str) -> list[ParsedDelta]:
        """What these further characters make known."""
        text = self._tail + text
        pos = 0
        while pos < len(text) and not self.is_complete:
            end = self._state(text, pos)
            if end is None:
                break
            pos = end
        self._tail = "" if self.is_complete else text[pos:]
        return self._take_deltas()

    def finish(self) -> list[ParsedDelta]:
        """What was held back, as content; the arguments of a call that the end cuts off stay as they are."""
        if self.is_complete:
            return []
        if self._is_announced and self._reader is not None:
            self._reader.finish()
            self._add_arguments(self._reader.take_arguments())
        self._add_content("".join([*self._raw, self._tail]))
        if self._gap and not self.n_calls:
            self._deltas.append(ContentDelta(text="".join(self._gap)))
        return self._take_deltas()

    @abstractmethod
    def _read_content(self, text: str, pos: int) -> int | None:
        """The state outside calls."""

    def _new_call_id(self) -> str:
        """An id as OpenAI's API gives them."""
        return f"call_{secrets.token_hex(12)}"

    @abstractmethod
    def _follow_call(self) -> None:
        """Choose the state after a call."""

    def _read_object(self, text: str, pos: int) -> int | None:
        reader = self._reader
        assert reader is not None, "a call is being read"
        end = reader.read(text, pos)
        if not self._is_announced:
            self._raw.append(text[pos:end])
            if reader.is_announced and reader.name is not None:
                self._announce(reader.name)
        if self._is_announced:
            self._add_arguments(reader.take_arguments())
            if reader.is_done or reader.is_failed:
                self._end_call()
        elif reader.is_failed:
            self._reject()
        return end

    def _read_until_marker(self, text: str, pos: int, marker: str, follow: State) -> int | None:
        """Content up to `marker`, with which something begins that may be a call."""
        found = text.find(marker, pos)
        if found >= 0:
            self._add_content(text[pos:found])
            self._raw.append(marker)
            self._state = follow
            return found + len(marker)
        end = len(text) - n_begun(text, pos, marker)
        if end == pos:
            return None
        self._add_content(text[pos:end])
        return end

    def _read_begin(self, text: str, pos: int) -> int | None:
        """Space and then an object, or what has begun is no call."""
        if (end := self._skip_space(text, pos)) > pos:
            return end
        if text[pos] == "{":
            return self._begin_object(pos)
        self._reject()
        return pos

    def _begin_object(self, pos: int) -> int:
        self._reader = CallReader(self._names, needs_arguments=self._needs_arguments)
        self._state = self._read_object
        return pos

    def _announce(self, name: str) -> None:
        self._gap.clear()
        self._raw.clear()
        self._is_announced = True
        self._deltas.append(CallDelta(index=self.n_calls, call_id=self._new_call_id(), name=name))
        self.n_calls += 1

    def _end_call(self) -> None:
        self._reader = None
        self._is_announced = False
        self.is_complete = not self._is_parallel
        self._follow_call()

    def _reject(self) -> None:
        """What began with the marker is no call."""
        self._reader = None
        raw = "".join(self._raw)
        self._raw.clear()
        self._add_content(raw)
        self._state = self._read_content

    def _keep(self, text: str) -> None:
        """What stands before or between calls: part of what may be a call, or of the gap after one."""
        (self._raw or self._gap).append(text)

    def _skip_space(self, text: str, pos: int) -> int:
        """Where the space at `pos`, which is kept, ends."""
        end = _space_end(text, pos)
        if end > pos:
            self._keep(text[pos:end])
        return end

    def _add_arguments(self, text: str) -> None:
        if text:
            self._deltas.append(CallDelta(index=self.n_calls - 1, arguments=text))

    def _add_content(self, text: str) -> None:
        body = text.rstrip(SPACE)
        if body:
            shown = "".join([*self._gap, body])
            if self.n_calls and not self._has_content:
                shown = shown.lstrip(SPACE)
            self._deltas.append(ContentDelta(text=shown))
            self._has_content = True
            self._gap.clear()
        if len(body) < len(text):
            self._gap.append(text[len(body) :])

    def _take_deltas(self) -> list[ParsedDelta]:
        """The deltas so far, neighbours of one kind joined."""
        taken: list[ParsedDelta] = []
        for _, group in groupby(self._deltas, key=_call_index):
            deltas = list(group)
            texts = [delta.arguments if isinstance(delta, CallDelta) else delta.text for delta in deltas]
            first = deltas[0]
            if isinstance(first, CallDelta):
                taken.append(replace(first, arguments="".join(texts)))
            else:
                taken.append(ContentDelta(text="".join(texts)))
        self._deltas = []
        return taken


def n_begun(text: str, pos: int, marker: str) -> int:
    """How many characters at the end of `text`, after `pos`, may be the beginning of `marker`."""
    longest = min(len(marker) - 1, len(text) - pos)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


def _space_end(text: str, pos: int) -> int:
    while pos < len(text) and text[pos] in SPACE:
        pos += 1
    return pos


def _call_index(delta: ParsedDelta) -> int | None:
    return delta.index if isinstance(delta, CallDelta) else None
