"""Reads one streamed reply: when its text came, what the server counted, how it ended.

Between its first text and its end a frame only leaves its arrival time: whether it must be parsed is seen by
looking for a few bytes, which costs 1.0 µs where JSON costs 2.9 (202 bytes; `cluster/benchmarks/generator.py`).
"""

import json
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise

from bakehouse_cluster.bench.records import Outcome
from bakehouse_cluster.bench.sse import SseReader

DONE = b"[DONE]"
SHED_STATUSES = (429, 503)
HTTP_OK = 200
_SHED_CODES = (*SHED_STATUSES, "429", "503", "overloaded", "unavailable")
_N_ERROR_BYTES = 4096
_N_PROBLEM_CHARS = 300


def is_plain(payload: bytes) -> bool:
    """Whether a frame after the first text holds nothing but more text. JSON may have a space after the colon."""
    return not (
        b'"finish_reason":"' in payload
        or b'"finish_reason": "' in payload
        or b'"usage":{' in payload
        or b'"usage": {' in payload
        or b'"error"' in payload
    )


def _text_of(choice: dict[str, object]) -> object:
    """Any text of a completion's or a chat's choice, reasoning and tool calls too."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls")
    return choice.get("text")


def tokens_of_frames(n_frames: int, n_output: int | None, counts: Sequence[tuple[int, int]]) -> tuple[float, ...]:
    """How many tokens each of `n_frames` frames held.

    `counts`: (index of a frame, tokens up to and with it), where the server told. Told for all frames they are
    exact; else each frame is given the same share of `n_output`, or one token where that is not known either.
    """
    if n_frames and [index for index, _ in counts] == list(range(n_frames)):
        totals = [0, *(total for _, total in counts)]
        return tuple(float(b - a) for a, b in pairwise(totals))
    share = n_output / n_frames if n_output and n_frames else 1.0
    return (share,) * n_frames


class ReplyReader:
    """The reply to one request. `clock`: seconds, monotonic."""

    __slots__ = (
        "_clock",
        "_counts",
        "_error_body",
        "_events",
        "frame_s",
        "has_finished",
        "is_done",
        "is_shed",
        "n_cached",
        "n_input",
        "n_usage",
        "problem",
        "status",
    )

    def __init__(self, clock: Callable[[], float]) -> None:
        self.frame_s = array("d")
        self.status: int | None = None
        self.has_finished = False
        self.is_done = False
        self.is_shed = False
        self.n_input: int | None = None
        self.n_cached: int | None = None
        self.n_usage: int | None = None
        self.problem: str | None = None
        self._clock = clock
        self._counts: list[tuple[int, int]] = []
        self._error_body = b""
        self._events = SseReader()

    def begin(self, status: int) -> None:
        """The reply's status has come."""
        self.status = status

    def receive(self, piece: bytes) -> None:
        """A piece of the reply's body has come."""
        now = self._clock()
        if self.status != HTTP_OK:
            self._error_body = (self._error_body + piece)[:_N_ERROR_BYTES]
            return
        for payload in self._events.feed(piece):
            if self.frame_s and is_plain(payload) and payload != DONE:
                self.frame_s.append(now)
            else:
                self._read(payload, now)

    def end(self) -> None:
        """The body is whole."""
        now = self._clock()
        for payload in self._events.finish():
            self._read(payload, now)
        if self.status != HTTP_OK:
            self._refused()

    def frame_tokens(self) -> tuple[float, ...]:
        """Tokens of each frame in `frame_s`."""
        return tokens_of_frames(len(self.frame_s), self.n_usage, self._counts)

    def outcome(self, n_asked: int | None) -> Outcome:
        """After the end; `n_asked`: how long the answer must be, None where any length will do."""
        if self.is_shed:
            return Outcome.SHED
        if self.problem is not None:
            return Outcome.ERROR
        if not (self.is_done or self.has_finished):
            self.problem = "the stream ended without a finish_reason and without [DONE]"
            return Outcome.ABORTED
        if n_asked is not None and self.n_usage is not None and self.n_usage != n_asked:
            self.problem = f"answered with {self.n_usage} tokens where {n_asked} were asked for"
            return Outcome.SHORT
        return Outcome.OK

    def _refused(self) -> None:
        self.is_shed = self.status in SHED_STATUSES
        try:
            error = _error_of(json.loads(self._error_body))
        except ValueError:
            error = self._error_body.decode(errors="replace")
        self.problem = _one_line(f"HTTP {self.status}: {_message_of(error)}")

    def _read(self, payload: bytes, now: float) -> None:
        if payload == DONE:
            self.is_done = True
            return
        try:
            event = json.loads(payload)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            self.problem = _one_line(f"a frame that is no JSON object: {payload[:80]!r}")
            return
        if event.get("error"):
            error = event["error"]
            self.is_shed = isinstance(error, dict) and error.get("code") in _SHED_CODES
            self.problem = _one_line(f"error in the stream: {_message_of(error)}")
            return
        n_before = len(self.frame_s)
        self._read_choices(event, now)
        if usage := event.get("usage"):
            self._read_usage(usage, has_text=len(self.frame_s) > n_before)

    def _read_choices(self, event: dict[str, object], now: float) -> None:
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if _text_of(choice):
                self.frame_s.append(now)
            if choice.get("finish_reason"):
                self.has_finished = True

    def _read_usage(self, usage: dict[str, object], *, has_text: bool) -> None:
        n_output, n_input = usage.get("completion_tokens"), usage.get("prompt_tokens")
        if isinstance(n_output, int):
            self.n_usage = n_output
            if has_text:
                self._counts.append((len(self.frame_s) - 1, n_output))
        if isinstance(n_input, int):
            self.n_input = n_input
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            self.n_cached = details["cached_tokens"]


def _error_of(tree: object) -> object:
    return tree.get("error", tree) if isinstance(tree, dict) else tree


def _message_of(error: object) -> object:
    return error.get("message", error) if isinstance(error, dict) else error


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _N_PROBLEM_CHARS else line[: _N_PROBLEM_CHARS - 1] + "…"
