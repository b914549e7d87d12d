"""An executor without a model: its KV cache stores token ids, and the next id is a function of what it reads back.

Everything it knows of a sequence's past comes through the block table, as it would in attention. A table that
points to the wrong block, a missing copy or a lost chunk therefore fails loudly (a slot that was never written,
or that holds another position) or yields other text than a cold run does. It needs no weights and no compute,
so that scheduler, engine and gateway can be tested, and loaded, as they are shipped.
"""

import hashlib
from array import array
from collections.abc import Callable
from time import perf_counter

from bakehouse_replica.core.types import (
    BlockCopy,
    Capacity,
    Chunk,
    Draw,
    Sample,
    Sampled,
    SamplingParams,
    StepPlan,
    StepResult,
)

_UNWRITTEN = -1  # no position is negative


class FakeExecutor:
    """Draws ids from `range(vocabulary_size)`, so that any stop id comes up every so often.

    With temperature 0 the next id depends on the tokens so far alone; above 0 on the seed as well. Stop ids are
    held back before `min_tokens`; of the penalties only the ids they count are checked, and the parameters that
    narrow the choice (`top_k`, `top_p`, `min_p`) have nothing to narrow. `before_step` is called first thing in
    each step, in the thread that executes; what it raises is what `execute` raises.
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        vocabulary_size: int = 1000,
        before_step: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self._capacity = capacity
        self._vocabulary_size = vocabulary_size
        self._before_step = before_step
        n_slots = capacity.n_blocks * capacity.block_size
        self._token_ids = array("q", [_UNWRITTEN]) * n_slots
        self._positions = array("q", [_UNWRITTEN]) * n_slots

    @property
    def capacity(self) -> Capacity:
        """What it was told to have."""
        return self._capacity

    def prepare(self, params: SamplingParams) -> None:
        """Nothing to make ready."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Stores, reads back and draws. Asserts that each chunk reads its own past, in order and complete."""
        begun_at = perf_counter()
        if self._before_step is not None:
            self._before_step(plan)
        for copy in plan.copies:
            self._copy(copy)
        for chunk in plan.chunks:
            self._write(chunk)
        sampled = []
        for chunk in plan.chunks:
            history = self._read(chunk)
            if chunk.sample is not None:
                draws = tuple(Draw(token_ids=(id_,)) for id_ in self._draw(history, chunk.sample))
                sampled.append(Sampled(sequence_id=chunk.sequence_id, draws=draws))
        return StepResult(step=plan.step, sampled=tuple(sampled), elapsed_s=perf_counter() - begun_at)

    def close(self) -> None:
        """Forgets all it stored."""
        self._token_ids = array("q")
        self._positions = array("q")

    def _copy(self, copy: BlockCopy) -> None:
        source, target = self._slots(copy.source), self._slots(copy.target)
        self._token_ids[target] = self._token_ids[source]
        self._positions[target] = self._positions[source]

    def _write(self, chunk: Chunk) -> None:
        size = self._capacity.block_size
        for position, token_id in enumerate(chunk.token_ids, start=chunk.start):
            slot = chunk.block_ids[position // size] * size + position % size
            self._token_ids[slot] = token_id
            self._positions[slot] = position

    def _read(self, chunk: Chunk) -> "array[int]":
        n_tokens = chunk.start + len(chunk.token_ids)
        token_ids, positions = array("q"), array("q")
        for block_id in chunk.block_ids:
            token_ids += self._token_ids[self._slots(block_id)]
            positions += self._positions[self._slots(block_id)]
        assert positions[:n_tokens] == array("q", range(n_tokens)), (
            f"sequence {chunk.sequence_id} reads positions {positions[:n_tokens].tolist()} from its blocks "
            f"{chunk.block_ids}; expected 0 to {n_tokens - 1}"
        )
        return token_ids[:n_tokens]

    def _draw(self, history: "array[int]", sample: Sample) -> tuple[int, ...]:
        params = sample.params
        if params.has_penalties:
            assert history.tolist() == [*sample.prompt_ids, *sample.output_ids], "penalties count other tokens"
        held_back = params.stop_token_ids if sample.output_index < params.min_tokens else ()
        packed = history.tobytes()
        return tuple(
            self._next_id(packed, seed if params.temperature > 0 else None, held_back) for seed in sample.seeds
        )

    def _next_id(self, packed_history: bytes, seed: int | None, held_back: tuple[int, ...]) -> int:
        digest = hashlib.blake2b(packed_history, digest_size=8, person=b"" if seed is None else b"seeded")
        if seed is not None:
            digest.update(seed.to_bytes(8, "little", signed=True))
        token_id = int.from_bytes(digest.digest(), "little") % self._vocabulary_size
        while token_id in held_back:
            token_id = (token_id + 1) % self._vocabulary_size
        return token_id

    def _slots(self, block_id: int) -> slice:
        size = self._capacity.block_size
        return slice(block_id * size, (block_id + 1) * size)
