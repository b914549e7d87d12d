"""What the policy knows about one replica at the moment of a choice.

Two sources disagree about a replica's load. Its own report is exact, but old where cores are busy; this router's
record of what it sent is always current, but sees only its own requests. `ReplicaView` joins them so that no
request is counted twice and none is missed:

    fresh     sent within the report's possible age: counted whole, the report may not show it yet
    settled   sent earlier: its prefill counts for at most what the replica still reports as waiting
    released  ended within the report's possible age: the report may still show it, so it explains a part of it;
              a prefill ends with the first token, a sequence with the last
    foreign   whatever the report shows beyond all of these: other gateways' requests
"""

from collections.abc import Set
from dataclasses import dataclass, field

from bakehouse_replica.core.hashing import HashScope
from bakehouse_replica.core.types import ReplicaCard, ReplicaLoad

# `ReplicaLoad.resident` cuts block hashes to this many bytes: a wrong match is only a worse choice of replica.
DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoad:
    """What this router has in flight at one replica.

    Prefill tokens are those expected at dispatch, of requests whose first token has not come.
    """

    n_sequences: int = 0
    fresh_tokens: int = 0
    settled_tokens: int = 0
    n_released_sequences: int = 0
    released_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One candidate. `resident` is what the replica reported, `sent` what this router recently sent there.

    Both hold block hashes cut to `DIGEST_BYTES`. `load` is None until the first report; `problem` says why the
    replica does not serve, None where it does.
    """

    card: ReplicaCard
    load: ReplicaLoad | None = None
    problem: str | None = None
    own: OwnLoad = field(default_factory=OwnLoad)
    resident: Set[bytes] = frozenset()
    sent: Set[bytes] = frozenset()

    @property
    def replica_id(self) -> str:
        """The replica's id."""
        return self.card.replica_id

    @property
    def n_sequences(self) -> int:
        """Sequences running or queued there, by the latest news from both sources."""
        if self.load is None:
            return self.own.n_sequences
        reported = self.load.n_running + self.load.n_waiting
        return self.own.n_sequences + max(0, reported - self.own.n_sequences - self.own.n_released_sequences)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens still to be computed there, by the latest news from both sources."""
        own = self.own
        if self.load is None:
            return own.fresh_tokens + own.settled_tokens
        reported = self.load.waiting_tokens
        foreign = max(0, reported - own.fresh_tokens - own.settled_tokens - own.released_tokens)
        return own.fresh_tokens + min(own.settled_tokens, reported) + foreign

    def scope(self, salt: str) -> HashScope:
        """What this replica hashes a request's blocks with; the salt keeps tenants apart here as it does there."""
        return HashScope(
            block_size=self.card.block_size, model_digest=self.card.model_digest, key=self.card.hash_key, salt=salt
        )

    def n_cached_blocks(self, digests: tuple[bytes, ...]) -> int:
        """How many leading blocks of a prompt are probably resident."""
        for n_blocks, digest in enumerate(digests):
            if digest not in self.resident and digest not in self.sent:
                return n_blocks
        return len(digests)
