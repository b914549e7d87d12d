"""What a gateway counts, and how Prometheus reads it from the gateway itself; names are those of the one table.

One call gives at most one sample to each histogram of calls, however often its requests were preempted or retried.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from bakehouse_replica.core.counts import Counts, Distribution, Series
from bakehouse_replica.core.metric_table import (
    COMPLETE,
    GENERATED_TOKENS,
    INTER_TOKEN,
    METRICS,
    PROMPT_TOKENS,
    QUEUED_PROMPT_TOKENS,
    QUEUED_REQUESTS,
    REJECTIONS,
    REPLICA_SERVES,
    REQUEST_DURATION,
    REQUESTS,
    ROUTING_DECISIONS,
    TIME_TO_FIRST_TOKEN,
    Kind,
    Metric,
    Source,
)
from bakehouse_replica.core.types import Cost, ReplicaStatus
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from bakehouse_router.api.errors import error_code
from bakehouse_router.tenants import Tenants

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


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


class CallWatch:
    """One call's stop-watch; `end` it exactly once."""

    def __init__(self, metrics: "GatewayMetrics", kind: str, tenant: str, begun_at: float) -> None:
        self._metrics = metrics
        self._kind = kind
        self._used = metrics.tenants.used_by(tenant)
        self._begun_at = begun_at
        self._heard_at: dict[int, float] = {}  # by prompt: when its latest tokens came

    def see_tokens(self, prompt: int, n_tokens: int, n_choices: int) -> None:
        """A message has brought so many tokens of one of the call's prompts, for so many choices together."""
        counts, now, heard_at = self._metrics.counts, self._metrics.clock(), self._heard_at.get(prompt)
        if not self._heard_at:
            counts.observe(TIME_TO_FIRST_TOKEN, now - self._begun_at, self._kind)
        if heard_at is not None:
            counts.observe(INTER_TOKEN, (now - heard_at) * n_choices / n_tokens, weight=n_tokens)
        self._heard_at[prompt] = now
        counts.add(GENERATED_TOKENS, n_tokens)
        self._used.generated_tokens += n_tokens

    def end(self, outcome: str, usage: CallUsageLike, cost: Cost | None = None) -> None:
        """The call is over: `complete`, `cancelled`, or the code of the error that ended it.

        `cost`: what replicas have told that it has cost them, None where none has.
        """
        counts = self._metrics.counts
        self._used.outcomes[outcome] += 1
        if cost is not None:
            self._used.pay(cost)
        counts.add(REQUESTS, 1, self._kind, outcome)
        counts.observe(REQUEST_DURATION, self._metrics.clock() - self._begun_at, self._kind)
        if outcome != COMPLETE and not self._heard_at:
            return  # how much of its prompt was computed, nobody has told
        counts.add(PROMPT_TOKENS, usage.prompt_tokens - usage.cached_tokens, "computed")
        counts.add(PROMPT_TOKENS, usage.cached_tokens, "cached")


class GatewayMetrics:
    """The counts of one gateway process. `clock` must be the event loop's, which is `time.monotonic`.

    `decisions`: how often a replica was chosen, by the reason.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(
        self,
        *,
        queue: Queue | None = None,
        decisions: Callable[[], Mapping[str, int]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.counts = Counts(metric for metric in METRICS if metric.source is Source.GATEWAY)
        self.tenants = Tenants()
        self._queue = queue
        self._decisions = decisions

    def watch(self, kind: str, begun_at: float | None = None, tenant: str = "") -> CallWatch:
        """The stop-watch of a tenant's call that arrived at `begun_at`, None for now.

        `kind`: `chat` or `completion`.
        """
        return CallWatch(self, kind, tenant, self.clock() if begun_at is None else begun_at)

    def pay(self, tenant: str, cost: Cost) -> None:
        """What a replica has told late, of a request that was over before: its client had left, or had enough."""
        self.tenants.used_by(tenant).pay(cost)

    def reject(self, error: Exception) -> None:
        """A request gets this error and nothing else."""
        self.counts.add(REJECTIONS, 1, error_code(error))

    def series(self, only_tenant: str | None = None) -> tuple[Series, ...]:
        """All that this gateway counts, as it is now; `only_tenant`: of what it counts by tenant, this one's."""
        if self._queue is not None:
            self.counts.put(QUEUED_REQUESTS, self._queue.n_requests)
            self.counts.put(QUEUED_PROMPT_TOKENS, self._queue.n_tokens)
        for reason, n_choices in self._decisions().items():
            self.counts.put(ROUTING_DECISIONS, n_choices, reason)
        return (*self.counts.series(), *self.tenants.series(only_tenant))

    def exposition(self, statuses: Iterable[ReplicaStatus], only_tenant: str | None = None) -> bytes:
        """`series` in the text format of Prometheus, with what the replicas have told last."""
        registry = CollectorRegistry()
        registry.register(_Told(self.series(only_tenant), statuses))
        return generate_latest(registry)


class _Told(Collector):
    """One scrape: the series of the gateway, and those of replicas with the label `replica`."""

    def __init__(self, own: Iterable[Series], statuses: Iterable[ReplicaStatus]) -> None:
        self._families = {metric.name: _family(metric) for metric in METRICS}
        for series in own:
            self._add(series, ())
        for status in statuses:
            replica = (status.card.replica_id,)
            self._add(Series(REPLICA_SERVES.name, (), float(status.problem is None)), replica)
            for series in status.counted:
                if series.name != REPLICA_SERVES.name:
                    self._add(series, replica)

    def collect(self) -> Iterator[Family]:
        """Those that have any series."""
        return (family for family in self._families.values() if family.samples)

    def _add(self, series: Series, replica: tuple[str, ...]) -> None:
        family, labels, value = self._families[series.name], (*series.labels, *replica), series.value
        if not isinstance(value, Distribution):
            assert not isinstance(family, HistogramMetricFamily), f"{series.name} is a histogram"
            family.add_metric(labels, value)
            return
        assert isinstance(family, HistogramMetricFamily), f"{series.name} is no histogram"
        bounds = (*(str(bound) for bound in _BOUNDS[series.name]), "+Inf")
        family.add_metric(labels, list(zip(bounds, map(float, value.at_most), strict=True)), value.total)


_BOUNDS = {metric.name: metric.bounds for metric in METRICS}


def _family(metric: Metric) -> Family:
    labels = [label.name for label in metric.labels]
    if metric.source is Source.REPLICA:
        labels.append("replica")
    match metric.kind:
        case Kind.COUNTER:
            return CounterMetricFamily(metric.name, metric.meaning, labels=labels)
        case Kind.GAUGE:
            return GaugeMetricFamily(metric.name, metric.meaning, labels=labels)
        case Kind.HISTOGRAM:
            return HistogramMetricFamily(metric.name, metric.meaning, labels=labels)
