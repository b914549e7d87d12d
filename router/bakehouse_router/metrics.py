"""What a gateway counts for Prometheus; the names stand here and nowhere else.

One call gives at most one sample to each histogram, however often its requests were preempted or retried.
"""

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from bakehouse_replica.core.types import ReplicaStatus
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

COMPLETE = "complete"
# From a cached prompt on a GPU to a long queue on a laptop.
_LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_REPLICA_GAUGES = {
    "n_running": ("bakehouse_running_sequences", "Sequences in the replica's batch."),
    "n_waiting": ("bakehouse_waiting_sequences", "Sequences in the replica's queue."),
    "waiting_tokens": ("bakehouse_waiting_prompt_tokens", "Prompt tokens that the replica has still to compute."),
    "n_free_blocks": ("bakehouse_free_blocks", "KV blocks that hold nothing."),
    "n_cached_blocks": ("bakehouse_cached_blocks", "KV blocks that only the prefix cache holds."),
    "n_held_blocks": ("bakehouse_held_blocks", "KV blocks that live sequences hold."),
}


class Queue(Protocol):
    """What waits for its first token."""

    n_requests: int
    n_tokens: int


class CallUsageLike(Protocol):
    """Token counts of a call."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...


class CallWatch:
    """One call's stop-watch; `end` it exactly once."""

    def __init__(self, metrics: "GatewayMetrics", kind: str, begun_at: float) -> None:
        self._metrics = metrics
        self._kind = kind
        self._begun_at = begun_at
        self._has_token = False

    def see_token(self) -> None:
        """The call has put out a token; only the first time counts."""
        if not self._has_token:
            self._has_token = True
            self._metrics.first_token.labels(self._kind).observe(self._metrics.clock() - self._begun_at)

    def end(self, outcome: str, usage: CallUsageLike) -> None:
        """The call is over: `complete`, `cancelled`, or the name of the error that ended it."""
        metrics = self._metrics
        metrics.calls.labels(self._kind, outcome).inc()
        metrics.duration.labels(self._kind).observe(metrics.clock() - self._begun_at)
        if outcome != COMPLETE and not self._has_token:
            return  # how much of its prompt was computed, nobody has told
        metrics.prompt_tokens.labels("computed").inc(usage.prompt_tokens - usage.cached_tokens)
        metrics.prompt_tokens.labels("cached").inc(usage.cached_tokens)
        metrics.output_tokens.inc(usage.completion_tokens)


class GatewayMetrics:
    """The counters of one gateway process. `clock` must be the event loop's, which is `time.monotonic`."""

    def __init__(self, *, queue: Queue | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._registry = CollectorRegistry()
        registry = self._registry
        self.calls = Counter("bakehouse_calls", "Calls that have ended.", ["kind", "outcome"], registry=registry)
        self.first_token = Histogram(
            "bakehouse_time_to_first_token_seconds",
            "From a call's arrival to its first output token; one sample a call.",
            ["kind"],
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.duration = Histogram(
            "bakehouse_call_duration_seconds",
            "From a call's arrival to its end.",
            ["kind"],
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "bakehouse_prompt_tokens", "Prompt tokens of ended calls.", ["source"], registry=registry
        )
        self.output_tokens = Counter("bakehouse_output_tokens", "Output tokens of ended calls.", registry=registry)
        if queue is not None:
            waiting = Gauge(
                "bakehouse_queued_requests", "Requests that wait for their first token.", registry=registry
            )
            waiting.set_function(lambda: queue.n_requests)
            tokens = Gauge(
                "bakehouse_queued_prompt_tokens", "Prompt tokens of waiting requests.", registry=registry
            )
            tokens.set_function(lambda: queue.n_tokens)
        self._serves = Gauge(
            "bakehouse_replica_serves", "Whether the replica serves.", ["replica"], registry=registry
        )
        self._loads = {
            field: Gauge(name, about, ["replica"], registry=registry)
            for field, (name, about) in _REPLICA_GAUGES.items()
        }

    content_type = CONTENT_TYPE_LATEST

    def watch(self, kind: str, begun_at: float | None = None) -> CallWatch:
        """The stop-watch of a call that arrived at `begun_at`, None for now; `kind`: `chat`, `completion`, …"""
        return CallWatch(self, kind, self.clock() if begun_at is None else begun_at)

    def exposition(self, statuses: Iterable[ReplicaStatus]) -> bytes:
        """Everything in the text format of Prometheus, with the replicas as they are now."""
        for gauge in (self._serves, *self._loads.values()):
            gauge.clear()  # a replica that has gone must not stay for ever
        for status in statuses:
            replica_id = status.card.replica_id
            self._serves.labels(replica_id).set(status.problem is None)
            for field, gauge in self._loads.items():
                gauge.labels(replica_id).set(getattr(status.load, field))
        return generate_latest(self._registry)
