"""Shows a plan in the terminal."""

from rich.console import Console
from rich.table import Table

from bakehouse_cluster.bench.records import WRONG
from bakehouse_cluster.bench.table import milliseconds, plain_table, print_table, wrong_shares
from bakehouse_cluster.plan.result import PlanResult
from bakehouse_cluster.plan.summary import SizeSummary
from bakehouse_cluster.progress import n_of

_N_PROBLEMS = 3
_LEGEND = (
    "in ms, of answered requests; beside them which share of all was short, failed, shed (429) or out of time. "
    "TTFT: until the first token. ITL: between tokens. E2E: until the end. HTTP and Ray take time beside these."
)


def show_plan(result: PlanResult, console: Console) -> None:
    """What was simulated, then the answer in one line."""
    for line in _question(result):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    print_table(_work(result), console)
    console.print(_LEGEND, style="dim", highlight=False)
    print_table(_latencies(result), console)
    for size in result.sizes:
        for remark in _remarks(size):
            said = f"{n_of(size.n_replicas, 'replica')}: {remark}"
            console.print(said, highlight=False, soft_wrap=True, markup=False)
    console.print(result.sentence, style="bold", highlight=False, soft_wrap=True, markup=False)


def _remarks(size: SizeSummary) -> list[str]:
    """Why it does not suffice, and what went wrong most often."""
    remarks = [f"not enough: {', '.join(size.misses)}"] if size.misses else []
    for problem, n_times in list(size.problems.items())[:_N_PROBLEMS]:
        remarks.append(f"{n_of(n_times, 'time')}: {problem}")
    if len(size.problems) > _N_PROBLEMS:
        n_others = n_of(len(size.problems) - _N_PROBLEMS, "other problem")
        remarks.append(f"and {n_others}; --output keeps them all")
    return remarks


def _question(result: PlanResult) -> list[str]:
    question = result.question
    capacity, cost = question.replica.capacity, question.cost
    lengths = ", ".join(f"{name.removeprefix('n_')} {value}" for name, value in question.parameters.items())
    fit = "" if cost.fit is None else f", {cost.fit.error_p90:.0%} off at most in 9 of 10 steps"
    longest, measured = question.replica.policy.max_model_len, cost.max_context
    beyond = (
        "" if measured is None or measured >= longest else f"; contexts beyond {measured} tokens are extrapolated"
    )
    return [
        f"{question.model}: {question.workload} at {question.load.label}: {lengths}; caches begin empty",
        f"each replica: {n_of(capacity.n_blocks, 'block')} of {capacity.block_size} tokens, "
        f"{n_of(capacity.max_sequences, 'sequence')} and {n_of(capacity.max_step_tokens, 'token')} a step; "
        f"cost measured with {cost.model} on {cost.machine or cost.device}{fit}{beyond}; "
        f"{question.routing} routing",
    ]


def _work(result: PlanResult) -> Table:
    table = plain_table(
        "replicas",
        "meets",
        "goodput",
        "output tok/s",
        "total tok/s",
        "cache hits",
        "preempted",
        "running",
        "waiting",
        "KV in use",
        "busy",
    )
    for size in result.sizes:
        table.add_row(
            str(size.n_replicas),
            "yes" if size.meets else "no",
            f"{size.good_share:.1%}",
            f"{size.output_tokens_per_s:.1f}",
            f"{size.total_tokens_per_s:.1f}",
            f"{size.hit_ratio:.1%}",
            str(size.n_preemptions),
            f"{size.mean_running:.1f}",
            f"{size.mean_waiting:.1f}",
            f"{size.kv_use:.1%}",
            f"{size.busy:.0%}",
        )
    return table


def _latencies(result: PlanResult) -> Table:
    table = plain_table("replicas", "", "p50", "p90", "p99", "max", *map(str, WRONG), n_left=2)
    for size in result.sizes:
        for name, times in {"TTFT": size.ttft_s, "ITL": size.itl_s, "E2E": size.e2e_s}.items():
            table.add_row(str(size.n_replicas), name, *milliseconds(times), *wrong_shares(size))
    return table
