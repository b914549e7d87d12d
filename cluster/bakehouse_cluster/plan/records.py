"""What became of each simulated request, and the gaps between the tokens of all of them."""

from collections import Counter
from dataclasses import dataclass, field

from bakehouse_cluster.bench.records import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRecord:
    """One request; moments are seconds of the virtual clock. `first_s` None: it got no token.

    `n_cached`: prompt tokens found in the prefix cache. `mean_gap_s`: between the tokens of a choice, on average;
    None where there is no second one.
    """

    request_id: str
    outcome: Outcome
    due_s: float
    first_s: float | None
    ended_s: float
    n_input: int
    n_output: int
    n_cached: int
    mean_gap_s: float | None
    replica_id: str | None
    problem: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Until the first token."""
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def latency_s(self) -> float:
        """From end to end."""
        return self.ended_s - self.due_s


@dataclass(slots=True, kw_only=True)
class Stream:
    """A request while it is served. `token_s`: when the newest token of each choice came, None before that."""

    request_id: str
    due_s: float
    n_input: int
    n_open: int
    token_s: list[float | None]
    n_wanted: int | None
    first_s: float | None = None
    n_output: int = 0
    n_cached: int = 0
    gap_s: float = 0.0
    n_gaps: int = 0
    problem: tuple[Outcome, str] | None = None
    gaps: Counter[float] = field(repr=False)

    def take(self, choice: int, n_tokens: int, now: float) -> None:
        """So many tokens have come; a gap before k tokens counts as k gaps of a k-th of it."""
        before = self.token_s[choice]
        self.token_s[choice] = now
        self.n_output += n_tokens
        if before is None:
            if self.first_s is None:
                self.first_s = now
            return
        gap_s = now - before
        self.gaps[gap_s / n_tokens] += n_tokens
        self.gap_s += gap_s
        self.n_gaps += n_tokens

    def end(self, now: float, replica_id: str | None) -> SimulatedRecord:
        """What became of it."""
        outcome, problem = self.problem or (Outcome.OK, None)
        if self.problem is None and self.n_wanted is not None and self.n_output != self.n_wanted:
            outcome = Outcome.SHORT
        return SimulatedRecord(
            request_id=self.request_id,
            outcome=outcome,
            due_s=self.due_s,
            first_s=self.first_s,
            ended_s=now,
            n_input=self.n_input,
            n_output=self.n_output,
            n_cached=self.n_cached,
            mean_gap_s=self.gap_s / self.n_gaps if self.n_gaps else None,
            replica_id=replica_id,
            problem=problem,
        )
