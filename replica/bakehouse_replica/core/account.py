"""What blocks cost over time: each second of a held block is split evenly among the tables that hold it.

Every held block has a reading, S(t) = ∫ dt / holders(t), which begins at 0 when its first holder takes it. Whoever
takes the block at t0 and lets it go at t1 owes S(t1) - S(t0), however many come and go in between. So a bill is
minus the readings at which blocks were taken, plus those at which they were let go; while it holds blocks, their
readings of now are still to be added. A reading is brought up to date only where the number of holders changes:
what a step costs here depends on the blocks that it takes and lets go, not on those that are held.

Beside it, and from the pool's counts alone, the whole pool is integrated by state. Both accounts must agree:

    free + cached + held = n_blocks * elapsed      Σ bills, those of the ended too = held

What is free, or cached and held by nobody, is on nobody's bill. Time is what the driver told last: what happens
between two steps (an abort) counts as of the step before.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bakehouse_replica.core.maker import maker_of
from bakehouse_replica.core.types import Cost

_new_cost = maker_of(Cost)


@dataclass(slots=True, eq=False)
class Bill:
    """What one call owes, tokens as in `Cost`.

    To `block_seconds`, the readings of what it holds are still to be added.
    """

    block_seconds: float = 0.0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0

    def total(self, cached_tokens: int) -> Cost:
        """The cost of a call that holds nothing any more."""
        return _new_cost(
            block_seconds=self.block_seconds,
            computed_tokens=self.computed_tokens,
            cached_tokens=cached_tokens,
            recomputed_tokens=self.recomputed_tokens,
            generated_tokens=self.generated_tokens,
        )


@dataclass(slots=True)
class PoolTime:
    """Block-seconds of a whole pool by the state that its blocks were in."""

    free: float = 0.0
    cached: float = 0.0
    held: float = 0.0


class Account:
    """The readings of a pool's blocks, and the pool's time. Others read `now` and `time`, and change neither."""

    def __init__(self, n_blocks: int) -> None:
        self.time = PoolTime()
        self._readings = [0.0] * n_blocks
        self._read_at = [0.0] * n_blocks
        self._began_at: float | None = None  # known from the first `advance` on; nothing is held before
        self.now = 0.0

    @property
    def elapsed_s(self) -> float:
        """Since the first moment that the driver told."""
        return 0.0 if self._began_at is None else self.now - self._began_at

    def advance(self, now: float, *, n_free: int, n_cached: int, n_held: int) -> None:
        """It is `now`; since the last time, so many blocks were in each state. Never goes back."""
        if self._began_at is None:
            self._began_at = self.now = now
        passed_s = now - self.now
        if passed_s > 0.0:
            time = self.time
            time.free += n_free * passed_s
            time.cached += n_cached * passed_s
            time.held += n_held * passed_s
            self.now = now

    def begin(self, block_id: int) -> None:
        """Somebody takes a block that nobody holds."""
        self._readings[block_id] = 0.0
        self._read_at[block_id] = self.now

    def change(self, block_id: int, n_holders: int) -> None:
        """The number of the block's holders is about to change; it was `n_holders` until now."""
        if not n_holders:
            self.begin(block_id)
            return
        self._readings[block_id] += (self.now - self._read_at[block_id]) / n_holders
        self._read_at[block_id] = self.now

    def reading(self, block_ids: Iterable[int], n_holders: Sequence[int]) -> float:
        """The readings of these blocks as they are now, added up; `n_holders`: of each block of the pool.

        A block that nobody holds any more keeps its reading until it is taken again.
        """
        now, readings, read_at = self.now, self._readings, self._read_at
        return sum(
            [
                readings[block_id] + ((now - read_at[block_id]) / n if (n := n_holders[block_id]) else 0.0)
                for block_id in block_ids
            ]
        )

    def check(self, bills: float) -> None:
        """Asserts that both accounts agree; `bills`: all there have been, up to now."""
        time, whole = self.time, len(self._readings) * self.elapsed_s
        tolerance = 1e-6 * whole  # sums of floats: far more than they have been seen to be off
        assert abs(time.free + time.cached + time.held - whole) <= tolerance, (
            f"{time} is not all of {whole} block-seconds"
        )
        assert abs(bills - time.held) <= tolerance, (
            f"bills of {bills} block-seconds; blocks were held for {time.held}"
        )
