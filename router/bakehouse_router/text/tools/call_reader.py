"""Reads one tool call that is written as a JSON object: `{"name": …, "arguments": {…}}`.

Keys may come in any order and unknown ones are skipped; `parameters` is another name for `arguments`. The
arguments are released as they come, as soon as the name is known.
"""

from collections.abc import Callable

from bakehouse_router.text.tools.json_scanner import SPACE, ValueScanner, unescape

_ARGUMENT_KEYS = ("arguments", "parameters")
_NO_ARGUMENTS = "{}"


class CallReader:
    """Reads one call of one of the tools `names`.

    `needs_arguments`: an object without any is not a call; else it is one with none. `is_failed`: it is not a
    call, or, where it `is_announced`, its end is broken.
    """

    def __init__(self, names: frozenset[str], *, needs_arguments: bool) -> None:
        self.name: str | None = None
        self.is_done = False
        self.is_failed = False
        self._names = names
        self._needs_arguments = needs_arguments
        self._state: Callable[[str, int], int] = self._read_open
        self._scanner = ValueScanner()
        self._held: list[str] = []
        self._key = ""
        self._arguments: list[str] = []
        self._has_arguments = False

    @property
    def is_announced(self) -> bool:
        """Whether this is a call by all that is known."""
        return self.name is not None and (self._has_arguments or not self._needs_arguments)

    def read(self, text: str, pos: int) -> int:
        """Where the part of `text` from `pos` on that belongs to the call ends."""
        while pos < len(text) and not (self.is_done or self.is_failed):
            pos = self._state(text, pos)
        return pos

    def take_arguments(self) -> str:
        """The arguments' text that has become known since the last time."""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def finish(self) -> None:
        """The text ends here: arguments that are written as a JSON string are released as far as they go."""
        if self._state == self._read_quoted_arguments:
            self._arguments.append(unescape("".join(self._held)[1:]))

    def _fail(self, pos: int) -> int:
        self.is_failed = True
        return pos

    def _expect(self, text: str, pos: int, states: dict[str, Callable[[str, int], int]]) -> int:
        """Skip space, then go where the next character leads."""
        if text[pos] in SPACE:
            return pos + 1
        if text[pos] not in states:
            return self._fail(pos)
        self._state = states[text[pos]]
        return pos + 1

    def _read_open(self, text: str, pos: int) -> int:
        return self._expect(text, pos, {"{": self._read_key_or_end})

    def _read_key_or_end(self, text: str, pos: int) -> int:
        if text[pos] == "}":
            return self._end(pos)
        if text[pos] != '"':
            return self._expect(text, pos, {})
        self._hold(self._read_key)
        return pos

    def _read_key(self, text: str, pos: int) -> int:
        pos, key = self._read_held(text, pos)
        if key is not None:
            self._key = unescape(key[1:-1])
            self._state = self._read_colon
        return pos

    def _read_colon(self, text: str, pos: int) -> int:
        return self._expect(text, pos, {":": self._read_value})

    def _read_value(self, text: str, pos: int) -> int:
        first = text[pos]
        if first in SPACE:
            return pos + 1
        if first in ",:}]":
            return self._fail(pos)
        if self._key == "name" and self.name is None:
            self._hold(self._read_name)
        elif self._key in _ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            quoted = {'"': self._read_quoted_arguments, "n": self._read_null_arguments}
            self._hold(quoted.get(first, self._read_arguments))
        else:
            self._hold(self._skip_value)
        return pos

    def _read_name(self, text: str, pos: int) -> int:
        pos, name = self._read_held(text, pos)
        if name is None:
            return pos
        self._state = self._read_next
        called = unescape(name[1:-1]) if name.startswith('"') else None
        if called not in self._names:
            return self._fail(pos)
        self.name = called
        return pos

    def _read_arguments(self, text: str, pos: int) -> int:
        end = self._skip_value(text, pos)
        self._arguments.append(text[pos:end])
        return end

    def _read_quoted_arguments(self, text: str, pos: int) -> int:
        pos, quoted = self._read_held(text, pos)
        if quoted is not None:
            self._arguments.append(unescape(quoted[1:-1]))
            self._state = self._read_next
        return pos

    def _read_null_arguments(self, text: str, pos: int) -> int:
        pos, value = self._read_held(text, pos)
        if value is not None:
            self._arguments.append(_NO_ARGUMENTS if value == "null" else value)
            self._state = self._read_next
        return pos

    def _skip_value(self, text: str, pos: int) -> int:
        end = self._scanner.scan(text, pos)
        if self._scanner.is_complete:
            self._state = self._read_next
        return end

    def _read_next(self, text: str, pos: int) -> int:
        if text[pos] == "}":
            return self._end(pos)
        return self._expect(text, pos, {",": self._read_key_or_end})

    def _end(self, pos: int) -> int:
        if self.name is None or (self._needs_arguments and not self._has_arguments):
            return self._fail(pos)
        if not self._has_arguments:
            self._arguments.append(_NO_ARGUMENTS)
        self.is_done = True
        return pos + 1

    def _hold(self, state: Callable[[str, int], int]) -> None:
        self._scanner = ValueScanner()
        self._held = []
        self._state = state

    def _read_held(self, text: str, pos: int) -> tuple[int, str | None]:
        """Where the value's part of `text` ends, and the whole value once it is complete."""
        end = self._scanner.scan(text, pos)
        self._held.append(text[pos:end])
        return end, "".join(self._held) if self._scanner.is_complete else None
