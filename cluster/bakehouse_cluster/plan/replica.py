"""One replica on the virtual clock: the production scheduler and an executor, turned as the engine's thread does.

    submit ──► arrivals ──► scheduler.add │ plan → execute ┄ its end → apply │ ──► deliver
                                          └──────── while there is work ─────┘

`bakehouse_replica.engine` is the same loop by threads and by the wall clock: requests are taken between two steps;
where steps overlap, the next one is planned before the result of the last one is taken. A step that begins while
another runs starts when that one ends.
"""

from collections import deque
from collections.abc import Callable, Sequence

from bakehouse_replica.core.errors import BakehouseError
from bakehouse_replica.core.executor import Executor, execute
from bakehouse_replica.core.scheduler import Scheduler
from bakehouse_replica.core.types import ReplicaCard, ReplicaLoad, Request, StepPlan, StepResult, TokenDelta
from bakehouse_replica.engine import LOAD_PERIOD_S

from bakehouse_cluster.plan.clock import VirtualClock
from bakehouse_cluster.plan.totals import ReplicaTotals, Totals

Deliver = Callable[[Sequence[TokenDelta]], None]
Refuse = Callable[[Request, BakehouseError], None]


class SimulatedReplica:
    """Serves what is submitted. `deliver` gets the deltas of each step when it ends, `refuse` what the scheduler
    does not take; `watch`, if given, each plan when it is made.
    """

    def __init__(
        self,
        *,
        card: ReplicaCard,
        scheduler: Scheduler,
        executor: Executor,
        clock: VirtualClock,
        deliver: Deliver,
        refuse: Refuse,
        watch: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self._card = card
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._deliver = deliver
        self._refuse = refuse
        self._watch = watch
        self._arrivals: deque[Request] = deque()
        self._begun: deque[tuple[float, StepResult]] = deque()  # when each ends, oldest first
        self._free_at = 0.0  # the device, from all steps begun so far
        self._is_idle = True
        self._load = scheduler.load()
        self._loaded_s = clock()
        self._totals = Totals(executor.capacity)

    @property
    def card(self) -> ReplicaCard:
        """What it is."""
        return self._card

    @property
    def load(self) -> ReplicaLoad:
        """The latest snapshot, as old as an engine's may be."""
        return self._load

    def totals(self) -> ReplicaTotals:
        """What it has done so far."""
        return self._totals.until(self._clock())

    def submit(self, request: Request) -> None:
        """Takes a request before its next step."""
        self._arrivals.append(request)
        if self._is_idle:
            self._is_idle = False
            self._clock.at(self._clock(), self._turn)

    def _turn(self) -> None:
        """Everything up to the next moment at which a step ends."""
        now = self._clock()
        if self._begun and self._begun[0][0] <= now:
            self._deliver(self._scheduler.apply(self._begun.popleft()[1], now))
        while True:
            self._refresh_load(now)
            self._take_arrivals(now)
            if not self._scheduler.has_work:
                self._is_idle = True
                return
            plan = self._scheduler.plan(now)
            self._deliver(self._scheduler.take_deltas())
            if plan is not None:
                self._begin(plan, now)
            if self._begun and (plan is None or len(self._begun) == self._executor.capacity.max_flights):
                self._clock.at(self._begun[0][0], self._turn)
                return

    def _take_arrivals(self, now: float) -> None:
        while self._arrivals:
            request = self._arrivals.popleft()
            try:
                self._scheduler.add(request, now)
            except BakehouseError as error:
                self._refuse(request, error)
        self._deliver(self._scheduler.take_deltas())

    def _begin(self, plan: StepPlan, now: float) -> None:
        """Carries the plan out at once; what comes of it is known to the scheduler when the step ends."""
        if self._watch is not None:
            self._watch(plan)
        result = execute(self._executor, plan)
        self._free_at = max(now, self._free_at) + result.elapsed_s
        self._begun.append((self._free_at, result))
        self._totals.count_step(result.elapsed_s)
        if self._totals.is_due(now):
            self._totals.note(self._scheduler.load(), now)

    def _refresh_load(self, now: float) -> None:
        is_idle = not self._scheduler.has_work
        if is_idle or now - self._loaded_s >= LOAD_PERIOD_S:
            self._load, self._loaded_s = self._scheduler.load(), now
        if is_idle:
            self._totals.note(self._load, now)
