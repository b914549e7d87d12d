"""What a request would cost at a candidate: by how many tokens of work it delays itself and those who are there.

A cost in one unit instead of scores in [0, 1]: a prompt token computed here and one waited for there weigh the
same by nature, so there are no weights to tune and a choice can be explained by adding four numbers. Others count,
too: where each request seeks but its own first token, a replica that is behind for a moment sends its prefixes
away, to be computed again where they displace others, and so it goes on (docs/papers.md, llm-d).
"""

from bakehouse_replica.core.types import Request

from bakehouse_router.policy.views import ReplicaView

# A running sequence slows its neighbours by one row a step for as long as it runs. A row of a batched decode step
# costs a fraction of a prefill token, and answers run to a few hundred tokens: about a block of prefill each.
SEQUENCE_TOKENS = 32


def uncached_tokens(request: Request, view: ReplicaView, digests: tuple[bytes, ...]) -> int:
    """Prompt and replayed tokens that the replica must compute: what its cache holds of the prefix is free.

    At least one: the last token is always computed, for its logits.
    """
    n_tokens = len(request.prompt_ids) + len(request.prior_output)
    return max(1, n_tokens - view.n_cached_blocks(digests) * view.card.block_size)


def waiting_tokens(view: ReplicaView) -> int:
    """Prompt tokens of other requests that are computed first."""
    return view.waiting_tokens


def sequence_tokens(view: ReplicaView, n_uncached: int) -> int:
    """What the sequences there are delayed by in all: each by the prompt's computation and by the decode rows.

    Those that come while it is computed are as many, in a steady state, as those that are here.
    """
    return (n_uncached + SEQUENCE_TOKENS) * view.n_sequences


def shortage_tokens(view: ReplicaView, n_uncached: int) -> int:
    """Uncached tokens that find no free block and none to evict: they wait until somebody else ends."""
    if view.load is None:
        return 0
    room = (view.load.n_free_blocks + view.load.n_cached_blocks) * view.card.block_size
    return max(0, n_uncached - room)
