"""Reads one streamed reply: when its text came, what the server counted, how it ended.

Every frame is checked as far as it is used here: a server that sends nonsense has not answered, and is told so.
"""

from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise

from bakehouse_cluster.bench.foreign import parsed, printable
from bakehouse_cluster.bench.records import Outcome
from bakehouse_cluster.bench.sse import SseReader

DONE = b"[DONE]"
SHED_STATUSES = (429, 503)
HTTP_OK = 200
_SHED_CODES = (*SHED_STATUSES, "429", "503", "overloaded", "unavailable")
_N_ERROR_BYTES = 4096
_N_PROBLEM_CHARS = 300
_N_FRAME_BYTES = 80
_NOT_AN_ANSWER = "the server's reply is not OpenAI's"
# No context and no answer is as long; sums of such counts are exact as floats, too.
MAX_COUNT = 10**9


class _Misformed(Exception):
    """A frame that is not as OpenAI has them; says what is wrong with it."""


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
        if self.status == HTTP_OK:
            self._read_all(self._events.feed(piece), self._clock())
        else:
            self._error_body = (self._error_body + piece)[:_N_ERROR_BYTES]

    def end(self) -> None:
        """The body is whole."""
        self._read_all(self._events.finish(), self._clock())
        if self.status != HTTP_OK:
            self.is_shed = self.status in SHED_STATUSES
            assert self.status is not None, "there is no reply without a status"
            self._fail(refusal(self.status, self._error_body))

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
            self._fail("the stream ended without a finish_reason and without [DONE]")
            return Outcome.ABORTED
        is_counted = self.n_usage is not None
        if not (self.frame_s or is_counted or (self.has_finished and n_asked is None)):
            self._fail(f"{_NOT_AN_ANSWER}: the stream ended without any text or token count")
            return Outcome.ERROR
        if n_asked is not None and self.n_usage is not None and self.n_usage != n_asked:
            self.problem = f"answered with {self.n_usage} tokens where {n_asked} were asked for"
            return Outcome.SHORT
        return Outcome.OK

    def _fail(self, problem: str) -> None:
        """The first problem is the one that is told."""
        if self.problem is None:
            self.problem = _one_line(problem)

    def _read_all(self, payloads: Sequence[bytes], now: float) -> None:
        for payload in payloads:
            try:
                self._read(payload, now)
            except _Misformed as error:
                start = payload[:_N_FRAME_BYTES].decode(errors="replace")
                self._fail(f"{_NOT_AN_ANSWER}: {error} in {start}{'…' * (len(payload) > _N_FRAME_BYTES)}")

    def _read(self, payload: bytes, now: float) -> None:
        if payload == DONE:
            self.is_done = True
            return
        try:
            event = parsed(payload)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise _Misformed("no JSON object")
        if error := event.get("error"):
            self.is_shed = isinstance(error, dict) and error.get("code") in _SHED_CODES
            self._fail(f"error in the stream: {_said_in(payload)}")
            return
        n_before = len(self.frame_s)
        for choice in _list_in(event, "choices"):
            if not isinstance(choice, dict):
                raise _Misformed("a choice that is no object")
            if _has_text(choice):
                self.frame_s.append(now)
            if choice.get("finish_reason"):
                self.has_finished = True
        if (usage := _object_in(event, "usage")) is not None:
            self._read_usage(usage, has_text=len(self.frame_s) > n_before)

    def _read_usage(self, usage: dict[str, object], *, has_text: bool) -> None:
        n_output, n_input = _count_in(usage, "completion_tokens"), _count_in(usage, "prompt_tokens")
        if n_output is not None:
            if n_output < (self.n_usage or 0):
                raise _Misformed(f"completion_tokens that fall from {self.n_usage} to {n_output}")
            self.n_usage = n_output
            if has_text:
                self._counts.append((len(self.frame_s) - 1, n_output))
        if n_input is not None:
            self.n_input = n_input
        details = _object_in(usage, "prompt_tokens_details")
        if details is not None and (n_cached := _count_in(details, "cached_tokens")) is not None:
            self.n_cached = n_cached


def refusal(status: int, body: bytes) -> str:
    """One line: the status, and what the server says about it."""
    return _one_line(f"HTTP {status}: {_said_in(body)}")


def _has_text(choice: dict[str, object]) -> bool:
    """Any text of a completion's or a chat's choice, reasoning and tool calls too."""
    delta = _object_in(choice, "delta")
    if delta is None:
        return bool(_text_in(choice, "text"))
    texts = (_text_in(delta, "content"), _text_in(delta, "reasoning_content"))
    return any(texts) or bool(_list_in(delta, "tool_calls"))


def _object_in(tree: dict[str, object], key: str) -> dict[str, object] | None:
    value = tree.get(key)
    if value is None or isinstance(value, dict):
        return value
    raise _Misformed(f"{key} that is no object")


def _list_in(tree: dict[str, object], key: str) -> list[object]:
    value = tree.get(key)
    if value is None:
        return []
    if isinstance(value, list):
        return value
    raise _Misformed(f"{key} that is no list")


def _text_in(tree: dict[str, object], key: str) -> str | None:
    value = tree.get(key)
    if value is None or isinstance(value, str):
        return value
    raise _Misformed(f"{key} that is no text")


def _count_in(tree: dict[str, object], key: str) -> int | None:
    value = tree.get(key)
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT:
        return value
    raise _Misformed(f"{key} that is no count")


def _said_in(body: bytes) -> str:
    """The message in an error's envelope, else the body as it is."""
    try:
        tree = parsed(body)
    except ValueError:
        tree = None
    error = tree.get("error", tree) if isinstance(tree, dict) else tree
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else body.decode(errors="replace")


def _one_line(text: str) -> str:
    line = printable(text)
    return line if len(line) <= _N_PROBLEM_CHARS else line[: _N_PROBLEM_CHARS - 1] + "…"
