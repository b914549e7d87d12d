"""Draws latencies, throughput and what went wrong against load."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bakehouse_replica.core.errors import StartupError

from bakehouse_cluster.bench.records import WRONG, Outcome
from bakehouse_cluster.bench.result import Load, Point, Result, require_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AXES = {"concurrency": "users at once", "rate": "requests a second", "speed": "times the trace's own speed"}
_INCHES = (13, 7)
_DPI = 144
# Loads that span more than this are drawn in steps of equal ratio.
_WIDE = 6
_INK, _MUTED, _GRID = "#1f2933", "#66727f", "#e4e8ec"
_PERCENTILES = {"p50": "#0b4f8a", "p90": "#3f8fce", "p99": "#9cc8ec"}
_TOKENS = {"output": "#0b4f8a", "input and output": "#9cc8ec"}
_OUTCOMES = {
    Outcome.SHORT: "#c9cfd6",
    Outcome.ERROR: "#c0392b",
    Outcome.SHED: "#e59f3c",
    Outcome.ABORTED: "#7d4b8f",
}


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
    """A PNG of `draw_result`. Raises as `check_plot` does."""
    check_plot([point.load for point in result.points], path)
    try:
        draw_result(result).savefig(path, dpi=_DPI, format="png")
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}") from error


def draw_result(result: Result) -> "Figure":
    """TTFT, ITL and E2E above; tokens, requests and what went wrong below: of a result with a point at least."""
    from matplotlib.figure import Figure  # an optional dependency

    points = sorted(result.points, key=lambda point: point.load.value)
    figure = Figure(figsize=_INCHES, layout="constrained")
    (ttft, itl, e2e), (tokens, requests, wrong) = figure.subplots(2, 3)
    _draw_latency(ttft, "Time to first token, ms", points, "ttft_s")
    _draw_latency(itl, "Inter-token latency, ms", points, "itl_s")
    _draw_latency(e2e, "End-to-end latency, s", points, "e2e_s", unit_s=1.0)
    _draw_curves(tokens, "Tokens a second", points, _tokens_per_s(points), _TOKENS)
    answered = {"answered": [point.summary.requests_per_s for point in points]}
    _draw_curves(requests, "Requests answered a second", points, answered, {"answered": _TOKENS["output"]})
    _draw_shares(wrong, "Requests not as asked, %", points)
    for axes in (ttft, itl, e2e, tokens, requests, wrong):
        _finish(axes, [point.load for point in points])
    there = result.environment
    figure.suptitle(
        f"{there.label or there.model}: {result.work.name}", x=0.01, ha="left", fontsize=15, color=_INK
    )
    said = f"{there.server} at {there.url}, {there.n_cpus} cores at the generator, {there.date}"
    figure.supxlabel(said, x=0.01, ha="left", fontsize=8, color=_MUTED)
    return figure


def _draw_latency(axes: "Axes", title: str, points: Sequence[Point], name: str, unit_s: float = 1e-3) -> None:
    times = [getattr(point.summary, name) for point in points]
    curves = {
        percentile: [float("nan") if one is None else getattr(one, percentile) / unit_s for one in times]
        for percentile in ("p99", "p90", "p50")
    }
    _draw_curves(axes, title, points, curves, _PERCENTILES)
    loads = [point.load.value for point in points]
    axes.fill_between(loads, curves["p50"], curves["p99"], color=_PERCENTILES["p99"], alpha=0.2, linewidth=0)


def _draw_curves(
    axes: "Axes",
    title: str,
    points: Sequence[Point],
    curves: dict[str, list[float]],
    colours: dict[str, str],
) -> None:
    loads = [point.load.value for point in points]
    for name, values in curves.items():
        axes.plot(loads, values, marker="o", markersize=4.5, linewidth=2, color=colours[name], label=name)
    axes.set_title(title)
    axes.set_ylim(0, 1.12 * max(_finite(curves.values()), default=1.0) or 1.0)
    if len(curves) > 1:
        axes.legend()


def _draw_shares(axes: "Axes", title: str, points: Sequence[Point]) -> None:
    positions = range(len(points))
    below = [0.0] * len(points)
    for outcome in WRONG:
        shares = [100 * point.summary.share(outcome) for point in points]
        axes.bar(positions, shares, 0.6, bottom=below, color=_OUTCOMES[outcome], label=str(outcome))
        below = [low + share for low, share in zip(below, shares, strict=True)]
    axes.set_title(title)
    if any(below):
        axes.set_ylim(0, min(100.0, 1.25 * max(below)))
        axes.legend(ncols=len(WRONG))
    else:
        axes.set_ylim(0, 100)
        n_requests = sum(point.summary.n_requests for point in points)
        said = f"none of {n_requests:,}"
        axes.text(0.5, 0.5, said, transform=axes.transAxes, ha="center", va="center", color=_MUTED, fontsize=12)
    axes.set_xticks(positions, [f"{point.load.value:g}" for point in points])


def _finish(axes: "Axes", loads: Sequence[Load]) -> None:
    """What all panels have in common."""
    axes.set_title(axes.get_title(), loc="left", fontsize=11, color=_INK, pad=8)
    axes.title.set_text("")
    axes.set_xlabel(_AXES[loads[0].kind], color=_MUTED)
    axes.tick_params(colors=_MUTED, length=0)
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_MUTED)
    legend = axes.get_legend()
    if legend is not None:
        legend.set_frame_on(False)
        for text in legend.get_texts():
            text.set_color(_INK)
    if axes.patches:  # bars stand side by side, at equal distances
        return
    values = [load.value for load in loads]
    if values[-1] > _WIDE * values[0]:
        axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:g}" for value in values], minor=False)
    axes.set_xticks([], minor=True)


def _tokens_per_s(points: Sequence[Point]) -> dict[str, list[float]]:
    return {
        "input and output": [point.summary.total_tokens_per_s for point in points],
        "output": [point.summary.output_tokens_per_s for point in points],
    }


def _finite(curves: Iterable[list[float]]) -> list[float]:
    return [value for curve in curves for value in curve if value == value]  # NaN is not equal to itself
