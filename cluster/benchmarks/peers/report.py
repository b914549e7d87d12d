"""What the measurements say: medians over repeats, one table, and ours against the best peer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bakehouse_cluster.bench.records import Outcome
from bakehouse_cluster.bench.statistics import Summary

# Systems of wider matrices compare with ours in float32, others with ours in int8.
MAX_QUANTIZED_BITS = 8

# Cores that others used meanwhile; this much is the machine's own housekeeping.
MAX_QUIET_CORES = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One workload on one system, once. `n_other_cores`: what neither the server nor the generator used."""

    summary: Summary
    n_other_cores: float


Measured = Mapping[str, Sequence[Measurement]]
"""Of each round, by workload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A system in the table. `measured`: what was measured; `problem`: why the rest was not, one line."""

    name: str
    n_bits: int
    is_ours: bool
    measured: Measured
    problem: str | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether its matrices are narrower than 16 bits."""
        return self.n_bits <= MAX_QUANTIZED_BITS

    def rate(self, workload: str) -> float | None:
        """Output tokens a second, the median over repeats."""
        measured = self.measured.get(workload)
        return median(one.summary.output_tokens_per_s for one in measured) if measured else None

    def summaries(self, workload: str) -> list[Summary]:
        """Of each round."""
        return [one.summary for one in self.measured.get(workload, ())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """Ours, quantised or not, against the best of some peers: at least `ratio` on these workloads."""

    is_quantized: bool
    peers: str
    admits: Callable[[Row], bool]
    ratios: Mapping[str, float]


AIMS = (
    Aim(
        is_quantized=False,
        peers="best peer of 16 or 32 bits",
        admits=lambda row: not row.is_quantized,
        ratios={"W1": 1.0, "W2": 1.3, "W3": 2.0, "W4": 1.3},
    ),
    Aim(
        is_quantized=True,
        peers="best quantised peer",
        admits=lambda row: row.is_quantized,
        ratios={"W1": 1.2},
    ),
    Aim(
        is_quantized=True,
        peers="best peer of any kind",
        admits=lambda row: True,
        ratios={"W2": 2.0, "W3": 2.0, "W4": 2.0},
    ),
)


def table(rows: Sequence[Row], workloads: Sequence[str]) -> str:
    """In Markdown: for each system and workload output tokens a second, latencies in ms, and what went wrong."""
    lines = _markdown_head(["system", "bits", *workloads], n_left=1)
    for row in rows:
        rates = [row.rate(workload) for workload in workloads]
        cells = ["" if rate is None else f"{rate:.1f}" for rate in rates]
        lines.append(_markdown_row([row.name, str(row.n_bits), *cells]))
    lines += ["", *_markdown_head(["system", "", *(f"{workload} p50 / p99" for workload in workloads)], n_left=2)]
    for row in rows:
        for label, times in (("TTFT", _ttft), ("ITL", _itl)):
            cells = [times(row.summaries(workload)) for workload in workloads]
            lines.append(_markdown_row([row.name, label, *cells]))
    remarks = [f"* {row.name}: {remark}" for row in rows for remark in _remarks(row)]
    return "\n".join([*lines, "", *remarks] if remarks else lines)


def ratios(rows: Sequence[Row], workloads: Sequence[str]) -> str:
    """Each of ours against the best peer, as the aims name them, in Markdown; without what was not measured."""
    lines = _markdown_head(["ours", "against", "workload", "ours / best", "aim", "best peer"], n_left=2)
    for aim in AIMS:
        for own in (row for row in rows if row.is_ours and row.is_quantized is aim.is_quantized):
            for workload, least in aim.ratios.items():
                ours = _best([own], workload)
                best = _best((row for row in rows if not row.is_ours and aim.admits(row)), workload)
                if workload not in workloads or ours is None or best is None:
                    continue
                ratio = _rate(ours, workload) / _rate(best, workload)
                cells = [ours.name, aim.peers, workload, f"{ratio:.2f}", f"{least:g}", best.name]
                lines.append(_markdown_row(cells))
    return "\n".join(lines)


def _rate(row: Row, workload: str) -> float:
    rate = row.rate(workload)
    assert rate is not None, "only measured systems are compared"
    return rate


def _best(rows: Iterable[Row], workload: str) -> Row | None:
    """The fastest of those that answered all requests; a system that fails some has less work."""
    whole = [row for row in rows if row.rate(workload) and not _n_failed(row.summaries(workload))]
    return max(whole, key=lambda row: _rate(row, workload), default=None)


def _n_failed(summaries: Iterable[Summary]) -> int:
    return sum(summary.n_requests - summary.outcomes[Outcome.OK] for summary in summaries)


def _ttft(summaries: Sequence[Summary]) -> str:
    return _times([(one.ttft_s.p50, one.ttft_s.p99) for one in summaries if one.ttft_s is not None])


def _itl(summaries: Sequence[Summary]) -> str:
    return _times([(one.itl_s.p50, one.itl_s.p99) for one in summaries if one.itl_s is not None])


def _times(pairs_s: Sequence[tuple[float, float]]) -> str:
    if not pairs_s:
        return ""
    p50_s, p99_s = (median(times) for times in zip(*pairs_s, strict=True))
    return f"{1000 * p50_s:.0f} / {1000 * p99_s:.0f}"


def _remarks(row: Row) -> list[str]:
    remarks = [] if row.problem is None else [f"not measured: {row.problem}"]
    for workload, measured in row.measured.items():
        summaries = row.summaries(workload)
        if n_failed := _n_failed(summaries):
            first = next(problem for summary in summaries for problem in summary.problems)
            n_all = sum(summary.n_requests for summary in summaries)
            remarks.append(f"{workload}: {n_failed} of {n_all} requests failed: {first}")
        if n_other := sum(summary.n_input_other for summary in summaries):
            remarks.append(f"{workload}: counted the tokens of {n_other} prompts otherwise than planned")
        if (n_others := max(one.n_other_cores for one in measured)) > MAX_QUIET_CORES:
            remarks.append(f"{workload}: other processes used up to {n_others:.1f} cores meanwhile")
    return remarks


def _markdown_head(headings: Sequence[str], *, n_left: int) -> list[str]:
    rules = ["---" if index < n_left else "---:" for index in range(len(headings))]
    return [_markdown_row(headings), "|".join(["", *rules, ""])]


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
