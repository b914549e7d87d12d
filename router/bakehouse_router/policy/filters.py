"""Which candidates to set aside, each filter giving its reason in words or None.

A replica that does not serve is excluded. The other reasons only put a candidate behind those that have none, so
that a request still finds the best of several bad places.
"""

from bakehouse_router.policy.views import ReplicaView

# A candidate may hold this share of an even spread before it is skipped; below 1.25 affinity hardly ever
# survives, above 2 a popular prefix heats one replica while its neighbours idle.
BOUND_FACTOR = 1.5
# Below this many sequences a replica is never hot: with few requests in flight the even spread says nothing.
BOUND_FLOOR = 8


def not_serving(view: ReplicaView) -> str | None:
    """The replica has said that it cannot work."""
    return None if view.problem is None else f"does not serve: {view.problem}"


def no_slot(view: ReplicaView) -> str | None:
    """All its slots are taken, so a request would queue whatever is cached there."""
    n_sequences, limit = view.n_sequences, view.card.max_sequences
    return None if n_sequences < limit else f"holds {n_sequences} sequences of at most {limit}"


def is_hot(view: ReplicaView, even_share: float, n_new: int) -> str | None:
    """It would hold more than its bounded share. Judged alone, so that only the hot one is skipped.

    `even_share`: sequences of each candidate if all, the new ones too, were spread evenly.
    """
    bound = max(BOUND_FLOOR, BOUND_FACTOR * even_share)
    n_after = view.n_sequences + n_new
    return None if n_after <= max(bound, n_new) else f"would hold {n_after} sequences, bound {bound:.1f}"
