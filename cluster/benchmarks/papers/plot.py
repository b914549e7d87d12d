"""Draws figures 2 and 12 of PagedAttention as they come out here."""

from pathlib import Path

from benchmarks.papers.figures import Effort
from benchmarks.papers.memory import occupancy
from benchmarks.papers.rates import NORMALISED_LATENCY_S, normalised_latency_s
from benchmarks.papers.setups import OPT_13B, SHAREGPT, SYSTEMS
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PUBLISHED = (0.204, 0.268, 0.382, 0.963)  # figure 2: shares of memory that hold tokens
RATES = (0.4, 0.7, 0.9, 1.0, 1.1, 1.3, 1.5, 1.7, 1.9, 2.2, 2.5, 2.8, 3.1)
CUT_S = 0.5  # a curve ends behind it
_USES = {"tokens": "#0b4f8a", "reserved": "#3f8fce", "internal": "#9cc8ec", "external": "#e4e8ec"}
_COLOURS = dict(zip(SYSTEMS, ("#c0392b", "#e59f3c", "#7d4b8f", "#0b4f8a"), strict=True))
_DPI = 144


def plot(path: Path, effort: Effort) -> None:
    """A PNG."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    memory, latency = figure.subplots(1, 2)
    _draw_memory(memory, effort)
    _draw_latency(latency, effort)
    for axes in (memory, latency):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=5)
    figure.savefig(path, dpi=_DPI, format="png")


def _draw_memory(axes: Axes, effort: Effort) -> None:
    found = [occupancy(OPT_13B, SHAREGPT, system, n_requests=effort.n_requests).shares for system in SYSTEMS]
    below = [0.0] * len(SYSTEMS)
    for use, colour in _USES.items():
        shares = [100 * getattr(one, use) for one in found]
        axes.bar(SYSTEMS, shares, bottom=below, color=colour, width=0.6, label=use)
        below = [low + share for low, share in zip(below, shares, strict=True)]
    axes.plot(SYSTEMS, [100 * share for share in PUBLISHED], "k_", markersize=28, label="tokens, published")
    axes.set_title("What KV memory holds, %: OPT-13B, ShareGPT")


def _draw_latency(axes: Axes, effort: Effort) -> None:
    for system in SYSTEMS:
        points = []
        for rate in RATES:
            found_s = normalised_latency_s(OPT_13B, SHAREGPT, system, rate=rate, duration_s=effort.trace_s)
            points.append((rate, found_s))
            if found_s > CUT_S:
                break
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=_COLOURS[system], label=system)
    axes.axhline(NORMALISED_LATENCY_S, color="#66727f", linewidth=0.8, linestyle=":")
    axes.set_ylim(0, CUT_S)
    axes.set_title("Latency by token of output, s, against requests a second")
