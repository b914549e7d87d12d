"""What the steps and the lives of requests add to a replica's counts: the scheduler's, and as pure as it is.

Each request is counted where something happens to it for the first time: admitted, its first token, its end. What
happens again, after a preemption or on another replica, is not.
"""

from bakehouse_replica.core.account import PoolTime
from bakehouse_replica.core.call import Call
from bakehouse_replica.core.counts import Counts
from bakehouse_replica.core.metric_table import (
    BATCH_FILL,
    COPIED_BLOCKS,
    KV_BLOCK_SECONDS,
    KV_BLOCKS,
    METRICS,
    PREEMPTIONS,
    PREFIX_HIT_TOKENS,
    PREFIX_QUERIED_TOKENS,
    QUEUE_TIME,
    RUNNING_SEQUENCES,
    STEP_TOKENS,
    WAITING_PROMPT_TOKENS,
    WAITING_SEQUENCES,
    Source,
)
from bakehouse_replica.core.sequence import Sequence
from bakehouse_replica.core.types import Capacity, FinishReason, ReplicaLoad
from bakehouse_replica.core.vllm_table import (
    VLLM_DECODE_TIME,
    VLLM_E2E,
    VLLM_GENERATION_TOKENS,
    VLLM_KV_USAGE,
    VLLM_METRICS,
    VLLM_PREFILL_TIME,
    VLLM_PREFIX_HITS,
    VLLM_PREFIX_QUERIES,
    VLLM_PROMPT_TOKENS,
    VLLM_QUEUE_TIME,
    VLLM_REQUEST_GENERATION_TOKENS,
    VLLM_REQUEST_PROMPT_TOKENS,
    VLLM_RUNNING,
    VLLM_SUCCESS,
    VLLM_SWAPPED,
    VLLM_TOKEN_TIME,
    VLLM_TTFT,
    VLLM_WAITING,
)

_VLLM_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.ERROR: "error",
}


def replica_counts() -> Counts:
    """Everything that a replica counts, at 0."""
    return Counts((*(metric for metric in METRICS if metric.source is Source.REPLICA), *VLLM_METRICS))


class Tally:
    """Adds to `counts`; the scheduler says what happens."""

    def __init__(self, counts: Counts, capacity: Capacity) -> None:
        self._counts = counts
        self._max_sequences = capacity.max_sequences
        self._applied_at = float("-inf")

    def admit(self, call: Call, now: float) -> None:
        """The first admission of a call; its `cached_tokens` are known."""
        call.admitted_at = now
        self._counts.observe(QUEUE_TIME, now - call.arrived_at)
        self._counts.observe(VLLM_QUEUE_TIME, now - call.arrived_at)
        if not call.request.prior_output:
            n_prompt, n_cached = len(call.request.prompt_ids), call.cached_tokens or 0
            for queried, hit in (
                (PREFIX_QUERIED_TOKENS, PREFIX_HIT_TOKENS),
                (VLLM_PREFIX_QUERIES, VLLM_PREFIX_HITS),
            ):
                self._counts.add(queried, n_prompt)
                self._counts.add(hit, n_cached)

    def preempt(self) -> None:
        """A sequence goes back into the queue."""
        self._counts.add(PREEMPTIONS)

    def depart(self, n_sequences: int, n_tokens: int, n_copies: int) -> None:
        """A step has been planned."""
        self._counts.observe(BATCH_FILL, n_sequences / self._max_sequences)
        self._counts.observe(STEP_TOKENS, n_tokens)
        if n_copies:
            self._counts.add(COPIED_BLOCKS, n_copies)

    def draw(self, n_tokens: int) -> None:
        """A step has been applied that drew so many tokens for all choices together."""
        self._counts.add(VLLM_GENERATION_TOKENS, n_tokens)

    def begin_apply(self, now: float) -> None:
        """The result of a step has come: what is drawn, and what ends by it, does so now."""
        self._applied_at = now

    def begin_output(self, call: Call) -> None:
        """The first token of a call that is drawn here."""
        now = self._applied_at
        call.first_token_at = now
        if call.request.prior_output:
            return
        assert call.admitted_at is not None, "only admitted sequences draw"
        self._counts.observe(VLLM_TTFT, now - call.arrived_at)
        self._counts.observe(VLLM_PREFILL_TIME, now - call.admitted_at)
        self._counts.add(VLLM_PROMPT_TOKENS, len(call.request.prompt_ids))

    def end(self, last: Sequence, reason: FinishReason) -> None:
        """A call has ended with its `last` choice."""
        call, counts, now = last.call, self._counts, self._applied_at
        counts.add(VLLM_SUCCESS, 1, _VLLM_REASONS[reason])
        if call.first_token_at is None or reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        n_drawn = last.n_output - len(call.request.prior_output)
        decode_s = now - call.first_token_at
        counts.observe(VLLM_E2E, now - call.arrived_at)
        counts.observe(VLLM_DECODE_TIME, decode_s)
        counts.observe(VLLM_REQUEST_PROMPT_TOKENS, len(call.request.prompt_ids))
        counts.observe(VLLM_REQUEST_GENERATION_TOKENS, n_drawn)
        if n_drawn > 1:
            counts.observe(VLLM_TOKEN_TIME, decode_s / (n_drawn - 1))

    def note(self, load: ReplicaLoad, n_preempted: int, time: PoolTime) -> None:
        """The gauges as they are now; `n_preempted`: of those that wait, how many have run before."""
        counts = self._counts
        counts.put(RUNNING_SEQUENCES, load.n_running)
        counts.put(WAITING_SEQUENCES, load.n_waiting)
        counts.put(WAITING_PROMPT_TOKENS, load.waiting_tokens)
        blocks = {"free": load.n_free_blocks, "cached": load.n_cached_blocks, "held": load.n_held_blocks}
        for state, n_blocks in blocks.items():
            counts.put(KV_BLOCKS, n_blocks, state)
        block_seconds = {"free": time.free, "cached": time.cached, "held": time.held}
        for state, n_block_seconds in block_seconds.items():
            counts.put(KV_BLOCK_SECONDS, n_block_seconds, state)
        counts.put(VLLM_RUNNING, load.n_running)
        counts.put(VLLM_WAITING, load.n_waiting)
        counts.put(VLLM_SWAPPED, n_preempted)
        counts.put(VLLM_KV_USAGE, load.n_held_blocks / sum(blocks.values()))
