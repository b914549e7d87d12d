"""A KV cache of token ids: each slot holds the token that was written to it and the position it was written for.

An executor that knows of a sequence's past only what it reads from here, through the block table, fails loudly
where a table points to the wrong block, a copy is missing or a chunk was lost: the slot was never written, or
holds another position. Where it holds another token, the text differs from that of a cold run.
"""

from array import array

from bakehouse_replica.core.types import BlockCopy, Capacity, Chunk, StepPlan

SLOT_BYTES = 16
_UNWRITTEN = -1  # no position is negative


class TokenCache:
    """Slots for the blocks of one `Capacity`."""

    def __init__(self, capacity: Capacity) -> None:
        self._block_size = capacity.block_size
        n_slots = capacity.n_blocks * capacity.block_size
        self._token_ids = array("q", [_UNWRITTEN]) * n_slots
        self._positions = array("q", [_UNWRITTEN]) * n_slots
        self._order = array("q")  # 0, 1, 2, …, as far as was needed: a range made anew costs most of a read

    def store(self, plan: StepPlan) -> None:
        """The plan's copies, one block onto another, then the tokens of its chunks."""
        for copy in plan.copies:
            self._copy(copy)
        for chunk in plan.chunks:
            self._write(chunk)

    def read(self, chunk: Chunk) -> "array[int]":
        """All tokens of the sequence up to the chunk's end. Asserts that its blocks hold them, in order."""
        n_tokens = chunk.start + len(chunk.token_ids)
        token_ids, positions = array("q"), array("q")
        for block_id in chunk.block_ids:
            token_ids += self._token_ids[self._slots(block_id)]
            positions += self._positions[self._slots(block_id)]
        self._order.extend(range(len(self._order), n_tokens))
        assert positions[:n_tokens] == self._order[:n_tokens], (
            f"sequence {chunk.sequence_id} reads positions {positions[:n_tokens].tolist()} from its blocks "
            f"{chunk.block_ids}; expected 0 to {n_tokens - 1}"
        )
        return token_ids[:n_tokens]

    def clear(self) -> None:
        """Forgets all it stored and gives the memory back."""
        self._token_ids = array("q")
        self._positions = array("q")

    def _copy(self, copy: BlockCopy) -> None:
        source, target = self._slots(copy.source), self._slots(copy.target)
        self._token_ids[target] = self._token_ids[source]
        self._positions[target] = self._positions[source]

    def _write(self, chunk: Chunk) -> None:
        size = self._block_size
        for position, token_id in enumerate(chunk.token_ids, start=chunk.start):
            slot = chunk.block_ids[position // size] * size + position % size
            self._token_ids[slot] = token_id
            self._positions[slot] = position

    def _slots(self, block_id: int) -> slice:
        return slice(block_id * self._block_size, (block_id + 1) * self._block_size)
