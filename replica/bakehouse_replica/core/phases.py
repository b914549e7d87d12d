"""The phases of a plan that decide who runs: who yields, who is preempted, who is admitted, who is served more.

`scheduler` says in which order they come. Each chooses first (`budget`, `room`: reads only) and then commits.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Ordered

from bakehouse_replica.core.blocks import BlockPool
from bakehouse_replica.core.budget import StepBudget, is_long
from bakehouse_replica.core.ends import Ends
from bakehouse_replica.core.room import Room, n_blocks_needed
from bakehouse_replica.core.roster import Roster
from bakehouse_replica.core.sequence import Sequence
from bakehouse_replica.core.stories import Stories
from bakehouse_replica.core.story import PreemptionRule, WaitReason
from bakehouse_replica.core.tally import Tally
from bakehouse_replica.core.types import BlockCopy, SchedulingPolicy

# A newcomer whose prefix is being computed waits a step for it, where that brings it at least so far as this share
# of what it could compute in the step itself. Of 32 requests with a common prompt of 200 tokens, 16 at a time, two
# computed it; now one does. Each wait ends with blocks found, or with the end of those who computed them.
COMING_SHARE = 0.5


class Phases:
    """The phases of one scheduler's plans."""

    def __init__(
        self,
        *,
        roster: Roster,
        pool: BlockPool,
        ends: Ends,
        tally: Tally,
        stories: Stories,
        policy: SchedulingPolicy,
        n_slots: int,
    ) -> None:
        self._roster = roster
        self._pool = pool
        self._ends = ends
        self._tally = tally
        self._stories = stories
        self._policy = policy
        self._n_slots = n_slots

    def adopt(self, policy: SchedulingPolicy) -> None:
        """Another policy from the next plan on."""
        self._policy = policy

    def outranked(self) -> list[Sequence]:
        """The fewest running sequences of lower priority that the first waiting one needs gone, in order."""
        running = self._roster.running
        if not self._roster.waiting or not running:
            return []
        urgent = self._roster.waiting[0]
        if running[-1].order[0] <= urgent.order[0]:  # the last in order
            return []
        n_outranked = sum(sequence.order[0] > urgent.order[0] for sequence in running)
        hits = self._roster.match(urgent)
        if not self._may_prefill(urgent.n_needed - len(hits) * self._pool.block_size):
            return []
        if not self._room(len(running) - n_outranked).fits(urgent, hits, self._pool):
            return []
        n_staying = len(running)
        while not self._room(n_staying).fits(urgent, hits, self._pool):
            n_staying -= 1
        return running[n_staying:]

    def preempt_until_blocks_suffice(self, budget: StepBudget) -> bool:
        """Whether anyone had to go so that the rest of the grants can be honoured."""
        running, has_preempted = self._roster.running, False
        while (n_short := n_blocks_needed(budget.grants, self._pool) - self._pool.n_available) > 0:
            last, has_preempted = running[-1], True
            budget.withdraw(last)
            if len(running) == 1:
                self._ends.end_without_room(last)
            else:
                self._preempt(last, PreemptionRule.BLOCKS, n_short=n_short)
        if has_preempted and running:
            self._stories.stop(WaitReason.PREEMPTING)
        return has_preempted

    def preempt_outranked(self, outranked: Ordered[Sequence]) -> None:
        """Sends these back into the queue, the last in order first, for the first one that waits."""
        for sequence in reversed(outranked):
            self._preempt(sequence, PreemptionRule.OUTRANKED, for_priority=self._roster.waiting[0].order[0])

    def admit(self, budget: StepBudget, now: float) -> list[BlockCopy]:
        """Starts newcomers in order, with what is left of tokens, slots and blocks; the copies that this needs."""
        copies: list[BlockCopy] = []
        if not self._roster.waiting:
            return copies
        room = self._room(len(self._roster.running))
        coming = set[bytes]()  # no more than the blocks of this step and of those in flight
        for sequence in self._roster.running:
            if len(sequence.block_hashes) > sequence.n_registered:  # else no more of it will be found
                coming.update(self._roster.coming(sequence, budget.grants.get(sequence, 0)))
        for sequence in list(self._roster.waiting):
            if budget.prefill_left == 0:
                self._stories.stop(WaitReason.NO_TOKENS)
                break
            if sequence.n_slots > room.slots_left:
                self._stories.stop_at(sequence, WaitReason.NO_SLOT)
                break
            if self._pool.n_blocks_for(sequence.n_needed) > self._pool.n_blocks:
                self._ends.end_without_room(sequence)
                continue
            hits = self._roster.match(sequence)
            if not self._may_prefill(sequence.n_needed - len(hits) * self._pool.block_size):
                self._stories.pass_over(sequence, WaitReason.LONG_PREFILLS)
                continue  # others pass it, or they would wait for two long prompts
            if not room.fits(sequence, hits, self._pool):
                self._stories.stop_at(sequence, WaitReason.NO_BLOCKS)
                break  # nobody passes it, or a large request would wait for ever behind small ones
            room.take(sequence, hits, self._pool)
            n_own = min(sequence.n_needed - len(hits) * self._pool.block_size, budget.prefill_left)
            n_coming = self._roster.n_coming(sequence, len(hits), coming) * self._pool.block_size
            if n_coming >= n_own * COMING_SHARE:
                self._stories.pass_over(sequence, WaitReason.PREFIX_COMING)
                continue  # it waits for these blocks; its place is kept
            is_first_time = sequence.call.cached_tokens is None
            self._roster.start(sequence, hits)
            if is_first_time:
                self._tally.admit(sequence.call, now)
            n_tokens = budget.grant(sequence)
            coming.update(self._roster.coming(sequence, n_tokens))
            copies += self._roster.grow(sequence, n_tokens)
            self._stories.admit(sequence)
        return copies

    def fill(self, budget: StepBudget, going_on: Iterable[Sequence]) -> list[BlockCopy]:
        """Gives what is left to unfinished prefills; the copies that this needs."""
        copies: list[BlockCopy] = []
        if budget.is_ample:
            return copies
        for sequence in going_on:
            if budget.prefill_left == 0:
                break
            n_granted = budget.grants.get(sequence, 0)
            if sequence.n_missing == n_granted:
                continue
            n_blocks = len(sequence.block_table) + self._pool.n_available
            if budget.grant(sequence, n_blocks * self._pool.block_size - sequence.n_computed - n_granted):
                copies += self._roster.grow(sequence, budget.grants[sequence])
        return copies

    def _preempt(
        self,
        sequence: Sequence,
        rule: PreemptionRule,
        *,
        for_priority: int | None = None,
        n_short: int | None = None,
    ) -> None:
        """Sends a running sequence back into the queue, to its place; its blocks stay as cache."""
        n_freed = sum(self._pool.n_holders(block_id) == 1 for block_id in sequence.block_table)
        self._roster.preempt(sequence)
        self._stories.preempt(sequence, rule, n_freed=n_freed, for_priority=for_priority, n_short=n_short)
        self._tally.preempt()

    def _may_prefill(self, n_missing: int) -> bool:
        """Whether a newcomer with so many tokens to compute may join the prefills that run."""
        if not is_long(n_missing, self._policy):
            return True
        prefills = (sequence for sequence in self._roster.running if not sequence.is_decoding)
        n_long = sum(is_long(sequence.n_missing, self._policy) for sequence in prefills)
        return n_long < self._policy.max_long_prefills

    def _room(self, n_staying: int) -> Room:
        running = self._roster.running
        return Room.beside(running[:n_staying], self._pool, self._n_slots, leaving=running[n_staying:])
