"""N replicas behind gateways on a virtual clock: the production scheduler and the production routing policy.

    arrival ──► gateway: queue, policy over views ──► replica: scheduler ┄ steps of the executor's length
                  ▲                                      │
                  └── reports, as old as in production ──┘

Nothing here reads a clock or sleeps, and randomness is the gateways' own, from a seed: the same call gives the
same run. What is not here costs nothing: HTTP, Ray, and the gateway's own work.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, groupby, islice
from operator import itemgetter
from random import Random

from bakehouse_replica.core.errors import BakehouseError
from bakehouse_replica.core.executor import Executor
from bakehouse_replica.core.metric_table import PREEMPTIONS, PREFIX_HIT_TOKENS, PREFIX_QUERIED_TOKENS
from bakehouse_replica.core.scheduler import Scheduler
from bakehouse_replica.core.tally import replica_counts
from bakehouse_replica.core.types import (
    Capacity,
    ReplicaCard,
    ReplicaLoad,
    Request,
    SchedulingPolicy,
    StepPlan,
    TokenDelta,
)
from bakehouse_replica.executors.simulated import SimulatedExecutor, StepCost
from bakehouse_router.admission import WaitingQueue
from bakehouse_router.policy.pick import choose

from bakehouse_cluster.plan.clock import VirtualClock
from bakehouse_cluster.plan.gateway import Route, SimulatedGateway
from bakehouse_cluster.plan.records import SimulatedRecord
from bakehouse_cluster.plan.replica import SimulatedReplica
from bakehouse_cluster.plan.reports import Reports
from bakehouse_cluster.plan.totals import ReplicaTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShape:
    """What each replica is. `capacity.n_blocks` is of one replica."""

    capacity: Capacity
    policy: SchedulingPolicy
    cost: StepCost
    vocabulary_size: int = 32_000

    def card(self, replica_id: str) -> ReplicaCard:
        """What routers know of it."""
        return ReplicaCard(
            replica_id=replica_id,
            model_name="simulated",
            model_digest="simulated",
            hash_key=b"",
            block_size=self.capacity.block_size,
            n_blocks=self.capacity.n_blocks,
            vocabulary_size=self.vocabulary_size,
            max_model_len=self.policy.max_model_len,
            max_sequences=self.capacity.max_sequences,
            kv_bytes=self.capacity.n_blocks * self.capacity.block_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayShape:
    """How many gateways, which take requests in turns, and how much may wait at each for its first token."""

    n_gateways: int = 1
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1_000_000


ONE_GATEWAY = GatewayShape()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRun:
    """What has happened. `records` in the order of their ends; `gaps`: how often each gap between tokens occurred.

    `duration_s`: until the last end.
    """

    records: tuple[SimulatedRecord, ...]
    gaps: Counter[float]
    duration_s: float
    totals: tuple[ReplicaTotals, ...]
    n_preemptions: int
    n_queried_tokens: int
    n_hit_tokens: int


_COUNTED = {PREEMPTIONS.name, PREFIX_QUERIED_TOKENS.name, PREFIX_HIT_TOKENS.name}
MakeExecutor = Callable[[ReplicaShape], Executor]


def simulated_executor(shape: ReplicaShape) -> SimulatedExecutor:
    """Steps that take as long as `shape.cost` says."""
    return SimulatedExecutor(shape.capacity, shape.cost, vocabulary_size=shape.vocabulary_size)


class Fleet:
    """N replicas and their gateways, on a clock of their own. Say what comes (`at`), then `run` it, once.

    `make_executor`: who carries out steps and says how long each took; a model's own executor may, too. `watch` is
    shown each plan, with the number of its replica.
    """

    def __init__(
        self,
        shape: ReplicaShape,
        n_replicas: int,
        *,
        gateways: GatewayShape = ONE_GATEWAY,
        route: Route = choose,
        seed: int = 0,
        make_executor: MakeExecutor = simulated_executor,
        watch: Callable[[int, StepPlan], None] | None = None,
    ) -> None:
        self._clock = VirtualClock()
        self._listeners: list[Callable[[SimulatedRecord], None]] = []
        self._records: list[SimulatedRecord] = []
        self._gaps: Counter[float] = Counter()
        self._gateway_of: dict[str, SimulatedGateway] = {}
        self._counts = [replica_counts() for _ in range(n_replicas)]
        self._schedulers: list[Scheduler] = []
        self._gateways = [
            self._new_gateway(gateways, route, Random(f"{seed} gateway {index}"))
            for index in range(gateways.n_gateways)
        ]
        self._turn = cycle(self._gateways)
        self._replicas = [
            self._new_replica(index, shape, make_executor(shape), watch) for index in range(n_replicas)
        ]
        for replica in self._replicas:
            self._hear(replica.card, replica.load)
        self._submits = {replica.card.replica_id: replica.submit for replica in self._replicas}
        self._reports = Reports(
            self._clock, self._replicas, hear=self._hear, is_needed=lambda: bool(self._gateway_of)
        )

    @property
    def now(self) -> float:
        """Seconds of the virtual clock."""
        return self._clock()

    @property
    def schedulers(self) -> tuple[Scheduler, ...]:
        """Those of the replicas, for whoever audits them."""
        return tuple(self._schedulers)

    def listen(self, listener: Callable[[SimulatedRecord], None]) -> None:
        """`listener` is told of each request when it has ended, and may ask for others."""
        self._listeners.append(listener)

    def at(self, moment: float, request: Request, before: Callable[[], None] = lambda: None) -> None:
        """A client sends the request at that moment, which has not passed; `before` is called just before."""

        def send() -> None:
            before()
            self._submit(request)

        self._clock.at(moment, send)

    def run(self) -> FleetRun:
        """Until every request has ended."""
        self._clock.run()
        assert not self._gateway_of, f"{len(self._gateway_of)} requests never ended"
        counted = Counter[str]()
        for counts in self._counts:
            for series in counts.series():
                if series.name in _COUNTED and isinstance(series.value, int | float):
                    counted[series.name] += int(series.value)
        return FleetRun(
            records=tuple(self._records),
            gaps=self._gaps,
            duration_s=max((record.ended_s for record in self._records), default=0.0),
            totals=tuple(replica.totals() for replica in self._replicas),
            n_preemptions=counted[PREEMPTIONS.name],
            n_queried_tokens=counted[PREFIX_QUERIED_TOKENS.name],
            n_hit_tokens=counted[PREFIX_HIT_TOKENS.name],
        )

    def _new_gateway(self, shape: GatewayShape, route: Route, random: Random) -> SimulatedGateway:
        queue = WaitingQueue(
            max_requests=shape.max_queued_requests, max_tokens=shape.max_queued_tokens, clock=self._clock
        )
        return SimulatedGateway(
            clock=self._clock, queue=queue, route=route, random=random, gaps=self._gaps, ended=self._end
        )

    def _new_replica(
        self,
        index: int,
        shape: ReplicaShape,
        executor: Executor,
        watch: Callable[[int, StepPlan], None] | None,
    ) -> SimulatedReplica:
        card = shape.card(f"replica-{index}")
        scheduler = Scheduler(
            capacity=shape.capacity,
            policy=shape.policy,
            model_digest=card.model_digest,
            hash_key=card.hash_key,
            counts=self._counts[index],
        )
        self._schedulers.append(scheduler)
        return SimulatedReplica(
            card=card,
            scheduler=scheduler,
            executor=executor,
            clock=self._clock,
            deliver=self._deliver,
            refuse=self._refuse,
            watch=None if watch is None else partial(watch, index),
        )

    def _submit(self, request: Request) -> None:
        gateway = self._gateway_of[request.request_id] = next(self._turn)
        gateway.submit(request, self._submits)
        self._reports.resume()

    def _deliver(self, deltas: Sequence[TokenDelta]) -> None:
        if len(self._gateways) == 1:
            self._gateways[0].take(deltas)
            return
        for delta in deltas:
            self._gateway_of[delta.request_id].take((delta,))

    def _refuse(self, request: Request, error: BakehouseError) -> None:
        self._gateway_of[request.request_id].refuse(request, error)

    def _end(self, record: SimulatedRecord) -> None:
        del self._gateway_of[record.request_id]
        self._records.append(record)
        for listener in self._listeners:
            listener(record)

    def _hear(self, card: ReplicaCard, load: ReplicaLoad) -> None:
        for gateway in self._gateways:
            gateway.hear(card, load)


def open_loop(fleet: Fleet, arrivals: Iterable[tuple[float, Request]]) -> FleetRun:
    """Runs the fleet with requests that come at their own times, in order, however many are still being served.

    `arrivals` are taken one by one as time passes. Those of one moment all come before anything is done for them.
    """
    groups = groupby(arrivals, key=itemgetter(0))

    def expect_next() -> None:
        for moment, group in islice(groups, 1):
            *others, last = (request for _, request in group)
            for request in others:
                fleet.at(moment, request)
            fleet.at(moment, last, before=expect_next)

    expect_next()
    return fleet.run()


def closed_loop(fleet: Fleet, requests: Iterable[Request], n_users: int) -> FleetRun:
    """Runs the fleet with `n_users` at once, each of whom sends the next request when the last has ended."""
    remaining = iter(requests)

    def send_next() -> None:
        following = next(remaining, None)
        if following is not None:
            fleet.at(fleet.now, following)

    fleet.listen(lambda _: send_next())
    for request in islice(remaining, n_users):
        fleet.at(fleet.now, request)
    return fleet.run()
