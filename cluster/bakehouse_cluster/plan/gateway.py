"""One gateway on the virtual clock: its bounded queue, its record of the replicas, and the routing policy.

Queue (`bakehouse_router.admission`), record (`bakehouse_router.replicas`) and policy (`bakehouse_router.policy`)
are those of production, fed as there: a request is charged where it is sent, accepted at once, and released when
it has ended; with the first token it leaves its place in the queue, and no prompt of it waits any more.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random

from bakehouse_replica.core.errors import BakehouseError, Overloaded
from bakehouse_replica.core.types import Failure, FailureKind, ReplicaCard, ReplicaLoad, Request, TokenDelta
from bakehouse_router.admission import Place, WaitingQueue
from bakehouse_router.policy.pick import Choice
from bakehouse_router.policy.views import ReplicaView
from bakehouse_router.replicas import ReplicaTable

from bakehouse_cluster.bench.records import Outcome
from bakehouse_cluster.plan.clock import VirtualClock
from bakehouse_cluster.plan.records import SimulatedRecord, Stream

Route = Callable[[Request, Sequence[ReplicaView], Random], Choice]
Submit = Callable[[Request], None]


class SimulatedGateway:
    """Sends each request to a replica by `route`, and tells `ended` what became of it."""

    def __init__(
        self,
        *,
        clock: VirtualClock,
        queue: WaitingQueue,
        route: Route,
        random: Random,
        gaps: Counter[float],
        ended: Callable[[SimulatedRecord], None],
    ) -> None:
        self._clock = clock
        self._queue = queue
        self._route = route
        self._random = random
        self._gaps = gaps
        self._ended = ended
        self._table = ReplicaTable()
        self._streams: dict[str, Stream] = {}
        self._places: dict[str, Place] = {}
        self._replica_ids: dict[str, str] = {}

    def hear(self, card: ReplicaCard, load: ReplicaLoad) -> None:
        """A replica's report has come."""
        self._table.update(card, load, None)

    def submit(self, request: Request, replicas: Mapping[str, Submit]) -> None:
        """Sends a request to one of the replicas, by id, or sheds it."""
        request_id, params, now = request.request_id, request.params, self._clock()
        assert request_id not in self._streams, f"{request_id} is being served"
        stream = self._streams[request_id] = Stream(
            request_id=request_id,
            due_s=now,
            n_input=len(request.prompt_ids),
            n_open=params.n,
            token_s=[None] * params.n,
            n_wanted=None if params.max_tokens is None else params.max_tokens * params.n,
            gaps=self._gaps,
        )
        try:
            self._places[request_id] = self._queue.enter(1, len(request.prompt_ids))
        except Overloaded as error:
            stream.problem = (Outcome.SHED, str(error))
            self._end(stream)
            return
        best = self._route(request, self._table.views(now), self._random).ranked[0]
        self._table.charge(request_id, best, params.n, now)
        self._table.accept(request_id, best.replica_id)
        self._replica_ids[request_id] = best.replica_id
        replicas[best.replica_id](request)

    def refuse(self, request: Request, error: BakehouseError) -> None:
        """The replica does not take the request."""
        stream = self._streams[request.request_id]
        stream.problem = (Outcome.SHED if isinstance(error, Overloaded) else Outcome.ERROR, str(error))
        self._end(stream)

    def take(self, deltas: Iterable[TokenDelta]) -> None:
        """What a step has brought."""
        now = self._clock()
        for delta in deltas:
            stream = self._streams[delta.request_id]
            if delta.token_ids:
                if stream.first_s is None:
                    self._places[delta.request_id].leave()
                    self._table.mark_prefilled(delta.request_id, now)
                stream.take(delta.choice, len(delta.token_ids), now)
            if delta.usage is not None:
                stream.n_cached = delta.usage.cached_tokens
            if delta.finish is not None:
                if delta.failure is not None:
                    stream.problem = _problem(delta.failure)
                stream.n_open -= 1
                if stream.n_open == 0:
                    self._end(stream)

    def _end(self, stream: Stream) -> None:
        request_id, now = stream.request_id, self._clock()
        del self._streams[request_id]
        place = self._places.pop(request_id, None)
        if place is not None:
            place.leave()
        replica_id = self._replica_ids.pop(request_id, None)
        if replica_id is not None:
            self._table.release(request_id, replica_id, now)
        self._ended(stream.end(now, replica_id))


def _problem(failure: Failure) -> tuple[Outcome, str]:
    outcome = Outcome.ABORTED if failure.kind is FailureKind.DEADLINE else Outcome.ERROR
    return outcome, failure.message
