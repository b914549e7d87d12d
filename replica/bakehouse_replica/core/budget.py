"""How the tokens of one step are shared out among running sequences. Reads them; changes none.

Each decoding sequence gets the tokens of its newest draw, as long as one is left for everybody else who runs.
What is left then is for prefill, capped while anything decodes. Long prefills are served last but never starved:
half of the prefill tokens are theirs for as long as one is running, the other half goes to short prompts, running
ones first, and then to newcomers. What those leave over goes to whoever still has tokens to compute. So a short
prompt gets its first token after a few steps, however long the prompt is that arrived before it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from bakehouse_replica.core.sequence import Sequence
from bakehouse_replica.core.types import Capacity, SchedulingPolicy


def is_long(n_missing: int, policy: SchedulingPolicy) -> bool:
    """Whether so many tokens still to be computed make a long prefill; it stops being one near its end."""
    return n_missing > policy.long_prefill_tokens


def _share_further(grants: dict[Sequence, int], n_tokens: int) -> int:
    """Adds to the grants of decoding sequences what their draws need, in order; returns how much of `n_tokens`."""
    n_left = n_tokens
    for sequence in grants:
        n_more = min(sequence.n_missing - 1, n_left)
        grants[sequence] += n_more
        n_left -= n_more
    return n_tokens - n_left


@dataclass(slots=True, eq=False)
class StepBudget:
    """Tokens granted to each sequence in this step, and prefill tokens left to grant.

    `prefilling`: who was granted some of the latter, those included from whom they were withdrawn. `is_ample`:
    whoever ran before this step is granted all that it misses.
    """

    prefill_left: int
    grants: dict[Sequence, int] = field(default_factory=dict)
    prefilling: list[Sequence] = field(default_factory=list)
    is_ample: bool = False

    @classmethod
    def shared_among(
        cls, running: Iterable[Sequence], capacity: Capacity, policy: SchedulingPolicy
    ) -> "StepBudget":
        """Grants for the running sequences, given in order of service: decodes, then short, then long prefills."""
        grants: dict[Sequence, int] = {}
        short: list[Sequence] = []
        long: list[Sequence] = []
        n_further = 0  # tokens that decoding sequences could do with beyond the one that each is sure of
        for sequence in running:
            n_missing = len(sequence.tokens) - sequence.n_computed  # a property costs a decode step 2 %
            if n_missing <= sequence.n_drawn:
                grants[sequence] = 1
                n_further += n_missing - 1
            elif is_long(n_missing, policy):
                long.append(sequence)
            else:
                short.append(sequence)
        n_prefill = capacity.max_step_tokens - len(grants)
        if n_further:
            n_prefill -= _share_further(grants, n_prefill - len(short) - len(long))
        if grants:
            n_prefill = min(n_prefill, policy.max_prefill_tokens)
        n_reserved = n_prefill // 2 if long else 0
        budget = cls(n_prefill - n_reserved, grants, is_ample=not short and not long and not n_further)
        for sequence in short:
            budget.grant(sequence)
        n_left_by_short = budget.prefill_left
        budget.prefill_left = n_reserved
        for sequence in long:
            budget.grant(sequence)
        budget.prefill_left += n_left_by_short
        return budget

    def grant(self, sequence: Sequence, n_most: int | None = None) -> int:
        """Grants as many more tokens as are missing and left, at most `n_most`; returns how many."""
        granted = self.grants.get(sequence, 0)
        n_more = min(sequence.n_missing - granted, self.prefill_left)
        if n_most is not None:
            n_more = min(n_more, n_most)
        if n_more > 0:
            if not granted:
                self.prefilling.append(sequence)
            self.grants[sequence] = granted + n_more
            self.prefill_left -= n_more
        return max(n_more, 0)

    def withdraw(self, sequence: Sequence) -> None:
        """Takes back what the sequence was granted; others may have it, for the total stays the same."""
        self.prefill_left += self.grants.pop(sequence, 0)
