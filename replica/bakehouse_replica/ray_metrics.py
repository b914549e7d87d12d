"""Hands what a Serve replica counts over to Ray's metrics, which its node's agent shows to Prometheus.

Each period everything is handed over anew, because Ray forgets a gauge after the export that follows. A histogram
goes as the series that Prometheus has of one, each a gauge: Ray's own takes its samples one by one, at 14 us each
(measured; a gauge takes 1.3 us), where a period may have ten thousand of them.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import cast

from ray.serve.metrics import Counter, Gauge

from bakehouse_replica.core.counts import Distribution, Series
from bakehouse_replica.core.metric_table import Kind, Metric

logger = logging.getLogger(__name__)

PERIOD_S = 1.0  # Ray exports every 5 or 10 s, and gauges must have been set since the last time
_INFINITE = "+Inf"


class RayMetrics:
    """Some metrics of the table as Ray's. Only for processes of Serve's replicas, whose tags are added."""

    def __init__(self, metrics: Iterable[Metric], tags: Mapping[str, str] | None = None) -> None:
        """`tags` are added to each series."""
        self._metrics = {metric.name: metric for metric in metrics}
        self._tags = dict(tags or {})
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._counted: dict[tuple[str, tuple[str, ...]], float] = {}
        for metric in self._metrics.values():
            self._declare(metric)

    def push(self, series: Iterable[Series]) -> None:
        """Hands over those of the series that belong to these metrics."""
        for one in series:
            metric = self._metrics.get(one.name)
            if metric is None:
                continue
            tags = self._tags | {label.name: value for label, value in zip(metric.labels, one.labels, strict=True)}
            if isinstance(one.value, Distribution):
                self._set_distribution(metric, one.value, tags)
            elif metric.kind is Kind.COUNTER:
                self._count(one, one.value, tags)
            else:
                self._gauges[metric.name].set(one.value, tags)

    def _declare(self, metric: Metric) -> None:
        keys = (*self._tags, *(label.name for label in metric.labels))
        if metric.kind is Kind.COUNTER:
            self._counters[metric.name] = Counter(metric.name, metric.meaning, _as_serve_types(keys))
        elif metric.kind is Kind.GAUGE:
            self._add_gauge(metric.name, metric.meaning, keys)
        else:
            bucket, total, count = metric.series_names
            self._add_gauge(bucket, metric.meaning, (*keys, "le"))
            self._add_gauge(total, metric.meaning, keys)
            self._add_gauge(count, metric.meaning, keys)

    def _add_gauge(self, name: str, meaning: str, keys: tuple[str, ...]) -> None:
        self._gauges[name] = Gauge(name, meaning, _as_serve_types(keys))

    def _count(self, series: Series, value: float, tags: dict[str, str]) -> None:
        key, counter = (series.name, series.labels), self._counters[series.name]
        if key not in self._counted:
            # `inc` refuses 0, but a series that begins at 1 never shows an increase from 0 to 1.
            counter._record(value, tags)
        elif value > self._counted[key]:
            counter.inc(value - self._counted[key], tags)
        self._counted[key] = value

    def _set_distribution(self, metric: Metric, value: Distribution, tags: dict[str, str]) -> None:
        buckets, total, count = (self._gauges[name] for name in metric.series_names)
        for bound, n_samples in zip((*map(str, metric.bounds), _INFINITE), value.at_most, strict=True):
            buckets.set(n_samples, tags | {"le": bound})
        total.set(value.total, tags)
        count.set(value.at_most[-1], tags)


def _as_serve_types(keys: tuple[str, ...]) -> tuple[str]:
    return cast("tuple[str]", keys)  # Serve means any number, and writes one


async def push_for_ever(groups: Iterable[RayMetrics], read: Callable[[], Iterable[Series]]) -> None:
    """Hands over what `read` returns, once a period, until it is cancelled."""
    groups = tuple(groups)
    while True:
        series = tuple(read())
        for group in groups:
            group.push(series)
        await asyncio.sleep(PERIOD_S)


def log_end(pushing: asyncio.Task[None]) -> None:
    """For `add_done_callback`: says aloud where it was not a cancel. No reason to stop serving."""
    if not pushing.cancelled() and (error := pushing.exception()) is not None:
        logger.error("no more metrics will come from this process", exc_info=error)
