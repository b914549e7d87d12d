"""How requests were routed, kept for a while by their ids: each choice of the policy, and who has accepted.

Written on the loop that routes, read on the loop that answers: an entry is frozen and replaced whole.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace

from bakehouse_router.policy.pick import Choice

# The router's own requests in flight are far fewer; each entry has at most 8 kB.
MAX_ROUTINGS = 1024
MAX_CANDIDATES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The latest choice for one request; moments are `time.monotonic`'s.

    `choice` has the best `MAX_CANDIDATES` candidates, without their digests, and as many of the excluded;
    `n_left_out` are left out. `n_choices`: how often it was chosen for, once more each half second while all
    candidates were full. `accepted_by` None: nobody has taken it yet.
    """

    choice: Choice
    reason: str
    n_left_out: int
    n_choices: int
    chosen_at: float
    accepted_by: str | None = None
    accepted_at: float | None = None

    def __str__(self) -> str:
        """In one line, as a structured field (RFC 8941): what decided, who took it, its cost among how many."""
        candidates = {candidate.replica_id: candidate for candidate in self.choice.ranked}
        replica_id = self.accepted_by or next(iter(candidates), "")
        told = f'{self.reason};replica="{replica_id}"'
        if (chosen := candidates.get(replica_id)) is not None:
            told += f";cost_tokens={chosen.cost_tokens}"
        return f"{told};candidates={len(candidates) + self.n_left_out}"


class Routings:
    """The latest `MAX_ROUTINGS` of one router."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Routing] = OrderedDict()

    def note(self, request_id: str, choice: Choice, now: float) -> None:
        """The policy has chosen for a request, perhaps not for the first time."""
        before = self._by_id.pop(request_id, None)
        shown = Choice(
            ranked=tuple(replace(candidate, digests=()) for candidate in choice.ranked[:MAX_CANDIDATES]),
            excluded=choice.excluded[:MAX_CANDIDATES],
        )
        self._by_id[request_id] = Routing(
            choice=shown,
            reason=choice.reason,
            n_left_out=len(choice.ranked) - len(shown.ranked),
            n_choices=1 if before is None else before.n_choices + 1,
            chosen_at=now,
        )
        if len(self._by_id) > MAX_ROUTINGS:
            self._by_id.popitem(last=False)

    def accept(self, request_id: str, replica_id: str, now: float) -> None:
        """A replica has taken the request."""
        routing = self._by_id.get(request_id)
        if routing is not None:
            self._by_id[request_id] = replace(routing, accepted_by=replica_id, accepted_at=now)

    def of(self, request_id: str) -> Routing | None:
        """How a request was routed, as long as it is known."""
        return self._by_id.get(request_id)
