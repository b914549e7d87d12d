"""A plan and the JSON file that keeps it (format `bakehouse-plan`, version 1).

The file is the dataclass `PlanResult` as it stands. It holds no date and nothing of the machine that computed it:
the same question has the same bytes for an answer.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bakehouse_replica.core.errors import StartupError
from pydantic import TypeAdapter

from bakehouse_cluster.bench.result import Load
from bakehouse_cluster.bench.workloads import Parameters
from bakehouse_cluster.plan.choices import Routing
from bakehouse_cluster.plan.cost_file import CostFile
from bakehouse_cluster.plan.fleet import GatewayShape, ReplicaShape
from bakehouse_cluster.plan.objective import Objective
from bakehouse_cluster.plan.summary import SizeSummary
from bakehouse_cluster.progress import n_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What was asked. `timeout_s`: after which a client gives up, None: never. Caches are empty at the start."""

    workload: str
    kind: str
    parameters: Parameters
    load: Load
    n_requests: int
    seed: int
    model: str
    replica: ReplicaShape
    gateways: GatewayShape
    cost: CostFile
    objective: Objective
    routing: Routing
    timeout_s: float | None
    max_replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """`sizes`: the numbers of replicas simulated, smallest first. `answer`: the smallest that suffices, if any."""

    question: Question
    sizes: tuple[SizeSummary, ...]
    answer: int | None
    format: Literal["bakehouse-plan"] = "bakehouse-plan"
    version: Literal[1] = 1

    @property
    def sentence(self) -> str:
        """The answer in one line."""
        objective = self.question.objective
        if self.answer is None:
            most = self.sizes[-1]
            verb = "does" if most.n_replicas == 1 else "do"
            said = f"{n_of(most.n_replicas, 'replica')} {verb} not meet {objective}"
            return f"{said}: {', '.join(most.misses)}"
        return f"{n_of(self.answer, 'replica')} {'meets' if self.answer == 1 else 'meet'} {objective}"


_ADAPTER = TypeAdapter(PlanResult)


def write_plan(result: PlanResult, path: Path) -> None:
    """Raises `StartupError` where it cannot be written."""
    try:
        path.write_bytes(_ADAPTER.dump_json(result, indent=2) + b"\n")
    except OSError as error:
        raise StartupError(f"{path} cannot be written: {error.strerror}") from error
