"""Sets two results of the same work side by side."""

from collections.abc import Iterator
from dataclasses import asdict

from bakehouse_replica.core.errors import StartupError
from rich.console import Console

from bakehouse_cluster.bench.records import WRONG
from bakehouse_cluster.bench.result import Point, Result
from bakehouse_cluster.bench.statistics import Distribution
from bakehouse_cluster.bench.table import plain_table, print_table
from bakehouse_cluster.progress import n_of

Pair = tuple[Point, Point]


def pair_points(first: Result, second: Result) -> tuple[Pair, ...]:
    """The measurements at equal loads. Raises `StartupError` where the work differs or a result is partial."""
    for result, name in ((first, "first"), (second, "second")):
        if result.is_partial:
            raise StartupError(f"the {name} result is partial: its run was interrupted")
    ours, theirs = asdict(first.work), asdict(second.work)
    for name in ours:
        if ours[name] != theirs[name]:
            raise StartupError(
                f"different work cannot be compared: {name} is {ours[name]} in the first "
                f"and {theirs[name]} in the second"
            )
    by_load = {point.load: point for point in second.points}
    pairs = tuple((point, by_load[point.load]) for point in first.points if point.load in by_load)
    for a, b in pairs:
        if a.n_warmup != b.n_warmup:
            raise StartupError(
                f"different work cannot be compared: at {a.load.label}, {n_of(a.n_warmup, 'request')} warmed up "
                f"in the first and {b.n_warmup} in the second"
            )
    if not pairs:
        raise StartupError(
            f"no load is in both results: {_loads(first)} in the first, {_loads(second)} in the second"
        )
    return pairs


def least_ratio(pairs: tuple[Pair, ...]) -> float:
    """The second's output tokens per second over the first's, where that is smallest; infinite over nothing."""
    return min(
        _ratio(first.summary.output_tokens_per_s, second.summary.output_tokens_per_s) for first, second in pairs
    )


def show_comparison(first: Result, second: Result, pairs: tuple[Pair, ...], console: Console) -> None:
    """A row for each quantity at each load."""
    for result, name in ((first, "a"), (second, "b")):
        there = result.environment
        said = f"{name}: {there.label or there.model}, {there.server} at {there.url}, {there.date}"
        console.print(said, highlight=False, soft_wrap=True, markup=False)
    table = plain_table("load", "", "a", "b", "b / a", n_left=2)
    for a, b in pairs:
        for name, value_a, value_b in _quantities(a, b):
            table.add_row(a.load.label, name, _shown(value_a), _shown(value_b), f"{_ratio(value_a, value_b):.2f}")
        for outcome in WRONG:
            shares = (point.summary.share(outcome) for point in (a, b))
            table.add_row(a.load.label, outcome, *(f"{share:.1%}" if share else "0%" for share in shares), "")
    print_table(table, console)
    if any(a.prompts_digest != b.prompts_digest for a, b in pairs):
        console.print("the lengths were the same, the prompts were not: other tokenizers", highlight=False)


def _quantities(a: Point, b: Point) -> Iterator[tuple[str, float, float]]:
    one, other = a.summary, b.summary
    yield "output tok/s", one.output_tokens_per_s, other.output_tokens_per_s
    yield "total tok/s", one.total_tokens_per_s, other.total_tokens_per_s
    yield "requests/s", one.requests_per_s, other.requests_per_s
    for name, of_a, of_b in (
        ("TTFT", one.ttft_s, other.ttft_s),
        ("ITL", one.itl_s, other.itl_s),
        ("gap", one.gap_s, other.gap_s),
        ("E2E", one.e2e_s, other.e2e_s),
    ):
        yield from _milliseconds(name, of_a, of_b)


def _milliseconds(name: str, a: Distribution | None, b: Distribution | None) -> Iterator[tuple[str, float, float]]:
    if a is not None and b is not None:
        yield f"{name} p50 ms", 1000 * a.p50, 1000 * b.p50
        yield f"{name} p90 ms", 1000 * a.p90, 1000 * b.p90
        yield f"{name} p99 ms", 1000 * a.p99, 1000 * b.p99


def _shown(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratio(first: float, second: float) -> float:
    return second / first if first else float("inf")


def _loads(result: Result) -> str:
    return ", ".join(point.load.label for point in result.points)
