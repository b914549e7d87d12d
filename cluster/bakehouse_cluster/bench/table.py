"""Shows results in the terminal."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from bakehouse_cluster.bench.records import WRONG, Outcome
from bakehouse_cluster.bench.result import Point, Result
from bakehouse_cluster.bench.statistics import Distribution
from bakehouse_cluster.progress import counted, n_of

_N_PROBLEMS = 5
_UNBOUNDED = 10_000
_LEGEND = (
    "in ms, of answered requests; beside them which share of all was short, failed, shed (429, 503) or broke "
    "off. TTFT: until the first text. ITL: between tokens; a gap before a frame of k tokens counts k times a "
    "k-th of it. gap: between frames. E2E: until the end of the stream."
)


class Bars:
    """A progress bar for each part of a benchmark."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def counted(self, label: str, n_total: int) -> AbstractContextManager[Callable[[], None]]:
        """See `bakehouse_cluster.bench.measuring.Observer`."""
        return counted(self._console, label, n_total=n_total, n_done=0)


class Shares(Protocol):
    """How requests ended."""

    def share(self, outcome: Outcome) -> float:
        """Of all requests."""
        ...


def print_table(table: Table, console: Console) -> None:
    """No cell is shortened or broken, however narrow `console` is: only headings are, between words."""
    for index, column in enumerate(table.columns):
        unbroken = [*str(column.header).split(), *(Text.from_markup(str(cell)).plain for cell in column.cells)]
        column.min_width = max(map(cell_len, unbroken), default=0) + (index == 0)  # there rich pads by one more
    narrowest = Measurement.get(console, console.options.update(max_width=_UNBOUNDED), table).minimum
    if narrowest > console.width:
        table.width = narrowest
    console.print(table, crop=False)


def plain_table(*headings: str, n_left: int = 1) -> Table:
    """A table whose first `n_left` columns are texts, the others numbers; `print_table` prints it."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < n_left else "right")
    return table


def show_result(result: Result, console: Console) -> None:
    """Throughput, latencies, and whatever is odd about them."""
    environment, work = result.environment, result.work
    lengths = ", ".join(f"{name.removeprefix('n_')} {value}" for name, value in work.parameters.items())
    name = environment.label or environment.model
    console.print(
        f"{name} at {environment.url}: {work.name}: {lengths}", soft_wrap=True, highlight=False, markup=False
    )
    print_table(_throughput(result), console)
    console.print(_LEGEND, style="dim", highlight=False)
    print_table(_latencies(result), console)
    for line in _warmups(result):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    for point in result.points:
        for remark in _remarks(point):
            console.print(f"{point.load.label}: {remark}", highlight=False, soft_wrap=True, markup=False)
    if result.is_partial:
        console.print("interrupted: this is partial", style="bold red")


def _throughput(result: Result) -> Table:
    table = plain_table("load", "requests", "seconds", "output tok/s", "total tok/s", "requests/s", "bench CPU")
    for point in result.points:
        summary = point.summary
        n_ended = summary.n_requests
        table.add_row(
            point.load.label,
            str(n_ended) if n_ended == point.n_planned else f"{n_ended} of {point.n_planned}",
            f"{summary.duration_s:.2f}",
            f"{summary.output_tokens_per_s:.1f}",
            f"{summary.total_tokens_per_s:.1f}",
            f"{summary.requests_per_s:.2f}",
            f"{point.generator_cpu_s / summary.duration_s:.0%}" if summary.duration_s else "",
        )
    return table


def _latencies(result: Result) -> Table:
    table = plain_table("load", "", "p50", "p90", "p99", "max", *map(str, WRONG), n_left=2)
    for point in result.points:
        summary = point.summary
        named = {"TTFT": summary.ttft_s, "ITL": summary.itl_s, "gap": summary.gap_s, "E2E": summary.e2e_s}
        for name, times in named.items():
            table.add_row(point.load.label, name, *milliseconds(times), *wrong_shares(summary))
    return table


def milliseconds(times: Distribution | None) -> tuple[str, ...]:
    """Its p50, p90, p99 and maximum as cells."""
    if times is None:
        return ("",) * 4
    return tuple(f"{1000 * value:.1f}" for value in (times.p50, times.p90, times.p99, times.max))


def wrong_shares(summary: Shares) -> tuple[str, ...]:
    """What was not as asked, as cells."""
    shares = (summary.share(outcome) for outcome in WRONG)
    return tuple(f"[red]{share:.1%}[/red]" if share else "0%" for share in shares)


def _warmups(result: Result) -> list[str]:
    """What ran before the measurements: a line for each kind, with its number of requests at each load."""
    counts: dict[str, list[str]] = {}
    for point in result.points:
        n_requests, _, kind = point.warmup.partition(" ")
        counts.setdefault(kind.removeprefix("requests").removeprefix("request"), []).append(n_requests)
    return [
        f"warm-up: {', '.join(dict.fromkeys(numbers))} request{'' if {*numbers} == {'1'} else 's'}{kind}"
        for kind, numbers in counts.items()
    ]


def _remarks(point: Point) -> list[str]:
    summary = point.summary
    remarks = []
    if summary.n_cached_tokens:
        share = summary.n_cached_tokens / max(1, summary.n_input_tokens)
        remarks.append(f"{share:.1%} of the prompts' tokens came from the server's prefix cache")
    if summary.n_input_other:
        remarks.append(
            f"the server counted {n_of(summary.n_input_other, 'prompt')} otherwise than planned: "
            f"{summary.n_input_tokens} tokens in all instead of {point.n_input_planned}; "
            f"name the model's own tokenizer by --tokenizer"
        )
    for problem, n_times in list(summary.problems.items())[:_N_PROBLEMS]:
        remarks.append(f"{n_of(n_times, 'time')}: {problem}")
    if len(summary.problems) > _N_PROBLEMS:
        n_others = n_of(len(summary.problems) - _N_PROBLEMS, "other problem")
        remarks.append(f"and {n_others}; --output keeps them all")
    return remarks
