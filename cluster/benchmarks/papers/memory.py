"""Who fits into memory: figures 2, 3, 13, 15 and 18b of PagedAttention, with more work than there is room for.

All requests are there from the start, so that memory is what limits every system; averages over time leave out the
beginning, when everybody is young, and the end, when nobody waits.
"""

from dataclasses import astuple, dataclass

import numpy as np
from bakehouse_replica.core.types import StepPlan
from benchmarks.papers.playing import play
from benchmarks.papers.reserving import ReservingScheduler, Shares
from benchmarks.papers.setups import BLOCK_SIZE, Lengths, Setup

STEADY = (0.25, 0.75)  # of all requests have ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Averages over time. `n_tables`: lengths of all block tables together; `n_blocks`: blocks in any of them."""

    shares: Shares
    n_running: float
    n_blocks: float
    n_tables: float
    output_tokens_per_s: float

    @property
    def saved_share(self) -> float:
        """Of the blocks that tables hold, how many need no memory of their own, because they are shared."""
        return 1 - self.n_blocks / self.n_tables if self.n_tables else 0.0


def occupancy(
    setup: Setup,
    lengths: Lengths,
    system: str,
    *,
    n_requests: int,
    n: int = 1,
    block_size: int = BLOCK_SIZE,
    seed: int = 0,
) -> Occupancy:
    """Of one of `SYSTEMS` while requests with `n` choices each wait for room."""
    machine, cost = setup.machine(system, block_size=block_size), setup.cost()
    rows: list[tuple[float, ...]] = []

    def watch(plan: StepPlan, seconds: float, ended_share: float) -> None:
        if not STEADY[0] <= ended_share < STEADY[1]:
            return
        n_blocks = len({block_id for chunk in plan.chunks for block_id in chunk.block_ids})
        n_tables = sum(len(chunk.block_ids) for chunk in plan.chunks)
        n_drawn = sum(chunk.sample is not None for chunk in plan.chunks)
        if isinstance(machine, ReservingScheduler):
            shares = machine.shares()
        else:
            shares = _paged_shares(plan, n_blocks, n_tables, block_size, setup.n_slots)
        rows.append((seconds, n_drawn / seconds, len(plan.chunks), n_blocks, n_tables, *astuple(shares)))

    play(machine, lengths.visits(n_requests, rate=float("inf"), seed=seed, n=n), cost, watch)
    table = np.array(rows)
    rate, n_running, n_blocks, n_tables, *shares = np.average(table[:, 1:], axis=0, weights=table[:, 0]).tolist()
    return Occupancy(
        output_tokens_per_s=rate, n_running=n_running, n_blocks=n_blocks, n_tables=n_tables, shares=Shares(*shares)
    )


def _paged_shares(plan: StepPlan, n_blocks: int, n_tables: int, block_size: int, n_slots: int) -> Shares:
    """Each slot once: blocks in several tables are full, for the first write to any other makes a copy of it."""
    n_tokens = sum(chunk.start + len(chunk.token_ids) for chunk in plan.chunks)
    n_tokens -= (n_tables - n_blocks) * block_size
    n_held = n_blocks * block_size
    return Shares(
        tokens=n_tokens / n_slots,
        reserved=0.0,
        internal=(n_held - n_tokens) / n_slots,
        external=1 - n_held / n_slots,
    )
