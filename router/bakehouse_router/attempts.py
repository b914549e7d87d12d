"""What became of one request at the replicas: each attempt, who answered it, and when.

Told per attempt by `bakehouse_router.dispatch`, never per token; read once the request has ended.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

from bakehouse_replica.core.story import ToldStory
from bakehouse_replica.core.types import Cost, Delivery

from bakehouse_router.routing import Routing


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One attempt; moments are `time.monotonic`'s.

    `n_before`: output tokens that earlier attempts have brought. `replica_ids`: who answered, several where
    choices went on apart. The first of them tells how many tokens the prompt has, how many of those it had cached,
    and for how long it kept the request waiting (`queue_s`, None where nobody has told). `request_ids` are those
    under which replicas know its parts; of each, `routings` (from `routed`, who knows) and `stories` say what is
    known, and `loss` is why the attempt was lost. `cost` is None until one of them has told; of a replica that was
    lost, nobody does.
    """

    begun_at: float
    n_before: int
    request_ids: tuple[str, ...] = ()
    replica_ids: list[str] = field(default_factory=list)
    n_prompt: int = 0
    n_cached: int = 0
    queue_s: float | None = None
    cost: Cost | None = None
    first_at: float | None = None  # of its first tokens
    ended_at: float | None = None
    is_lost: bool = False
    loss: str | None = None
    routed: Callable[[str], Routing | None] = lambda request_id: None
    routings: dict[str, Routing] = field(default_factory=dict)
    stories: list[ToldStory] = field(default_factory=list)

    def route(self) -> None:
        """Takes what is known by now of how its parts were routed."""
        for request_id in self.request_ids:
            routing = self.routed(request_id)
            if routing is not None:
                self.routings[request_id] = routing


def total_cost(costs: Iterable[Cost | None]) -> Cost | None:
    """Those that are known, added up; None where none is."""
    known = [cost for cost in costs if cost is not None]
    return reduce(add, known) if known else None


class Attempts:
    """The attempts of one request, oldest first.

    `enter` is called in the task that sends the request, before it does.
    """

    def __init__(self, enter: Callable[[], object] | None = None) -> None:
        self.made: list[Attempt] = []
        self._enter = enter

    def begin(
        self,
        n_before: int,
        request_ids: Sequence[str] = (),
        routed: Callable[[str], Routing | None] = lambda request_id: None,
    ) -> None:
        """Requests of these ids go to replicas, for what is missing after so many tokens; `routed` knows where.

        A stream that waits until anybody serves asks twice a second: all that is one attempt.
        """
        if self._enter is not None:
            self._enter()
        newest = self.made[-1] if self.made else None
        if newest is not None and newest.n_before == n_before > 0 and not newest.replica_ids:
            newest.ended_at, newest.is_lost, newest.loss = None, False, None
            newest.request_ids, newest.routed = tuple(request_ids), routed
            return
        self.made.append(
            Attempt(begun_at=time.monotonic(), n_before=n_before, request_ids=tuple(request_ids), routed=routed)
        )

    def hear(self, delivery: Delivery) -> None:
        """Another replica has answered than the one before; the first time, it tells how long it took."""
        attempt = self.made[-1]
        if attempt.first_at is None:
            attempt.first_at = time.monotonic()
            attempt.route()
            usage = next((delta.usage for delta in delivery.deltas if delta.usage is not None), None)
            if usage is not None:
                attempt.n_prompt, attempt.n_cached = usage.prompt_tokens, usage.cached_tokens
                attempt.queue_s = usage.queue_s
        if delivery.replica_id not in attempt.replica_ids:
            attempt.replica_ids.append(delivery.replica_id)

    def pay(self, cost: Cost) -> None:
        """The newest attempt, or one of its parts, has cost a replica so much."""
        self.made[-1].cost = total_cost([self.made[-1].cost, cost])

    def tell(self, story: ToldStory) -> None:
        """A replica has told the story of a part of the newest attempt."""
        self.made[-1].stories.append(story)

    def end(self, *, loss: str | None = None) -> None:
        """The newest attempt is over, with the loss of its replica or otherwise."""
        if self.made and self.made[-1].ended_at is None:
            self.made[-1].ended_at = time.monotonic()
            self.made[-1].route()
            self.made[-1].is_lost, self.made[-1].loss = loss is not None, loss
