"""The router's record of every replica: what it is, what it reported, what this router has in flight there.

One owner, one thread (the loop that routes). A request's charge is made when its replica is chosen, moved if
another one accepts it, and released exactly once: when the call ends, when the request is given up before any
replica has accepted it, or when no acceptance follows in time. Of its prompt it is released with the first token.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from bakehouse_replica.core.types import ReplicaCard, ReplicaLoad

from bakehouse_router.policy.pick import Candidate
from bakehouse_router.policy.views import OwnLoad, ReplicaView

# How often Serve's controller asks each replica for a report.
REPORT_PERIOD_S = 0.5
# A report reaches the router 0.11 to 0.43 s after it was taken, at a polling period of 0.2 s (measured), and later
# where replica, controller and router wait for the same busy cores: with 0.5 s here, 20 prompts of one prefix were
# once split 11 to 9 on two cores at load 6, because a report still told of work long done.
REPORT_AGE_S = 2.0
# Acceptance follows the choice within milliseconds, and a request that finds all replicas full is chosen for, and
# charged, anew every half second. A charge this old without it is of a cancel that fell between the two.
ACCEPT_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Charge:
    replica_id: str
    n_sequences: int
    n_tokens: int
    at_s: float
    is_accepted: bool = False


@dataclass(slots=True, kw_only=True)
class _Record:
    card: ReplicaCard
    load: ReplicaLoad | None = None
    problem: str | None = None
    resident: frozenset[bytes] = frozenset()
    sent: OrderedDict[bytes, None] = field(default_factory=OrderedDict)


class ReplicaTable:
    """All replicas that this router knows, as views for the policy."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._charges: dict[str, _Charge] = {}
        self._released: deque[_Charge] = deque()

    def n_in_flight(self, now: float) -> int:
        """Requests charged and not yet released."""
        self._drop_overdue(now)
        return len(self._charges)

    def update(self, card: ReplicaCard, load: ReplicaLoad | None, problem: str | None) -> None:
        """Take a replica's latest news. A changed card (other block size or model) starts a new record."""
        record = self._records.get(card.replica_id)
        if record is None or record.card != card:
            record = self._records[card.replica_id] = _Record(card=card)
        record.problem = problem
        if load is not None and load != record.load:
            record.load, record.resident = load, frozenset(load.resident)

    def keep_only(self, replica_ids: Iterable[str]) -> None:
        """Forget every other replica: it is gone, and its cache with it."""
        alive = set(replica_ids)
        self._records = {replica_id: record for replica_id, record in self._records.items() if replica_id in alive}

    def forget(self, replica_id: str) -> None:
        """Forget one replica; charges that name it stay until they are released."""
        self._records.pop(replica_id, None)

    def views(self, now: float) -> list[ReplicaView]:
        """Every known replica. Walks all charges: 0.4 ms at 500 in flight, on a busy core."""
        self._drop_overdue(now)
        while self._released and now - self._released[0].at_s > REPORT_AGE_S:
            self._released.popleft()
        own = self._own_loads(now)
        return [
            ReplicaView(
                card=record.card,
                load=record.load,
                problem=record.problem,
                own=own[replica_id],
                resident=record.resident,
                sent=record.sent.keys(),
            )
            for replica_id, record in self._records.items()
        ]

    def charge(self, key: str, candidate: Candidate, n_sequences: int, now: float) -> None:
        """Count a request at its first choice, and remember its blocks as cached there; again moves it."""
        self._charges[key] = _Charge(
            replica_id=candidate.replica_id,
            n_sequences=n_sequences,
            n_tokens=candidate.n_uncached_tokens,
            at_s=now,
        )
        self._remember(candidate)

    def accept(self, key: str, replica_id: str) -> None:
        """The request has been taken by `replica_id`, which need not be the first choice."""
        charge = self._charges.get(key)
        if charge is not None:
            self._charges[key] = replace(charge, replica_id=replica_id, is_accepted=True)

    def mark_prefilled(self, key: str, now: float) -> None:
        """The first token has come: no prompt token of the request waits any more. A second call does nothing."""
        charge = self._charges.get(key)
        if charge is not None and charge.n_tokens:
            self._charges[key] = replace(charge, n_tokens=0)
            self._released.append(replace(charge, n_sequences=0, at_s=now))

    def release(self, key: str, replica_id: str, now: float) -> None:
        """The request at `replica_id` has ended; a second call, or one for a charge since moved, does nothing."""
        charge = self._charges.get(key)
        if charge is not None and charge.replica_id == replica_id:
            del self._charges[key]
            self._released.append(replace(charge, at_s=now))

    def abandon(self, key: str) -> None:
        """Release the charge of a request given up, unless a replica has accepted it."""
        charge = self._charges.get(key)
        if charge is not None and not charge.is_accepted:
            del self._charges[key]

    def _own_loads(self, now: float) -> dict[str, OwnLoad]:
        """What is charged to each known replica; counted in plain lists, for this runs once per request."""
        counts = {replica_id: [0, 0, 0, 0, 0] for replica_id in self._records}
        for charge in self._charges.values():
            if (count := counts.get(charge.replica_id)) is not None:
                count[0] += charge.n_sequences
                count[1 if now - charge.at_s <= REPORT_AGE_S else 2] += charge.n_tokens
        for charge in self._released:
            if (count := counts.get(charge.replica_id)) is not None:
                count[3] += charge.n_sequences
                count[4] += charge.n_tokens
        return {
            replica_id: OwnLoad(
                n_sequences=live,
                fresh_tokens=fresh,
                settled_tokens=settled,
                n_released_sequences=ended,
                released_tokens=ended_tokens,
            )
            for replica_id, (live, fresh, settled, ended, ended_tokens) in counts.items()
        }

    def _drop_overdue(self, now: float) -> None:
        for key in [key for key, charge in self._charges.items() if now - charge.at_s > ACCEPT_WITHIN_S]:
            self.abandon(key)

    def _remember(self, candidate: Candidate) -> None:
        record = self._records.get(candidate.replica_id)
        if record is None:
            return
        # Deepest block first, so that the root of a prefix is the last to be forgotten.
        for digest in reversed(candidate.digests):
            record.sent[digest] = None
            record.sent.move_to_end(digest)
        while len(record.sent) > record.card.n_blocks:
            record.sent.popitem(last=False)
