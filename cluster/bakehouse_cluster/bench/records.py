"""What the load generator remembers of each request."""

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    # Whole, but of another length than asked.
    SHORT = "short"
    # Refused, or ended by an error inside the stream.
    ERROR = "error"
    # Turned away: 429, 503, or the same said inside the stream.
    SHED = "shed"
    # No end in time, or a stream that broke off.
    ABORTED = "aborted"


# The requests whose tokens and latencies count.
ANSWERED = (Outcome.OK, Outcome.SHORT)
# The requests that did not go as asked.
WRONG = (Outcome.SHORT, Outcome.ERROR, Outcome.SHED, Outcome.ABORTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request. Times are seconds of one monotonic clock.

    `due_s`: when it was to be sent, from which its latencies count, so that a generator that lags hides nothing.
    `sent_s`: when it was. `frame_s`: arrival of each frame that held text. `frame_tokens`: tokens of each of
    these; where the server does not tell, the same share for all. `n_input`, `n_output`: as the server counted
    them, or for the output the number of frames where it does not; None: not told. `n_input_planned`: by our own
    count, where there is one. `problem`: what went wrong, one line.
    """

    outcome: Outcome
    due_s: float
    sent_s: float
    ended_s: float
    frame_s: tuple[float, ...]
    frame_tokens: tuple[float, ...]
    n_input: int | None
    n_output: int
    n_input_planned: int | None = None
    n_cached: int | None = None
    problem: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Until the first text."""
        return self.frame_s[0] - self.due_s if self.frame_s else None

    @property
    def latency_s(self) -> float:
        """From end to end."""
        return self.ended_s - self.due_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between each frame and the one before."""
        return tuple(b - a for a, b in pairwise(self.frame_s))
