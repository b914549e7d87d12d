"""Simulates a workload on fleets of different sizes until the smallest sufficient one is known."""

from collections.abc import Mapping, Sequence

from bakehouse_replica.core.errors import StartupError
from bakehouse_router.policy.pick import choose

from bakehouse_cluster.bench.arranging import arrange
from bakehouse_cluster.bench.measuring import Observer, Unobserved
from bakehouse_cluster.bench.workloads import Demand, Workload
from bakehouse_cluster.plan.asking import Encode, RequestWriter
from bakehouse_cluster.plan.choices import Routing
from bakehouse_cluster.plan.fleet import Fleet, FleetRun, closed_loop, open_loop
from bakehouse_cluster.plan.gateway import Route
from bakehouse_cluster.plan.policies import choose_at_random, choose_least_loaded
from bakehouse_cluster.plan.result import PlanResult, Question
from bakehouse_cluster.plan.search import exhaustive, search_sizes
from bakehouse_cluster.plan.summary import SizeSummary, summarize_run
from bakehouse_cluster.progress import n_of

# Up to here the virtual clock, a double, tells microseconds apart. Times since 1970 are below it in seconds, and
# far above it in milliseconds.
MAX_ARRIVAL_S = 2.0**32

ROUTES: Mapping[Routing, Route] = {
    Routing.PRODUCTION: choose,
    Routing.RANDOM: choose_at_random,
    Routing.LEAST_LOAD: choose_least_loaded,
}


def make_plan(
    question: Question,
    workload: Workload,
    encode: Encode,
    *,
    simulates_all: bool = False,
    observer: Observer | None = None,
) -> PlanResult:
    """The smallest sufficient number of replicas up to `question.max_replicas`.

    `simulates_all`: every size is simulated. Raises `StartupError` where a prompt cannot be written, or a request
    comes too late for the clock.
    """

    def summary_of(n_replicas: int) -> SizeSummary:
        run = run_fleet(question, workload, encode, n_replicas, observer or Unobserved())
        return summarize_run(run, question.objective)

    search = exhaustive if simulates_all else search_sizes
    found = search(summary_of, question.max_replicas)
    return PlanResult(question=question, sizes=found.sizes, answer=found.answer)


def run_fleet(
    question: Question, workload: Workload, encode: Encode, n_replicas: int, observer: Observer
) -> FleetRun:
    """One fleet under the whole workload; the requests are the same for every size."""
    arrangement = arrange(question.workload, workload, question.load, question.seed)
    writer = RequestWriter(
        vocabulary_size=question.replica.vocabulary_size,
        draw=arrangement.words,
        encode=encode,
        timeout_s=question.timeout_s,
    )
    demands = arrangement.demands
    _require_clock(demands)
    with observer.counted(n_of(n_replicas, "replica"), len(demands)) as advance:
        fleet = Fleet(
            question.replica,
            n_replicas,
            gateways=question.gateways,
            route=ROUTES[question.routing],
            seed=question.seed,
        )
        fleet.listen(lambda _: advance())
        if question.load.kind == "concurrency":
            n_users = min(int(question.load.value), len(demands))
            return closed_loop(fleet, map(writer.write, demands), n_users)
        return open_loop(fleet, writer.arriving(demands))


def _require_clock(demands: Sequence[Demand]) -> None:
    last_s = demands[-1].arrival_s or 0.0
    if last_s > MAX_ARRIVAL_S:
        raise StartupError(
            f"{demands[-1].origin or 'the workload'}: the last request comes at {last_s:.6g} s; the virtual clock "
            f"goes up to {MAX_ARRIVAL_S:.0f} s"
        )
