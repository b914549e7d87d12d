"""Calls as Llama 3 models write them: `{"name": …, "parameters": {…}}`, after `<|python_tag|>` or without it.

Without the marker a call is known only by its place and its keys: it begins a line, or follows another call after
`;` or space; it names a tool; and it has parameters. Any other JSON is content, shown as soon as it names no tool
or ends.
"""

import re

from bakehouse_router.text.tools.machine import CallMachine, n_begun
from bakehouse_router.text.tools.tool_format import ToolFormat, repeated

TAG = "<|python_tag|>"
_SEPARATOR = ";"
_LINE_END_OR_TAG = re.compile(rf"\n|{re.escape(TAG)}")


class Llama3Parser(CallMachine):
    """Reads Llama-3-style calls."""

    _needs_arguments = True

    def __init__(self, names: frozenset[str], *, is_parallel: bool = True) -> None:
        super().__init__(names, is_parallel=is_parallel)
        self._may_separate = False

    def _read_content(self, text: str, pos: int) -> int | None:
        """At the beginning of a line."""
        if (end := self._skip_space(text, pos)) > pos:
            return end
        if text[pos] == _SEPARATOR and self._may_separate:
            self._may_separate = False
            self._keep(_SEPARATOR)
            return pos + 1
        self._may_separate = False
        if text[pos] == "{":
            return self._begin_object(pos)
        self._state = self._read_line
        return pos

    def _read_line(self, text: str, pos: int) -> int | None:
        found = _LINE_END_OR_TAG.search(text, pos)
        end = len(text) - n_begun(text, pos, TAG) if found is None else found.start()
        self._add_content(text[pos:end])
        if found is None:
            return None if end == pos else end
        if found[0] == TAG:
            self._raw.append(TAG)
            self._state = self._read_begin
        else:
            self._keep("\n")
            self._state = self._read_content
        return found.end()

    def _follow_call(self) -> None:
        self._may_separate = True
        self._state = self._read_content

    def _reject(self) -> None:
        super()._reject()
        self._state = self._read_line


class Llama3Format(ToolFormat):
    """The format of Llama 3 models; a forced answer may begin with the marker or not."""

    visible_markers = (TAG,)
    _parser = Llama3Parser
    _arguments_key = "parameters"

    def _start(self, is_parallel: bool) -> str:
        return f"{self._marker(TAG)}? {repeated('call', f'{_SEPARATOR} ', is_parallel=is_parallel)}"
