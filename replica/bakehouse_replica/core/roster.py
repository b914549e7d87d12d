"""Who waits, who runs, and what they hold: every change of a sequence's status goes through here.

Two queues, both sorted by (priority, arrival, choice). Only running sequences hold blocks, and the pool counts
exactly their tables. A sequence is in the queue that its status names, and in its call, until it ends.
"""

from bisect import bisect_left, insort
from collections.abc import Container
from itertools import count, takewhile

from bakehouse_replica.core.blocks import BlockPool
from bakehouse_replica.core.call import Call
from bakehouse_replica.core.sequence import Sequence, Status
from bakehouse_replica.core.types import BlockCopy, Cost


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order


class Roster:
    """The live sequences of one scheduler. Others read `calls`, `waiting` and `running`, and never change them."""

    def __init__(self, *, pool: BlockPool, n_slots: int) -> None:
        self.calls: dict[str, Call] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._pool = pool
        self._n_slots = n_slots
        self._sequence_ids = count()
        self._billed = 0.0  # block-seconds of the calls that have ended

    def enter(self, call: Call, seed: int) -> Sequence:
        """Queues a new call with its first sequence, which it returns."""
        sequence = Sequence.first(call, next(self._sequence_ids), seed)
        call.sequences.append(sequence)
        self.calls[call.request.request_id] = call
        insort(self.waiting, sequence, key=_order)
        return sequence

    def match(self, sequence: Sequence) -> list[int]:
        """The registered blocks it could start from; what yields logits that it needs is left to compute."""
        n_blocks = self._n_matchable(sequence)
        self._hash(sequence, n_blocks)
        return self._pool.match(sequence.block_hashes[:n_blocks], sequence.tokens)

    def coming(self, sequence: Sequence, n_tokens: int) -> list[bytes]:
        """The hashes of the blocks that others will find once its next `n_tokens` are computed."""
        n_full = (sequence.n_computed + n_tokens) // self._pool.block_size
        return sequence.block_hashes[sequence.n_registered : n_full] if sequence.is_registrable else []

    def n_coming(self, sequence: Sequence, n_hits: int, coming: Container[bytes]) -> int:
        """How many blocks the sequence will find beyond its `n_hits` once those of `coming` are computed."""
        wanted = sequence.block_hashes[n_hits : self._n_matchable(sequence)]
        return sum(1 for _ in takewhile(coming.__contains__, wanted))

    def start(self, sequence: Sequence, hits: list[int]) -> None:
        """Runs a waiting sequence, from the registered blocks `hits` on."""
        assert sequence.status is Status.WAITING, f"sequence {sequence.sequence_id} is {sequence.status.name}"
        self._dequeue(sequence)
        self._pool.share(hits)
        sequence.call.bill.block_seconds -= self._pool.reading(hits)
        sequence.block_table = hits
        sequence.n_registered = len(hits)
        sequence.n_applied = sequence.n_computed = sequence.n_begun = len(hits) * self._pool.block_size
        sequence.status = Status.RUNNING
        if sequence.call.cached_tokens is None:
            sequence.call.cached_tokens = min(sequence.n_computed, sequence.n_prompt)
        insort(self.running, sequence, key=_order)

    def grow(self, sequence: Sequence, n_tokens: int) -> list[BlockCopy]:
        """Makes room to write its next `n_tokens`; returns the copy that this needs, if any.

        Takes from the pool what `room.n_blocks_needed` counts. Blocks that were made writable stay so until a
        fork, since others share registered blocks only.
        """
        if sequence.n_computed + n_tokens <= sequence.n_writable:
            return []
        table, tail = sequence.block_table, sequence.n_computed // self._pool.block_size
        copy = self._pool.writable(table, tail) if tail < len(table) else None
        if copy is not None:
            sequence.call.bill.block_seconds += self._pool.reading([copy.source])
            sequence.call.story.n_copies += 1
        n_blocks = self._pool.n_blocks_for(sequence.n_computed + n_tokens)
        table.extend(self._pool.allocate() for _ in range(n_blocks - len(table)))
        sequence.block_ids = tuple(table)
        sequence.n_writable = n_blocks * self._pool.block_size
        return [] if copy is None else [copy]

    def register(self, sequence: Sequence) -> None:
        """Lets others find the blocks that applied steps have filled since the last time."""
        size = self._pool.block_size
        n_full = sequence.n_applied // size
        self._hash(sequence, n_full)
        while sequence.is_registrable and sequence.n_registered < n_full:
            index = sequence.n_registered
            block_hash, token_ids = (
                sequence.block_hashes[index],
                sequence.tokens[index * size : (index + 1) * size],
            )
            own = sequence.block_table[index]
            sequence.is_registrable = self._pool.register(sequence.block_table, index, block_hash, token_ids)
            if (twin := sequence.block_table[index]) != own:
                sequence.call.bill.block_seconds += self._pool.reading([own]) - self._pool.reading([twin])
            sequence.n_registered += sequence.is_registrable
        sequence.block_ids = tuple(sequence.block_table)  # a twin may have taken a block's place

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """All choices of an unforked call, the first one being `sequence`; they share all its blocks."""
        choices = [sequence]
        sequence.n_writable = sequence.n_computed  # the partly filled tail is shared from here on
        for choice in range(1, sequence.n_slots):
            child = sequence.forked(choice, next(self._sequence_ids))
            self._pool.share(child.block_table)
            child.call.bill.block_seconds -= self._pool.reading(child.block_table)
            child.call.sequences.append(child)
            insort(self.running, child, key=_order)
            choices.append(child)
        sequence.seeds = sequence.seeds[:1]
        return choices

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks and puts it back into the queue, at its old place."""
        assert sequence.status is Status.RUNNING, f"sequence {sequence.sequence_id} is {sequence.status.name}"
        assert sequence.n_applied == sequence.n_computed, f"sequence {sequence.sequence_id} has a step in flight"
        self._let_go(sequence)
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=_order)

    def end(self, sequence: Sequence) -> Cost | None:
        """Forgets a live sequence, and its call with the last one; then it is known what that has cost."""
        assert sequence.status is not Status.ENDED, f"sequence {sequence.sequence_id} has ended before"
        self._let_go(sequence)
        sequence.status = Status.ENDED
        call = sequence.call
        call.bill.generated_tokens += sequence.n_output - len(call.request.prior_output)
        call.sequences.remove(sequence)
        if call.sequences:
            return None
        del self.calls[call.request.request_id]
        self._billed += call.bill.block_seconds
        return call.bill.total(call.cached_tokens or 0)

    def check(self) -> None:
        """Asserts all of the above, and the pool's own rules."""
        for queue, status in ((self.waiting, Status.WAITING), (self.running, Status.RUNNING)):
            assert queue == sorted(queue, key=_order), f"the {status.name} sequences are out of order"
            assert all(sequence.status is status for sequence in queue), f"not all are {status.name}"
        assert not any(sequence.block_table for sequence in self.waiting), "a waiting sequence holds blocks"
        n_slots_used = sum(sequence.n_slots for sequence in self.running)
        assert n_slots_used <= self._n_slots, f"{n_slots_used} of {self._n_slots} slots are used"
        known = {sequence for call in self.calls.values() for sequence in call.sequences}
        assert known == {*self.waiting, *self.running}, "a sequence is in a queue but not in its call, or reversed"
        assert all(call.sequences for call in self.calls.values()), "a call is left without sequences"
        for sequence in known:
            assert sequence.call.n_asked >= min(sequence.n_computed, sequence.call.n_to_score), (
                f"sequence {sequence.sequence_id} has computed {sequence.n_computed} tokens, "
                f"but asked for {sequence.call.n_asked} scores"
            )
            n_hashed = len(sequence.block_hashes) * self._pool.block_size
            assert n_hashed <= len(sequence.tokens) - sequence.n_awaited, "a hash covers a token that is not known"
        for sequence in self.running:
            self._check_table(sequence)
        tables = [sequence.block_table for sequence in self.running]
        bills = self._billed + sum(call.bill.block_seconds for call in self.calls.values())
        self._pool.check(tables)
        self._pool.check_bills(bills + sum(map(self._pool.reading, tables)))

    def _check_table(self, sequence: Sequence) -> None:
        table, size = sequence.block_table, self._pool.block_size
        assert sequence.block_ids == tuple(table), f"sequence {sequence.sequence_id} sends an old block table"
        assert sequence.n_registered * size <= sequence.n_applied, (
            "a block that steps in flight write can be found"
        )
        if sequence.n_writable > sequence.n_applied:
            assert sequence.n_writable == len(table) * size, f"{sequence.sequence_id} would write past its table"
            for block_id in table[sequence.n_applied // size :]:
                assert self._pool.n_holders(block_id) == 1, f"block {block_id} is shared and would be overwritten"

    def _n_matchable(self, sequence: Sequence) -> int:
        call = sequence.call
        n_known = call.n_asked if call.has_scores_to_ask else len(sequence.tokens) - 1
        return n_known // self._pool.block_size

    def _hash(self, sequence: Sequence, n_blocks: int) -> None:
        hashes, size = sequence.block_hashes, self._pool.block_size
        for index in range(len(hashes), n_blocks):
            parent = hashes[-1] if hashes else sequence.call.root_hash
            hashes.append(self._pool.next_hash(parent, sequence.tokens[index * size : (index + 1) * size]))

    def _let_go(self, sequence: Sequence) -> None:
        self._dequeue(sequence)
        sequence.bill_computed()
        sequence.call.bill.block_seconds += self._pool.reading(sequence.block_table)
        self._pool.release(sequence.block_table)
        sequence.block_table, sequence.block_ids = [], ()
        sequence.n_applied = sequence.n_computed = sequence.n_writable = sequence.n_registered = 0
        sequence.is_registrable = True

    def _dequeue(self, sequence: Sequence) -> None:
        queue = self.running if sequence.status is Status.RUNNING else self.waiting
        index = bisect_left(queue, sequence.order, key=_order)
        assert queue[index] is sequence, f"sequence {sequence.sequence_id} is not in its queue"
        del queue[index]
