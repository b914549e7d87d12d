"""Calls as Mistral models write them: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`.

Newer ones write `[TOOL_CALLS]name[ARGS]{…}` for each call, some of them with `[CALL_ID]…` before the arguments.
"""

import re
import secrets
import string

from bakehouse_replica.vocabulary import Vocabulary

from bakehouse_router.text.tools.json_scanner import SPACE, ValueScanner
from bakehouse_router.text.tools.machine import CallMachine
from bakehouse_router.text.tools.tool_format import ToolFormat, literal, repeated

MARKER, ARGUMENTS_MARKER, ID_MARKER = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

# Mistral's templates refuse ids of any other length.
_N_ID_CHARS = 9
_ID_ALPHABET = string.ascii_letters + string.digits

_HEAD_CHARS = re.compile(rf"[\w.\-\[\]{SPACE}]+", re.ASCII)
_HEAD = re.compile(
    rf"(?P<name>[\w.\-]+)({re.escape(ID_MARKER)}\w*)?({re.escape(ARGUMENTS_MARKER)})?[{SPACE}]*", re.ASCII
)
_MAX_HEAD_CHARS = 256


class MistralParser(CallMachine):
    """Reads Mistral-style calls."""

    def __init__(self, names: frozenset[str], *, is_parallel: bool = True) -> None:
        super().__init__(names, is_parallel=is_parallel)
        self._is_in_list = False
        self._head = ""
        self._scanner = ValueScanner()

    def _read_content(self, text: str, pos: int) -> int | None:
        return self._read_until_marker(text, pos, MARKER, self._read_after_marker)

    def _read_after_marker(self, text: str, pos: int) -> int | None:
        """After the marker: a list of calls, one call, or the name of one."""
        if (end := self._skip_space(text, pos)) > pos:
            return end
        if text.startswith(MARKER, pos):  # the first marker stood for nothing
            self._reject()
            return pos
        if MARKER.startswith(text[pos:]):
            return None
        if text[pos] == "{":
            return self._begin_object(pos)
        if text[pos] == "[":
            self._is_in_list = True
            self._keep("[")
            self._state = self._read_begin
            return pos + 1
        self._head = ""
        self._state = self._read_head
        return pos

    def _read_next_item(self, text: str, pos: int) -> int | None:
        if (end := self._skip_space(text, pos)) > pos:
            return end
        if text[pos] == ",":
            self._keep(",")
            self._state = self._read_begin
        elif text[pos] == "]":
            self._gap.clear()
            self._is_in_list = False
            self._state = self._read_content
        else:
            self._reject()
            return pos
        return pos + 1

    def _read_head(self, text: str, pos: int) -> int | None:
        """A call's name and markers, up to its arguments."""
        if text[pos] == "{":
            return self._begin_arguments(pos)
        found = _HEAD_CHARS.match(text, pos, pos + _MAX_HEAD_CHARS - len(self._head))
        if found is None:
            self._reject()
            return pos
        self._head += found[0]
        self._keep(found[0])
        return found.end()

    def _begin_arguments(self, pos: int) -> int:
        head = _HEAD.fullmatch(self._head)
        if head is None or head["name"] not in self._names:
            self._reject()
            return pos
        self._announce(head["name"])
        self._scanner = ValueScanner()
        self._state = self._read_arguments
        return pos

    def _read_arguments(self, text: str, pos: int) -> int | None:
        end = self._scanner.scan(text, pos)
        self._add_arguments(text[pos:end])
        if self._scanner.is_complete:
            self._end_call()
        return end

    def _new_call_id(self) -> str:
        return "".join(secrets.choice(_ID_ALPHABET) for _ in range(_N_ID_CHARS))

    def _follow_call(self) -> None:
        self._state = self._read_next_item if self._is_in_list else self._read_content

    def _reject(self) -> None:
        super()._reject()
        self._is_in_list = False


class MistralFormat(ToolFormat):
    """The format of Mistral models: the newer one where the chat template `template` writes `[ARGS]`."""

    visible_markers = (MARKER, ARGUMENTS_MARKER, ID_MARKER)
    _parser = MistralParser

    def __init__(self, vocabulary: Vocabulary, template: str) -> None:
        super().__init__(vocabulary)
        self._writes_lists = ARGUMENTS_MARKER not in template

    def _start(self, is_parallel: bool) -> str:
        if self._writes_lists:
            calls = repeated("call", ", ", is_parallel=is_parallel)
            return f"{self._marker(MARKER)} {literal('[')} {calls} {literal(']')}"
        return "call+" if is_parallel else "call"

    def _call(self, name: str, arguments: str) -> str:
        if self._writes_lists:
            return super()._call(name, arguments)
        return f"{self._marker(MARKER)} {literal(name)} {self._marker(ARGUMENTS_MARKER)} {arguments}"
