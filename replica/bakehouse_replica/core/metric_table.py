"""Every metric that bakehouse exports: its name, kind, unit, labels, meaning, and who counts it.

Nothing is counted under a name that does not stand here, and labels have the values that stand here and no others,
so each metric has a fixed number of series; but for those by tenant, whose names arrive, up to a limit. Ray's
agents export `NAME` as `ray_NAME`, with the labels `application`, `deployment` and `replica` of Serve; a gateway's
`/metrics` as `NAME`, those of replicas with the label `replica`. Counters end in `_total` in both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import product


class Kind(StrEnum):
    """What kind of metric it is, as Prometheus has them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Source(StrEnum):
    """Who counts it."""

    GATEWAY = "gateway"
    REPLICA = "replica"


@dataclass(frozen=True, slots=True)
class Label:
    """A label and all the values that it can have; or, where they only arrive, in words which ones may."""

    name: str
    values: tuple[str, ...] = ()
    arriving: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric; `bounds` are the upper bounds of a histogram's buckets, without the infinite one."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    source: Source
    labels: tuple[Label, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def series_names(self) -> tuple[str, ...]:
        """The names under which Prometheus has its series, but for the `ray_` before Ray's."""
        match self.kind:
            case Kind.COUNTER:
                return (f"{self.name}_total",)
            case Kind.GAUGE:
                return (self.name,)
            case Kind.HISTOGRAM:
                return (f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count")

    @property
    def label_sets(self) -> tuple[tuple[str, ...], ...]:
        """The label values of each of its series that stands from the start: of one whose labels arrive, none."""
        return tuple(product(*(label.values for label in self.labels)))


COMPLETE, CANCELLED, INTERNAL_ERROR = "complete", "cancelled", "internal_error"
# The codes of errors as clients see them (`bakehouse_router.api.errors`).
ERROR_CODES = (
    "model_not_found",
    "request_not_found",
    "request_too_large",
    "context_length_exceeded",
    "invalid_request",
    "invalid_api_key",
    "overloaded",
    "deadline_exceeded",
    "engine_dead",
    "unavailable",
    INTERNAL_ERROR,
)
# Why a replica was chosen (`bakehouse_router.policy.pick`).
ROUTING_REASONS = ("only_one", "prefix", "load", "skipped_busy", "all_busy", "no_news")

OUTCOMES = (COMPLETE, CANCELLED, *ERROR_CODES)
# Of a gateway. With 18 series each, 4,608 in all.
MAX_TENANT_SERIES = 256
OTHER_TENANTS = "other"

_CALL = Label("kind", ("chat", "completion"))
_OUTCOME = Label("outcome", OUTCOMES)
_TENANT = Label(
    "tenant",
    arriving=f"names of the keys file, empty without one; from the {MAX_TENANT_SERIES + 1}th on `{OTHER_TENANTS}`",
)
# From a cached prompt on a GPU to a long queue on a laptop.
LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
QUEUE_S = (0.001, 0.005, *LATENCY_S)
TOKEN_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
_PHASE_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_TENTHS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_STEP_TOKENS = (1.0, 4.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)


def named(source: Source, prefix: str) -> Callable[..., Metric]:
    """Makes metrics of one source: name, kind, unit, meaning, labels, and `bounds` by keyword."""

    def metric(
        name: str, kind: Kind, unit: str, meaning: str, *labels: Label, bounds: tuple[float, ...] = ()
    ) -> Metric:
        return Metric(
            name=prefix + name, kind=kind, unit=unit, meaning=meaning, source=source, labels=labels, bounds=bounds
        )

    return metric


_of_gateway, _of_replica = named(Source.GATEWAY, "bakehouse_"), named(Source.REPLICA, "bakehouse_")

REQUESTS = _of_gateway(
    "requests",
    Kind.COUNTER,
    "requests",
    "Requests that were begun and have ended: `complete`, `cancelled` where the client left, or the error's code.",
    _CALL,
    _OUTCOME,
)
TIME_TO_FIRST_TOKEN = _of_gateway(
    "time_to_first_token_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "From a request's arrival to its first output token: one sample a request, none for one that ended before.",
    _CALL,
    bounds=LATENCY_S,
)
INTER_TOKEN = _of_gateway(
    "inter_token_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "Between two output tokens of a choice. Tokens that arrive in one message share the time since the last one.",
    bounds=TOKEN_GAP_S,
)
REQUEST_DURATION = _of_gateway(
    "request_duration_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "From a request's arrival to its end, whatever its outcome.",
    _CALL,
    bounds=LATENCY_S,
)
PROMPT_TOKENS = _of_gateway(
    "prompt_tokens",
    Kind.COUNTER,
    "tokens",
    "Prompt tokens of ended requests, without those that ended before their first token.",
    Label("source", ("computed", "cached")),
)
GENERATED_TOKENS = _of_gateway(
    "generated_tokens", Kind.COUNTER, "tokens", "Output tokens, counted as they arrive."
)
QUEUED_REQUESTS = _of_gateway(
    "queued_requests", Kind.GAUGE, "requests", "Requests of this gateway that wait for their first token."
)
QUEUED_PROMPT_TOKENS = _of_gateway(
    "queued_prompt_tokens", Kind.GAUGE, "tokens", "Prompt tokens of those requests."
)
REJECTIONS = _of_gateway(
    "rejections",
    Kind.COUNTER,
    "requests",
    "Requests that were answered by an error alone, by its code. Those that were begun also end up among "
    "`bakehouse_requests`.",
    Label("reason", ERROR_CODES),
)
ROUTING_DECISIONS = _of_gateway(
    "routing_decisions",
    Kind.COUNTER,
    "decisions",
    "Choices of a replica: it alone served (`only_one`), had more of the prompt cached than others (`prefix`), "
    "was chosen by its load (`load`), or a cheaper one held too many sequences (`skipped_busy`), or all did "
    "(`all_busy`), or nothing was known of any (`no_news`).",
    Label("reason", ROUTING_REASONS),
)

TENANT_BLOCK_SECONDS = _of_gateway(
    "tenant_block_seconds",
    Kind.COUNTER,
    "block-seconds",
    "KV blocks that a tenant's requests have held, over time; of a shared block an equal part for each holder. "
    "Counted when a request ends.",
    _TENANT,
)
TENANT_PROMPT_TOKENS = _of_gateway(
    "tenant_prompt_tokens",
    Kind.COUNTER,
    "tokens",
    "Prompt tokens of a tenant's requests, `computed` or `cached`; `recomputed`: prompt and output tokens, once "
    "more after a preemption or the loss of a replica. Counted when a request ends.",
    _TENANT,
    Label("source", ("computed", "cached", "recomputed")),
)
TENANT_GENERATED_TOKENS = _of_gateway(
    "tenant_generated_tokens",
    Kind.COUNTER,
    "tokens",
    "Output tokens of a tenant's requests, counted as they arrive.",
    _TENANT,
)
TENANT_REQUESTS = _of_gateway(
    "tenant_requests",
    Kind.COUNTER,
    "requests",
    "A tenant's requests, counted as those of `bakehouse_requests`.",
    _TENANT,
    _OUTCOME,
)

REPLICA_SERVES = _of_replica("replica_serves", Kind.GAUGE, "0 or 1", "Whether the replica serves.")
QUEUE_TIME = _of_replica(
    "queue_time_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "From a request's arrival at the replica to its first admission to the batch: one sample a request.",
    bounds=QUEUE_S,
)
RUNNING_SEQUENCES = _of_replica("running_sequences", Kind.GAUGE, "sequences", "Sequences in the batch.")
WAITING_SEQUENCES = _of_replica(
    "waiting_sequences", Kind.GAUGE, "sequences", "Sequences in the queue, preempted ones included."
)
WAITING_PROMPT_TOKENS = _of_replica(
    "waiting_prompt_tokens",
    Kind.GAUGE,
    "tokens",
    "Tokens that prefills have still to compute, queued and running.",
)
STEP_SECONDS = _of_replica(
    "step_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "Time of the engine's thread in each part of a step: `execute` ends with the result, `publish` hands it out.",
    Label("phase", ("plan", "execute", "publish")),
    bounds=_PHASE_S,
)
BATCH_FILL = _of_replica(
    "batch_fill_ratio",
    Kind.HISTOGRAM,
    "ratio",
    "Sequences in a step, as a share of `max_sequences`; one sample a step.",
    bounds=_TENTHS,
)
STEP_TOKENS = _of_replica(
    "step_tokens", Kind.HISTOGRAM, "tokens", "Tokens computed in a step, prefill and decode.", bounds=_STEP_TOKENS
)
KV_BLOCKS = _of_replica(
    "kv_blocks",
    Kind.GAUGE,
    "blocks",
    "KV blocks: `free` ones hold nothing, `cached` ones only a prefix for later, `held` ones live sequences.",
    Label("state", ("free", "cached", "held")),
)
KV_BLOCK_SECONDS = _of_replica(
    "kv_block_seconds",
    Kind.COUNTER,
    "block-seconds",
    "KV blocks over time, by state. `held` is what requests are billed; `free` and `cached` are nobody's.",
    Label("state", ("free", "cached", "held")),
)
KV_CONSISTENT = _of_replica(
    "kv_consistent",
    Kind.GAUGE,
    "0 or 1",
    "0 once an audit of sequences and KV blocks has failed: answers may be wrong since.",
)
PREFIX_QUERIED_TOKENS = _of_replica(
    "prefix_queried_tokens",
    Kind.COUNTER,
    "tokens",
    "Prompt tokens of requests at their first admission: not after a preemption, nor after the loss of a replica.",
)
PREFIX_HIT_TOKENS = _of_replica(
    "prefix_hit_tokens", Kind.COUNTER, "tokens", "Those of them that were found in the prefix cache."
)
COPIED_BLOCKS = _of_replica(
    "copied_blocks", Kind.COUNTER, "blocks", "KV blocks copied before a write, as others share them."
)
PREEMPTIONS = _of_replica(
    "preemptions", Kind.COUNTER, "sequences", "Sequences put back into the queue, to be computed anew."
)

METRICS: tuple[Metric, ...] = (
    REQUESTS,
    REJECTIONS,
    TIME_TO_FIRST_TOKEN,
    INTER_TOKEN,
    REQUEST_DURATION,
    PROMPT_TOKENS,
    GENERATED_TOKENS,
    QUEUED_REQUESTS,
    QUEUED_PROMPT_TOKENS,
    ROUTING_DECISIONS,
    TENANT_BLOCK_SECONDS,
    TENANT_PROMPT_TOKENS,
    TENANT_GENERATED_TOKENS,
    TENANT_REQUESTS,
    REPLICA_SERVES,
    RUNNING_SEQUENCES,
    WAITING_SEQUENCES,
    WAITING_PROMPT_TOKENS,
    QUEUE_TIME,
    STEP_SECONDS,
    BATCH_FILL,
    STEP_TOKENS,
    PREEMPTIONS,
    KV_BLOCKS,
    KV_BLOCK_SECONDS,
    KV_CONSISTENT,
    COPIED_BLOCKS,
    PREFIX_QUERIED_TOKENS,
    PREFIX_HIT_TOKENS,
)
