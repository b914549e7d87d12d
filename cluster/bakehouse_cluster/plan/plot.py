"""Draws a plan against the number of replicas: latencies with their limits, throughput, use, what went wrong."""

from pathlib import Path
from typing import TYPE_CHECKING

from bakehouse_cluster.bench.panels import (
    DARK,
    INK,
    LIGHT,
    MIDDLE,
    draw_curves,
    draw_latency,
    draw_shares,
    finish,
    six_panels,
)
from bakehouse_cluster.bench.plot import require_drawable, save_figure
from bakehouse_cluster.bench.records import WRONG
from bakehouse_cluster.plan.result import PlanResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_USES = {"prefix cache hits": DARK, "KV in use": MIDDLE, "busy": LIGHT}
# Fleets that are far too small have latencies beside which all others, and the limit, would look like 0.
_TIMES_SHOWN = 4
_TOKENS = {"output": DARK, "input and output": LIGHT}


def plot_plan(result: PlanResult, path: Path) -> None:
    """A PNG of `draw_plan`. Raises `StartupError` where it cannot be drawn or written."""
    require_drawable(path)
    save_figure(draw_plan(result), path)


def draw_plan(result: PlanResult) -> "Figure":
    """TTFT, ITL and E2E above, each with its limit; tokens, use and what went wrong below."""
    question, sizes = result.question, result.sizes
    over = [float(size.n_replicas) for size in sizes]
    figure, panels = six_panels(
        f"{question.model}: {question.workload} at {question.load.label}: {result.sentence}",
        f"simulated: {question.n_requests:,} requests, cost measured with {question.cost.model} on "
        f"{question.cost.machine or question.cost.device}, {question.routing} routing, seed {question.seed}",
    )
    ttft, itl, e2e, tokens, uses, wrong = panels
    draw_latency(ttft, "Time to first token, ms", over, [size.ttft_s for size in sizes])
    draw_latency(itl, "Inter-token latency, ms", over, [size.itl_s for size in sizes])
    draw_latency(e2e, "End-to-end latency, s", over, [size.e2e_s for size in sizes], unit_s=1.0)
    objective = question.objective
    _draw_limit(ttft, objective.ttft_s, unit_s=1e-3)
    _draw_limit(itl, objective.itl_s, unit_s=1e-3)
    _draw_limit(e2e, objective.e2e_s, unit_s=1.0)
    per_s = {
        "input and output": [size.total_tokens_per_s for size in sizes],
        "output": [size.output_tokens_per_s for size in sizes],
    }
    draw_curves(tokens, "Tokens a second", over, per_s, _TOKENS)
    shares = {
        "prefix cache hits": [100 * size.hit_ratio for size in sizes],
        "KV in use": [100 * size.kv_use for size in sizes],
        "busy": [100 * size.busy for size in sizes],
    }
    draw_curves(uses, "Use, %", over, shares, _USES)
    uses.set_ylim(0, 105)
    wrong_shares = {outcome: [size.share(outcome) for size in sizes] for outcome in WRONG}
    n_requests = sum(size.n_requests for size in sizes)
    draw_shares(wrong, "Requests not as asked, %", over, wrong_shares, n_requests)
    for axes in panels:
        finish(axes, "replicas", over)
    return figure


def _draw_limit(axes: "Axes", limit_s: float | None, *, unit_s: float) -> None:
    if limit_s is None:
        return
    limit = limit_s / unit_s
    axes.axhline(limit, color=INK, linewidth=1, linestyle="--", label="limit")
    highest = max(axes.get_ylim()[1], 1.12 * limit)
    axes.set_ylim(0, min(highest, _TIMES_SHOWN * limit))
    axes.legend()
