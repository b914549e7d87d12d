"""Counts metrics in plain numbers: every series of the table stands from the start, at 0.

Nothing here knows who reads them; `series` is a frozen copy that may go anywhere. Not safe across threads: who
counts also takes the samples.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from bakehouse_replica.core.metric_table import Kind, Metric


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram's samples: how many were at most each bound, in the end how many there were; and their sum."""

    at_most: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class Series:
    """One series of the metric `name`, by the values of its labels."""

    name: str
    labels: tuple[str, ...]
    value: float | Distribution


class _Histogram:
    __slots__ = ("bounds", "n_in", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.n_in = [0] * (len(bounds) + 1)
        self.total = 0.0


class Counts:
    """The series of some metrics. Methods raise `KeyError` for a metric or labels that are not among them."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._histograms: dict[tuple[str, tuple[str, ...]], _Histogram] = {}
        for metric in metrics:
            for labels in metric.label_sets:
                if metric.kind is Kind.HISTOGRAM:
                    self._histograms[metric.name, labels] = _Histogram(metric.bounds)
                else:
                    self._values[metric.name, labels] = 0

    def add(self, metric: Metric, amount: float = 1, *labels: str) -> None:
        """Count `amount` more of a counter."""
        self._values[metric.name, labels] += amount

    def put(self, metric: Metric, value: float, *labels: str) -> None:
        """What a gauge is now, or what somebody else has counted of a counter so far."""
        assert (metric.name, labels) in self._values, f"{metric.name} has no series {labels}"
        self._values[metric.name, labels] = value

    def observe(self, metric: Metric, value: float, *labels: str, weight: int = 1) -> None:
        """A sample of a histogram, that counts as `weight` equal ones."""
        histogram = self._histograms[metric.name, labels]
        histogram.n_in[bisect_left(histogram.bounds, value)] += weight
        histogram.total += value * weight

    def series(self) -> tuple[Series, ...]:
        """All series as they are now."""
        values = [Series(name, labels, value) for (name, labels), value in self._values.items()]
        distributions = [
            Series(name, labels, Distribution(tuple(accumulate(histogram.n_in)), histogram.total))
            for (name, labels), histogram in self._histograms.items()
        ]
        return (*values, *distributions)
