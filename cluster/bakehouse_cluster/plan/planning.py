"""Simulates a workload on fleets of different sizes until the smallest sufficient one is known."""

from collections.abc import Mapping

from bakehouse_router.policy.pick import choose

from bakehouse_cluster.bench.arranging import arrange
from bakehouse_cluster.bench.measuring import Observer, Unobserved
from bakehouse_cluster.bench.workloads import Workload
from bakehouse_cluster.plan.asking import Encode, RequestWriter
from bakehouse_cluster.plan.choices import Routing
from bakehouse_cluster.plan.fleet import Fleet, FleetRun, closed_loop, open_loop
from bakehouse_cluster.plan.gateway import Route
from bakehouse_cluster.plan.policies import choose_at_random, choose_least_loaded
from bakehouse_cluster.plan.result import PlanResult, Question
from bakehouse_cluster.plan.search import exhaustive, search_sizes
from bakehouse_cluster.plan.summary import SizeSummary, summarize_run
from bakehouse_cluster.progress import n_of

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

    `simulates_all`: every size is simulated. Raises `StartupError` where a prompt cannot be written.
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
    fleet = Fleet(
        question.replica,
        n_replicas,
        gateways=question.gateways,
        route=ROUTES[question.routing],
        seed=question.seed,
    )
    demands = arrangement.demands
    with observer.counted(n_of(n_replicas, "replica"), len(demands)) as advance:
        fleet.listen(lambda _: advance())
        if question.load.kind == "concurrency":
            return closed_loop(fleet, map(writer.write, demands), int(question.load.value))
        return open_loop(fleet, writer.arriving(demands))
