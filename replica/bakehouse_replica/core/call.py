"""What the choices of one request share."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bakehouse_replica.core.account import Bill
from bakehouse_replica.core.story import StoryLog
from bakehouse_replica.core.types import Request, TokenLogprob

if TYPE_CHECKING:  # each holds the other
    from bakehouse_replica.core.sequence import Sequence


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """What the choices of one request share. `cached_tokens` is None until the first admission.

    `arrived_at`, `admitted_at` (for the first time) and `first_token_at` (drawn here) are moments of the driver's.
    `n_to_score`: how many prompt tokens get a log-probability; `n_asked` of them were asked for in a step, and
    `n_scored` have come. `scores` are those collected and not delivered.
    """

    request: Request
    arrival: int
    arrived_at: float
    deadline: float | None
    n_output_limit: int
    root_hash: bytes
    stop_ids: frozenset[int]
    shows_prompt: bool  # to the sampler
    shows_output: bool
    n_to_score: int
    n_asked: int = 0
    n_scored: int = 0
    scores: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: int | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    sequences: list["Sequence"] = field(default_factory=list)
    bill: Bill = field(default_factory=Bill)
    story: StoryLog = field(default_factory=StoryLog)

    @classmethod
    def of(cls, request: Request, *, arrival: int, now: float, n_output_limit: int, root_hash: bytes) -> "Call":
        """The call that `request` begins at time `now`."""
        params = request.params
        return cls(
            request=request,
            arrival=arrival,
            arrived_at=now,
            deadline=None if request.timeout_s is None else now + request.timeout_s,
            n_output_limit=n_output_limit,
            root_hash=root_hash,
            stop_ids=frozenset(params.stop_token_ids),
            shows_prompt=params.has_penalties,
            shows_output=params.needs_output,
            n_to_score=0 if params.prompt_logprobs is None else len(request.prompt_ids) - 1,
        )

    @property
    def queue_s(self) -> float | None:
        """How long it waited for its first admission, None before that."""
        return None if self.admitted_at is None else self.admitted_at - self.arrived_at

    @property
    def owes_scores(self) -> bool:
        """Whether log-probabilities of the prompt have still to come."""
        return self.n_scored < self.n_to_score

    @property
    def has_scores_to_ask(self) -> bool:
        """Whether log-probabilities of the prompt are still to be planned."""
        return self.n_asked < self.n_to_score

    def collect(self, scores: Iterable[TokenLogprob]) -> None:
        """Takes the next log-probabilities of the prompt."""
        self.scores += scores
        self.n_scored = len(self.scores)

    def take_scores(self) -> tuple[TokenLogprob, ...]:
        """All of them, once they are complete and once only."""
        if self.owes_scores or not self.scores:
            return ()
        scores, self.scores = tuple(self.scores), []
        return scores
