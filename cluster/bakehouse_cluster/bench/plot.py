"""Draws latencies, throughput and what went wrong against load."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bakehouse_replica.core.errors import StartupError

from bakehouse_cluster.bench.panels import (
    DARK,
    DPI,
    LIGHT,
    draw_curves,
    draw_latency,
    draw_shares,
    finish,
    six_panels,
)
from bakehouse_cluster.bench.records import WRONG
from bakehouse_cluster.bench.result import Load, Point, Result, require_writable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_AXES = {"concurrency": "users at once", "rate": "requests a second", "speed": "times the trace's own speed"}
_TOKENS = {"output": DARK, "input and output": LIGHT}


def check_plot(loads: Sequence[Load], path: Path) -> None:
    """Before a measurement, so that none is in vain: raises `StartupError` where its plot could not be drawn."""
    require_drawable(path)
    kinds = sorted({load.kind for load in loads})
    if len(kinds) > 1:
        raise StartupError(f"--plot needs loads of one kind, not of {' and '.join(kinds)}")


def require_drawable(path: Path) -> None:
    """Raises `StartupError` where no plot can be drawn, or none be written at `path`."""
    try:
        import matplotlib  # noqa: F401 - an optional dependency
    except ImportError:
        raise StartupError("--plot needs matplotlib: pip install 'bakehouse[bench]'") from None
    require_writable(path)


def plot_result(result: Result, path: Path) -> None:
    """A PNG of `draw_result`. Raises as `check_plot` does."""
    check_plot([point.load for point in result.points], path)
    save_figure(draw_result(result), path)


def save_figure(figure: "Figure", path: Path) -> None:
    """As a PNG. Raises `StartupError` where it cannot be written."""
    try:
        figure.savefig(path, dpi=DPI, format="png")
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}") from error


def draw_result(result: Result) -> "Figure":
    """TTFT, ITL and E2E above; tokens, requests and what went wrong below: of a result with a point at least."""
    points = sorted(result.points, key=lambda point: point.load.value)
    loads = [point.load.value for point in points]
    summaries = [point.summary for point in points]
    there = result.environment
    figure, panels = six_panels(
        f"{there.label or there.model}: {result.work.name}",
        f"{there.server} at {there.url}, {there.n_cpus} cores at the generator, {there.date}",
    )
    ttft, itl, e2e, tokens, requests, wrong = panels
    draw_latency(ttft, "Time to first token, ms", loads, [summary.ttft_s for summary in summaries])
    draw_latency(itl, "Inter-token latency, ms", loads, [summary.itl_s for summary in summaries])
    draw_latency(e2e, "End-to-end latency, s", loads, [summary.e2e_s for summary in summaries], unit_s=1.0)
    draw_curves(tokens, "Tokens a second", loads, _tokens_per_s(points), _TOKENS)
    answered = {"answered": [summary.requests_per_s for summary in summaries]}
    draw_curves(requests, "Requests answered a second", loads, answered, {"answered": DARK})
    shares = {outcome: [summary.share(outcome) for summary in summaries] for outcome in WRONG}
    n_requests = sum(summary.n_requests for summary in summaries)
    draw_shares(wrong, "Requests not as asked, %", loads, shares, n_requests)
    for axes in panels:
        finish(axes, _AXES[points[0].load.kind], loads)
    return figure


def _tokens_per_s(points: Sequence[Point]) -> dict[str, list[float]]:
    return {
        "input and output": [point.summary.total_tokens_per_s for point in points],
        "output": [point.summary.output_tokens_per_s for point in points],
    }
