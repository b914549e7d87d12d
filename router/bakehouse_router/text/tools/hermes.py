"""Calls as Hermes and Qwen models write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

A closing marker that is missing, or cut off by the end of the answer, is nobody's content.
"""

from bakehouse_router.text.tools.machine import CallMachine
from bakehouse_router.text.tools.parser import ParsedDelta
from bakehouse_router.text.tools.tool_format import ToolFormat, literal, repeated

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(CallMachine):
    """Reads Hermes-style calls."""

    def finish(self) -> list[ParsedDelta]:
        """What was held back, as content."""
        if self._state == self._read_close:
            self._tail = ""
        return super().finish()

    def _read_content(self, text: str, pos: int) -> int | None:
        return self._read_until_marker(text, pos, OPEN, self._read_begin)

    def _follow_call(self) -> None:
        self._state = self._read_close

    def _read_close(self, text: str, pos: int) -> int | None:
        if (end := self._skip_space(text, pos)) > pos:
            return end
        if text.startswith(CLOSE, pos):
            self._gap.clear()
            self._state = self._read_content
            return pos + len(CLOSE)
        if CLOSE.startswith(text[pos:]):
            return None
        self._state = self._read_content
        return pos


class HermesFormat(ToolFormat):
    """The format of Hermes and Qwen models; calls stand on lines of their own."""

    visible_markers = (OPEN, CLOSE)
    _parser = HermesParser

    def _start(self, is_parallel: bool) -> str:
        line = literal("\n")
        return repeated(
            f"({self._marker(OPEN)} {line} call {line} {self._marker(CLOSE)})", "\n", is_parallel=is_parallel
        )
