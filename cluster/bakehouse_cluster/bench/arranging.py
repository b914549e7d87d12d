"""When the requests of a workload come at one load: the same whether they are sent or simulated."""

from dataclasses import dataclass
from random import Random

from bakehouse_replica.core.errors import StartupError

from bakehouse_cluster.bench.result import Load
from bakehouse_cluster.bench.workloads import Demand, Workload, arriving, poisson_arrivals


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """`demands` have times of arrival unless the load is a number of users. `words` draws their prompts."""

    demands: tuple[Demand, ...]
    words: Random


def arrange(name: str, workload: Workload, load: Load, seed: int) -> Arrangement:
    """The requests of the workload `name` at `load`.

    The same lengths at every load, but prompts of its own at each, lest the last one's are found in a cache.
    Raises `StartupError` where the load is a trace's own times and there are none.
    """
    shape, words = Random(f"{seed} shape"), Random(f"{seed} words {load.label}")
    demands = workload.demands(workload.n_requests, shape)
    if load.kind == "rate":
        demands = arriving(demands, poisson_arrivals(len(demands), load.value, words))
    elif load.kind == "speed":
        if any(demand.arrival_s is None for demand in demands):
            raise StartupError(f"the workload {name} has no times of arrival; give --concurrency or --rate")
        demands = arriving(demands, [(demand.arrival_s or 0.0) / load.value for demand in demands])
    return Arrangement(demands=demands, words=words)
