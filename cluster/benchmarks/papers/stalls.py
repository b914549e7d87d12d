"""How long prompts hold up those who decode, as Sarathi-Serve shows (Agrawal et al. 2024, arXiv 2403.02310)."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from bakehouse_replica.core.types import Capacity
from benchmarks.papers.playing import play
from benchmarks.papers.setups import Lengths, Setup, our_scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """Gaps between the tokens of a request, and how long its first one takes, in seconds."""

    gap_p99_s: float
    gap_max_s: float
    ttft_p50_s: float


def stalls(
    setup: Setup, lengths: Lengths, *, max_prefill_tokens: int, max_step_tokens: int, rate: float, n_requests: int
) -> Stalls:
    """Of our scheduler where steps that decode hold at most `max_prefill_tokens` tokens of prompts."""
    capacity = Capacity(
        n_blocks=setup.n_slots // 16,
        block_size=16,
        max_step_tokens=max_step_tokens,
        max_sequences=setup.max_sequences,
    )
    scheduler = our_scheduler(capacity, max_prefill_tokens=max_prefill_tokens)
    records = play(scheduler, lengths.visits(n_requests, rate=rate, seed=0), setup.cost())
    gaps = [after - before for record in records for before, after in pairwise(record.token_s)]
    return Stalls(
        gap_p99_s=float(np.percentile(gaps, 99)),
        gap_max_s=max(gaps),
        ttft_p50_s=float(np.percentile([record.ttft_s for record in records], 50)),
    )
