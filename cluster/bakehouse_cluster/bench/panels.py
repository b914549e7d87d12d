"""The panels of our plots: curves, latencies and shares over some quantity, all in one style."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from bakehouse_cluster.bench.records import WRONG, Outcome
from bakehouse_cluster.bench.statistics import Distribution

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 144
DARK, MIDDLE, LIGHT = "#0b4f8a", "#3f8fce", "#9cc8ec"
INK, MUTED = "#1f2933", "#66727f"
_GRID = "#e4e8ec"
_INCHES = (13, 7)
# Quantities that span more than this are drawn in steps of equal ratio.
_WIDE = 6
_PERCENTILES = {"p50": DARK, "p90": MIDDLE, "p99": LIGHT}
_OUTCOMES = {
    Outcome.SHORT: "#c9cfd6",
    Outcome.ERROR: "#c0392b",
    Outcome.SHED: "#e59f3c",
    Outcome.ABORTED: "#7d4b8f",
}


def six_panels(title: str, said: str) -> "tuple[Figure, list[Axes]]":
    """An empty figure of two rows of three, with a title and a line of what it was made from."""
    from matplotlib.figure import Figure  # an optional dependency

    figure = Figure(figsize=_INCHES, layout="constrained")
    panels = list(figure.subplots(2, 3).flat)
    figure.suptitle(title, x=0.01, ha="left", fontsize=15, color=INK)
    figure.supxlabel(said, x=0.01, ha="left", fontsize=8, color=MUTED)
    return figure, panels


def draw_latency(
    axes: "Axes",
    title: str,
    over: Sequence[float],
    times: Sequence[Distribution | None],
    *,
    unit_s: float = 1e-3,
) -> None:
    """Median and tail; None leaves a gap."""
    curves = {
        percentile: [float("nan") if one is None else getattr(one, percentile) / unit_s for one in times]
        for percentile in ("p99", "p90", "p50")
    }
    draw_curves(axes, title, over, curves, _PERCENTILES)
    axes.fill_between(over, curves["p50"], curves["p99"], color=_PERCENTILES["p99"], alpha=0.2, linewidth=0)


def draw_curves(
    axes: "Axes",
    title: str,
    over: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    colours: Mapping[str, str],
) -> None:
    """One or more curves from 0 up."""
    for name, values in curves.items():
        axes.plot(over, values, marker="o", markersize=4.5, linewidth=2, color=colours[name], label=name)
    axes.set_title(title)
    axes.set_ylim(0, 1.12 * max(_finite(curves.values()), default=1.0) or 1.0)
    if len(curves) > 1:
        axes.legend()


def draw_shares(
    axes: "Axes", title: str, over: Sequence[float], shares: Mapping[Outcome, Sequence[float]], n_requests: int
) -> None:
    """Of `n_requests` in all, which shares were not answered as asked: a stacked bar for each of `over`."""
    positions = range(len(over))
    below = [0.0] * len(over)
    for outcome in WRONG:
        percents = [100 * share for share in shares[outcome]]
        axes.bar(positions, percents, 0.6, bottom=below, color=_OUTCOMES[outcome], label=str(outcome))
        below = [low + share for low, share in zip(below, percents, strict=True)]
    axes.set_title(title)
    if any(below):
        axes.set_ylim(0, min(100.0, 1.25 * max(below)))
        axes.legend(ncols=len(WRONG))
    else:
        axes.set_ylim(0, 100)
        said = f"none of {n_requests:,}"
        axes.text(0.5, 0.5, said, transform=axes.transAxes, ha="center", va="center", color=MUTED, fontsize=12)
    axes.set_xticks(positions, [f"{value:g}" for value in over])


def finish(axes: "Axes", label: str, over: Sequence[float]) -> None:
    """What all panels have in common; `label`: what they are drawn over."""
    axes.set_title(axes.get_title(), loc="left", fontsize=11, color=INK, pad=8)
    axes.title.set_text("")
    axes.set_xlabel(label, color=MUTED)
    axes.tick_params(colors=MUTED, length=0)
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    legend = axes.get_legend()
    if legend is not None:
        legend.set_frame_on(False)
        for text in legend.get_texts():
            text.set_color(INK)
    if axes.patches:  # bars stand side by side, at equal distances
        return
    if over[-1] > _WIDE * over[0]:
        axes.set_xscale("log", base=2)
    axes.set_xticks(over, [f"{value:g}" for value in over], minor=False)
    axes.set_xticks([], minor=True)


def _finite(curves: Iterable[Sequence[float]]) -> list[float]:
    return [value for curve in curves for value in curve if value == value]  # NaN is not equal to itself
