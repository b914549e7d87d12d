"""Filter, score, pick: ranks the candidates of one request, with the reason for each rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

from bakehouse_replica.core.hashing import HashScope, block_hashes
from bakehouse_replica.core.types import Request

from bakehouse_router.policy.filters import is_hot, no_slot, not_serving
from bakehouse_router.policy.scorers import sequence_tokens, shortage_tokens, uncached_tokens, waiting_tokens
from bakehouse_router.policy.views import DIGEST_BYTES, ReplicaView


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A replica's rank explained: the terms of its cost, and why it stands behind others if it was skipped.

    `digests`: the request's full blocks as this replica hashes them.
    """

    replica_id: str
    n_uncached_tokens: int
    n_waiting_tokens: int
    n_sequence_tokens: int
    n_shortage_tokens: int
    skipped: str | None
    digests: tuple[bytes, ...]

    @property
    def cost_tokens(self) -> int:
        """The sum that ranks candidates; smaller is better."""
        return self.n_uncached_tokens + self.n_waiting_tokens + self.n_sequence_tokens + self.n_shortage_tokens

    def __str__(self) -> str:
        terms = (
            f"{self.replica_id}: {self.cost_tokens} = {self.n_uncached_tokens} uncached"
            f" + {self.n_waiting_tokens} waiting + {self.n_sequence_tokens} sequences"
            f" + {self.n_shortage_tokens} short"
        )
        return terms if self.skipped is None else f"{terms} (skipped: {self.skipped})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """All candidates, best first, and those that were not considered with the reason."""

    ranked: tuple[Candidate, ...]
    excluded: tuple[tuple[str, str], ...] = ()

    @property
    def reason(self) -> str:
        """What decided, one of `ROUTING_REASONS`."""
        if not self.ranked:
            return "no_news"
        best, *others = self.ranked
        if best.skipped is not None:
            return "all_busy"
        if not others:
            return "only_one"
        if any(other.skipped is not None and other.cost_tokens < best.cost_tokens for other in others):
            return "skipped_busy"
        n_uncached = [candidate.n_uncached_tokens for candidate in self.ranked]
        return "prefix" if best.n_uncached_tokens == min(n_uncached) < max(n_uncached) else "load"

    def __str__(self) -> str:
        return "; ".join([*map(str, self.ranked), *(f"{name}: {reason}" for name, reason in self.excluded)])


def choose(request: Request, views: Sequence[ReplicaView], random: Random) -> Choice:
    """Rank `views` for `request`; empty if nobody serves.

    Equal costs are ordered by a hash of the prompt's first block and the replica, so that a prefix that several
    replicas hold still has one home; prompts below a block by `random`.
    """
    reasons = [(view, not_serving(view)) for view in views]
    serving = [view for view, reason in reasons if reason is None]
    digests: dict[HashScope, tuple[bytes, ...]] = {}
    n_sequences = sum(view.n_sequences for view in serving) + request.params.n
    candidates = []
    for view in serving:
        scope = view.scope(request.cache_salt)
        if scope not in digests:
            digests[scope] = _digests(request, scope)
        candidates.append(_score(request, view, n_sequences / len(serving), digests[scope]))
    candidates.sort(
        key=lambda candidate: (candidate.skipped is not None, candidate.cost_tokens, _tie(candidate, random))
    )
    excluded = tuple((view.replica_id, reason) for view, reason in reasons if reason is not None)
    return Choice(ranked=tuple(candidates), excluded=excluded)


def _tie(candidate: Candidate, random: Random) -> bytes:
    if not candidate.digests:
        return random.randbytes(DIGEST_BYTES)
    key = candidate.digests[0] + candidate.replica_id.encode()
    return blake2b(key, digest_size=DIGEST_BYTES).digest()


def _digests(request: Request, scope: HashScope) -> tuple[bytes, ...]:
    hashes = block_hashes(request.prompt_ids + request.prior_output, scope)
    return tuple(block_hash[:DIGEST_BYTES] for block_hash in hashes)


def _score(request: Request, view: ReplicaView, even_share: float, digests: tuple[bytes, ...]) -> Candidate:
    n_uncached = uncached_tokens(request, view, digests)
    return Candidate(
        replica_id=view.replica_id,
        n_uncached_tokens=n_uncached,
        n_waiting_tokens=waiting_tokens(view),
        n_sequence_tokens=sequence_tokens(view, n_uncached),
        n_shortage_tokens=shortage_tokens(view, n_uncached),
        skipped=no_slot(view) or is_hot(view, even_share, request.params.n),
        digests=digests,
    )
