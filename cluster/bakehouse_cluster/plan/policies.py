"""Other routing policies, to compare the production one with; each ranks as `bakehouse_router.policy.pick.choose`.

A candidate without digests leaves no trace in a gateway's memory of what was sent where.
"""

from collections.abc import Sequence
from random import Random

from bakehouse_replica.core.types import Request
from bakehouse_router.policy.pick import Candidate, Choice
from bakehouse_router.policy.views import ReplicaView


def choose_at_random(request: Request, views: Sequence[ReplicaView], random: Random) -> Choice:
    """Any replica, all equally likely."""
    return Choice(ranked=tuple(_candidate(request, view) for view in random.sample(views, len(views))))


def choose_least_loaded(request: Request, views: Sequence[ReplicaView], random: Random) -> Choice:
    """The one with the fewest sequences, running and queued, by the news that the production policy has."""
    shuffled = random.sample(views, len(views))
    ranked = sorted(shuffled, key=lambda view: view.n_sequences)
    return Choice(ranked=tuple(_candidate(request, view) for view in ranked))


def _candidate(request: Request, view: ReplicaView) -> Candidate:
    return Candidate(
        replica_id=view.replica_id,
        n_uncached_tokens=len(request.prompt_ids) + len(request.prior_output),
        n_waiting_tokens=0,
        n_sequence_tokens=0,
        n_shortage_tokens=0,
        skipped=None,
        digests=(),
    )
