"""From one simulated run to its line of the plan."""

from collections import Counter
from dataclasses import dataclass

from bakehouse_cluster.bench.records import ANSWERED, Outcome
from bakehouse_cluster.bench.statistics import Distribution, distribution
from bakehouse_cluster.plan.fleet import FleetRun
from bakehouse_cluster.plan.objective import Objective, good_share


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSummary:
    """One number of replicas. Latencies and tokens are those of answered requests, as `bakehouse bench` has them;
    `itl_s` alone is of all tokens that came.

    `misses`: why it does not meet the objective, nothing where it does. `good_share`: of all requests, those that
    were answered within all limits. `hit_ratio`: of prompt tokens at first admission, those found in the prefix
    cache. `mean_running`, `mean_waiting`: sequences of one replica; `kv_use`: the share of its blocks that is in
    use; `busy`: the share of time in which it computes; all four are averages over time and replicas.
    `requests_by_replica`: how many each was sent.
    """

    n_replicas: int
    misses: tuple[str, ...]
    good_share: float
    duration_s: float
    n_requests: int
    outcomes: dict[Outcome, int]
    n_input_tokens: int
    n_output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    ttft_s: Distribution | None
    itl_s: Distribution | None
    e2e_s: Distribution | None
    hit_ratio: float
    n_preemptions: int
    n_steps: int
    mean_running: float
    mean_waiting: float
    kv_use: float
    busy: float
    requests_by_replica: tuple[int, ...]
    problems: dict[str, int]

    @property
    def meets(self) -> bool:
        """Whether it is good enough."""
        return not self.misses

    def share(self, outcome: Outcome) -> float:
        """Of all requests."""
        return self.outcomes[outcome] / self.n_requests if self.n_requests else 0.0


def summarize_run(run: FleetRun, objective: Objective) -> SizeSummary:
    """The numbers of a run, which has a request at least."""
    records, n_replicas = run.records, len(run.totals)
    answered = [record for record in records if record.outcome in ANSWERED]
    begun_s = min(record.due_s for record in records)
    duration_s = run.duration_s - begun_s
    per_s = 1 / duration_s if duration_s else 0.0
    replica_seconds = n_replicas * duration_s
    per_replica_s = 1 / replica_seconds if replica_seconds else 0.0
    ttft = distribution([record.ttft_s for record in answered if record.ttft_s is not None])
    itl = distribution([*run.gaps], [*run.gaps.values()])
    e2e = distribution([record.latency_s for record in answered])
    good = good_share(records, objective)
    counts = Counter(record.outcome for record in records)
    sent = Counter(record.replica_id for record in records)
    n_input, n_output = sum(r.n_input for r in answered), sum(r.n_output for r in answered)
    return SizeSummary(
        n_replicas=n_replicas,
        misses=objective.misses({"ttft": ttft, "itl": itl, "e2e": e2e}, good),
        good_share=good,
        duration_s=duration_s,
        n_requests=len(records),
        outcomes={outcome: counts[outcome] for outcome in Outcome},
        n_input_tokens=n_input,
        n_output_tokens=n_output,
        output_tokens_per_s=n_output * per_s,
        total_tokens_per_s=(n_input + n_output) * per_s,
        requests_per_s=len(answered) * per_s,
        ttft_s=ttft,
        itl_s=itl,
        e2e_s=e2e,
        hit_ratio=run.n_hit_tokens / run.n_queried_tokens if run.n_queried_tokens else 0.0,
        n_preemptions=run.n_preemptions,
        n_steps=sum(totals.n_steps for totals in run.totals),
        mean_running=sum(totals.running_s for totals in run.totals) * per_replica_s,
        mean_waiting=sum(totals.waiting_s for totals in run.totals) * per_replica_s,
        kv_use=sum(totals.held_s for totals in run.totals) * per_replica_s,
        busy=sum(totals.busy_s for totals in run.totals) * per_replica_s,
        requests_by_replica=tuple(sent[f"replica-{index}"] for index in range(n_replicas)),
        problems=dict(Counter(record.problem for record in records if record.problem).most_common()),
    )
