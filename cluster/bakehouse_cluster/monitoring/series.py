"""PromQL over metrics of the table, as panels ask for it.

A dashboard's variables choose among either replicas or gateways; metrics of the others it shows for the whole
application.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bakehouse_replica.core.metric_table import Kind, Metric, Source

from bakehouse_cluster.monitoring.grafana import Curve, Panel, Variable

# Four scrapes at least, as Grafana knows from its data source; Ray exports every 10 s.
WINDOW = "$__rate_interval"
APPLICATION = 'ray_io_cluster=~"$cluster", application=~"$application"'
PROCESS = f'{APPLICATION}, deployment=~"$deployment", replica=~"$replica"'
UNITS = {
    "seconds": "s",
    "ratio": "percentunit",
    "requests": "short",
    "sequences": "short",
    "blocks": "short",
    "tokens": "short",
    "0 or 1": "short",
}
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Series:
    """Expressions and panels of a dashboard whose variables choose among the processes of `chosen`."""

    chosen: Source

    def select(self, metric: Metric, part: int = 0, where: str = "") -> str:
        """The series of a metric; `part` of a histogram: 0 its buckets, 1 the sum, 2 the count.

        `where`: a further condition, such as `state="held"`.
        """
        filters = PROCESS if metric.source is self.chosen else APPLICATION
        own = f"{filters}, {where}" if where else filters
        return f"ray_{metric.series_names[part]}{{{own}}}"

    def rate(self, metric: Metric, by: str = "", part: int = 0, where: str = "") -> str:
        """Per second."""
        return f"sum{_by(by)}(rate({self.select(metric, part, where)}[{WINDOW}]))"

    def level(self, metric: Metric, by: str = "", where: str = "") -> str:
        """A gauge, now."""
        return f"sum{_by(by)}({self.select(metric, where=where)})"

    def mean(self, metric: Metric, by: str = "") -> str:
        """Of a histogram's samples."""
        return f"{self.rate(metric, by, part=1)} / {self.rate(metric, by, part=2)}"

    def quantile(self, metric: Metric, quantile: float, by: str = "") -> str:
        """Of a histogram's samples."""
        return f"histogram_quantile({quantile}, {self.rate(metric, f'{by}, le' if by else 'le')})"

    def rates(self, title: str, *metrics: Metric, by: str = "", is_stacked: bool = False) -> Panel:
        """How often, per second; a counter."""
        unit = f"suffix: {metrics[0].unit}/s"
        curves = tuple(
            Curve(expression=self.rate(metric, by), legend=_legend(metric, by, metrics)) for metric in metrics
        )
        return Panel(title=title, description=_said(*metrics), unit=unit, curves=curves, is_stacked=is_stacked)

    def levels(self, title: str, *metrics: Metric, by: str = "", is_stacked: bool = False) -> Panel:
        """Gauges."""
        curves = tuple(
            Curve(expression=self.level(metric, by), legend=_legend(metric, by, metrics)) for metric in metrics
        )
        unit = UNITS[metrics[0].unit]
        return Panel(title=title, description=_said(*metrics), unit=unit, curves=curves, is_stacked=is_stacked)

    def quantiles(self, title: str, metric: Metric, by: str = "") -> Panel:
        """The median, one in ten and one in a hundred of a histogram's samples."""
        assert metric.kind is Kind.HISTOGRAM, metric.name
        suffix = f" {{{{{by}}}}}" if by else ""
        curves = tuple(
            Curve(expression=self.quantile(metric, quantile, by), legend=f"p{quantile * 100:.0f}{suffix}")
            for quantile in QUANTILES
        )
        return Panel(title=title, description=_said(metric), unit=UNITS[metric.unit], curves=curves)

    def means(self, title: str, metric: Metric, by: str, is_stacked: bool = False) -> Panel:
        """The mean of a histogram's samples."""
        assert metric.kind is Kind.HISTOGRAM, metric.name
        curve = Curve(expression=self.mean(metric, by), legend=f"{{{{{by}}}}}")
        unit = UNITS[metric.unit]
        return Panel(title=title, description=_said(metric), unit=unit, curves=(curve,), is_stacked=is_stacked)


def shares(title: str, description: str, *curves: Curve) -> Panel:
    """Parts of a whole, 0 to 1."""
    return Panel(title=title, description=description, unit="percentunit", curves=curves, maximum=1)


def variables_of(metric: Metric, process: str) -> tuple[Variable, ...]:
    """Those that choose among the processes that have the metric; `process` is what they are called."""
    name = f"ray_{metric.series_names[0]}"
    return (
        Variable(name="cluster", title="Ray cluster on Kubernetes", of=name, label="ray_io_cluster"),
        Variable(name="application", title="Application", of=name, label="application"),
        Variable(name="deployment", title="Deployment", of=f"{name}{{{APPLICATION}}}", label="deployment"),
        Variable(
            name="replica",
            title=process,
            of=f'{name}{{{APPLICATION}, deployment=~"$deployment"}}',
            label="replica",
        ),
    )


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""


def _said(*metrics: Metric) -> str:
    """What the table says of them."""
    if len(metrics) == 1:
        return metrics[0].meaning
    return "\n".join(f"{metric.name}: {metric.meaning}" for metric in metrics)


def _legend(metric: Metric, by: str, drawn: Sequence[Metric]) -> str:
    """The label's value, the metric's name where several are drawn, or both."""
    label = f"{{{{{by}}}}}"
    name = metric.name.removeprefix("bakehouse_").replace("_", " ")
    if len(drawn) == 1:
        return label if by else name
    return f"{name} {label}" if by else name
