"""Finds where a JSON value ends in a text that arrives in pieces.

Only what decides that is looked at: strings, escapes and brackets. Whether the value is valid beyond that is its
reader's business: a model's arguments are handed on as it wrote them. Time is linear in the text, memory constant.
"""

import json
import re

SPACE = " \t\r\n"

_IN_STRING = re.compile(r'["\\]')
_IN_CONTAINER = re.compile(r'["{}\[\]]')
_AFTER_SCALAR = re.compile(rf"[,}}\]{SPACE}]")

_ESCAPES = re.compile(r'(?:[^\\]++|\\["\\/bfnrt]|\\u[0-9A-Fa-f]{4})*+')
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9A-Fa-f]{0,3})?")


class ValueScanner:
    """Scans one value, from its first character on."""

    def __init__(self) -> None:
        self.is_complete = False
        self._is_started = False
        self._is_scalar = False
        self._is_in_string = False
        self._is_escaped = False
        self._depth = 0

    def scan(self, text: str, pos: int) -> int:
        """Where the part of `text` that belongs to the value ends, if it begins at `pos`.

        The end of a number, `true`, `false` or `null` is known only by what follows it.
        """
        while pos < len(text) and not self.is_complete:
            pos = self._step(text, pos)
        return pos

    def _step(self, text: str, pos: int) -> int:
        if self._is_in_string:
            return self._step_in_string(text, pos)
        if not self._is_started:
            self._is_started = True
            self._is_scalar = text[pos] not in '"{['
        if self._is_scalar:
            found = _AFTER_SCALAR.search(text, pos)
            self.is_complete = found is not None
            return len(text) if found is None else found.start()
        found = _IN_CONTAINER.search(text, pos)
        if found is None:
            return len(text)
        if found[0] == '"':
            self._is_in_string = True
        else:
            self._depth += 1 if found[0] in "{[" else -1
            self.is_complete = self._depth == 0
        return found.end()

    def _step_in_string(self, text: str, pos: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return pos + 1
        found = _IN_STRING.search(text, pos)
        if found is None:
            return len(text)
        if found[0] == "\\":
            self._is_escaped = True
        else:
            self._is_in_string = False
            self.is_complete = self._depth == 0
        return found.end()


def unescape(body: str) -> str:
    """The text that a JSON string's `body`, without its quotes, stands for; it may be cut off within an escape.

    A lone half of a surrogate pair becomes a replacement character; a body with escapes that JSON does not have is
    returned as it is.
    """
    whole = _ESCAPES.match(body)
    assert whole is not None, "the pattern matches the empty text"
    if whole.end() < len(body) and not _CUT_ESCAPE.fullmatch(body, whole.end()):
        return body
    text: str = json.loads(f'"{whole[0]}"', strict=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
