"""Draws latency against load, and throughput beside it."""

from collections.abc import Sequence
from pathlib import Path

from bakehouse_replica.core.errors import StartupError

from bakehouse_cluster.bench.result import Load, Point, Result, require_writable

_AXES = {"concurrency": "users at once", "rate": "requests a second", "speed": "speed of the trace"}
_INCHES = (12, 3.6)
_DPI = 120


def check_plot(loads: Sequence[Load], path: Path) -> None:
    """Before a measurement, so that none is in vain: raises `StartupError` where its plot could not be drawn."""
    try:
        import matplotlib  # noqa: F401 - an optional dependency
    except ImportError:
        raise StartupError("--plot needs matplotlib: pip install 'bakehouse[bench]'") from None
    kinds = sorted({load.kind for load in loads})
    if len(kinds) > 1:
        raise StartupError(f"--plot needs loads of one kind, not of {' and '.join(kinds)}")
    require_writable(path)


def plot_result(result: Result, path: Path) -> None:
    """A PNG: TTFT, ITL and throughput over the load, of at least one point. Raises as `check_plot` does."""
    check_plot([point.load for point in result.points], path)
    from matplotlib.figure import Figure  # an optional dependency

    kind = result.points[0].load.kind
    points = sorted(result.points, key=lambda point: point.load.value)
    figure = Figure(figsize=_INCHES, layout="constrained")
    ttft, itl, throughput = figure.subplots(1, 3)
    loads = [point.load.value for point in points]
    for axes, title, curves in (
        (ttft, "time to first token, ms", _percentiles(points, "ttft_s")),
        (itl, "inter-token latency, ms", _percentiles(points, "itl_s")),
        (throughput, "tokens a second", _throughputs(points)),
    ):
        for name, values in curves.items():
            axes.plot(loads, values, marker="o", label=name)
        axes.set_title(title)
        axes.set_xlabel(_AXES[kind])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    name = result.environment.label or result.environment.model
    figure.suptitle(f"{name}: {result.work.name}")
    try:
        figure.savefig(path, dpi=_DPI, format="png")
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}") from error


def _percentiles(points: list[Point], name: str) -> dict[str, list[float]]:
    times = [getattr(point.summary, name) for point in points]
    return {
        percentile: [float("nan") if one is None else 1000 * getattr(one, percentile) for one in times]
        for percentile in ("p50", "p99")
    }


def _throughputs(points: list[Point]) -> dict[str, list[float]]:
    return {
        "output": [point.summary.output_tokens_per_s for point in points],
        "input and output": [point.summary.total_tokens_per_s for point in points],
    }
