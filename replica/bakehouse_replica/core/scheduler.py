"""The scheduler: decides, step by step, which tokens of which sequences are computed, and in which blocks.

A pure machine: frozen messages in and out, no clock, no randomness, no I/O. The driver calls

    add(request, now)    at any time          abort(request_id)    at any time, even before its `add`
    plan(now)            ─► StepPlan or None   None: nothing to do until the next `add`, or `apply`
    apply(result, now)   ─► [TokenDelta]       the deltas of the oldest step in flight
    take_deltas()        ─► [TokenDelta]       terminal deltas that arose elsewhere; drain it after every plan
    adopt(policy)        at any time

and the same calls always lead to the same plans, block ids included.

Invariants, after every call (`check` asserts them):

1. A request is known from `add` until each of its choices has had its one terminal delta.
2. `running` and `waiting` are disjoint and sorted by (priority, arrival, choice), which never changes for a
   sequence. Only running sequences hold blocks. Running sequences, each counted with the choices that it will
   fork into, never outnumber the slots.
3. free + cached + held = all blocks, and the holders of a block are the tables that it is in.
4. Whenever there is work and no step in flight, `plan` makes a plan. The first running sequence can preempt all
   others, and a sequence that cannot grow although it runs alone ends by itself with `NO_ROOM`.
5. Tokens that steps in flight will draw are placeholders, and no step in flight writes to a block that can be
   found (see `flight`).

A plan is made in this order, each phase choosing first (`budget`, `room`: reads only) and then committing, so
that a refused admission leaves no trace:

    expire    sequences whose deadline has passed end
    yield     if the first in the queue is more urgent than running ones and fits without those, they are preempted
    grant     tokens are shared out among the running
    preempt   the last in order, until the blocks for all grants are at hand
    allocate  blocks for the grants; shared tails are copied before they are written
    admit     newcomers in order, with what is left of tokens, slots and blocks (not in a step that preempted);
              one whose prefix is computed in this very step keeps its place and is admitted after it
    fill      what is still left goes to unfinished prefills

All preemption comes before all allocation: no block freed in a plan is the source of one of its copies, so
copies may run in any order.

Up to `Capacity.max_flights` steps may be in flight, and with them `add`, `abort` and `load` are called. A plan
that is made while another is in flight is made *ahead*. It takes for granted that sequences go on, up to the
limits of their lengths; one that turns out to have ended was computed once too often, and that is ignored. It
takes nothing back: where somebody would be preempted, or end for want of room, or where a draw in flight is needed
before the next one can be asked for, there is no plan before the next `apply`. So whoever is preempted has no step
in flight, and a plan made with none in flight is the same whether others are made ahead or not.
"""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from itertools import count

from bakehouse_replica.core.admission import n_slots_of, output_limit
from bakehouse_replica.core.blocks import BlockPool
from bakehouse_replica.core.budget import StepBudget, is_long
from bakehouse_replica.core.counts import Counts
from bakehouse_replica.core.errors import InvalidRequest, Overloaded
from bakehouse_replica.core.flight import Flight, check_flights
from bakehouse_replica.core.hashing import HashScope, root_hash
from bakehouse_replica.core.recent import RecentIds
from bakehouse_replica.core.room import Room, n_blocks_needed
from bakehouse_replica.core.roster import Roster
from bakehouse_replica.core.sequence import Call, Sequence, Status
from bakehouse_replica.core.tally import Tally, replica_counts
from bakehouse_replica.core.types import (
    BlockCopy,
    Capacity,
    Draw,
    Failure,
    FailureKind,
    FinishReason,
    ReplicaLoad,
    Request,
    SchedulingPolicy,
    StepPlan,
    StepResult,
    TokenDelta,
)

REMEMBERED_IDS = 4096  # an abort meets its request, or its end, within milliseconds: far fewer are on their way
RESIDENT_HASHES_REPORTED = 512  # 4 KiB a snapshot
# A newcomer whose prefix is being computed waits a step for it, where that brings it at least so far as this share
# of what it could compute in the step itself. Of 32 requests with a common prompt of 200 tokens, 16 at a time, two
# computed it; now one does. Each wait ends with blocks found, or with the end of those who computed them.
COMING_SHARE = 0.5
STEP_TIME_WEIGHT = 0.1  # of the newest step in the average


class Scheduler:
    """Schedules the requests of one replica, and counts in `counts`, which are those of `replica_counts`.

    Tests break the pool by `pool_type`.
    """

    def __init__(
        self,
        *,
        capacity: Capacity,
        policy: SchedulingPolicy,
        model_digest: str,
        hash_key: bytes,
        counts: Counts | None = None,
        pool_type: type[BlockPool] = BlockPool,
    ) -> None:
        self._capacity = capacity
        self._policy = policy
        self._model_digest = model_digest
        self._hash_key = hash_key
        self._n_slots = n_slots_of(capacity)
        self._pool = pool_type(n_blocks=capacity.n_blocks, block_size=capacity.block_size, hash_key=hash_key)
        self._roster = Roster(pool=self._pool, n_slots=self._n_slots)
        self._tally = Tally(replica_counts() if counts is None else counts, capacity)
        self._early_aborts = RecentIds(REMEMBERED_IDS)
        self._ended = RecentIds(REMEMBERED_IDS)  # else a late abort would cancel the next request of that id
        self._outbox: list[TokenDelta] = []
        self._flights: deque[Flight] = deque()  # oldest first
        self._arrivals = count()
        self._steps = count()
        self._step_time_s = 0.0
        self._applied_at = float("-inf")
        self._version = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence is alive or any step in flight, so that there is something to plan or to apply."""
        return bool(self._roster.running or self._roster.waiting or self._flights)

    def adopt(self, policy: SchedulingPolicy) -> None:
        """Another policy from the next call on; who waits already stays, even beyond its limit.

        `max_model_len` must stay, for requests have been accepted by it.
        """
        assert policy.max_model_len == self._policy.max_model_len, (policy, self._policy)
        self._policy = policy

    def add(self, request: Request, now: float) -> None:
        """Queues a request; its deadline is `now + timeout_s`.

        One that was aborted before, or that arrives complete, ends at once: see `take_deltas`.

        Raises:
            InvalidRequest: it can never be served as asked, or its id is in use.
            Overloaded: `max_waiting_requests` are waiting.
        """
        n_output_limit = output_limit(request, self._capacity, self._policy.max_model_len)
        if request.request_id in self._roster.calls:
            raise InvalidRequest(f"request_id {request.request_id!r} is already being served", "request_id")
        is_aborted = request.request_id in self._early_aborts
        if not is_aborted and len(self._roster.waiting) >= self._policy.max_waiting_requests:
            raise Overloaded(f"{len(self._roster.waiting)} requests are waiting, which is the limit")
        self._version += 1
        self._ended.forget(request.request_id)
        sequence = self._enter(request, n_output_limit, now)
        self._early_aborts.forget(request.request_id)
        reason = FinishReason.CANCELLED if is_aborted else sequence.finish_reason()
        if reason is not None and (is_aborted or not sequence.call.owes_scores):
            self._end(sequence, reason)

    def abort(self, request_id: str) -> None:
        """Ends all choices of a request as cancelled and frees their blocks; harmless when it has ended before.

        An id that was never seen is remembered for a while, and its `add` ends at once.
        """
        self._version += 1
        call = self._roster.calls.get(request_id)
        if call is not None:
            for sequence in list(call.sequences):
                self._end(sequence, FinishReason.CANCELLED)
        elif request_id not in self._ended:
            self._early_aborts.remember(request_id)

    def plan(self, now: float) -> StepPlan | None:
        """The next step; None where there is none to make before the next `apply`, or where nothing is left to do.

        Fewer than `max_flights` steps may be in flight.
        """
        flights, running, is_ahead = self._flights, self._roster.running, bool(self._flights)
        assert len(flights) < self._capacity.max_flights, (
            f"step {flights[0].plan.step} is in flight, {len(flights)} in all; apply its result first"
        )
        if is_ahead and not flights[-1].may_be_overtaken:
            return None
        self._version += 1
        self._expire(now)
        outranked = self._outranked()
        if is_ahead and outranked:
            return None
        for sequence in reversed(outranked):
            self._preempt(sequence)
        going_on = [sequence for sequence in running if sequence.wants_steps] if is_ahead else running
        budget = StepBudget.shared_among(going_on, self._capacity, self._policy)
        if is_ahead and n_blocks_needed(budget.grants, self._pool) > self._pool.n_available:
            return None
        has_preempted = not is_ahead and self._preempt_until_blocks_suffice(budget)
        copies: list[BlockCopy] = []
        for sequence, n_tokens in budget.grants.items():
            copies += self._roster.grow(sequence, n_tokens)
        if not has_preempted or not running:
            copies += self._admit(budget, now)
        copies += self._fill(budget, going_on)
        return self._depart(budget, copies, now)

    def apply(self, result: StepResult, now: float) -> list[TokenDelta]:
        """Books what the oldest step in flight computed; returns its deltas, in the plan's order.

        Of a draw, nothing is kept behind the token that ends its choice. A draw that failed ends its choice alone.
        What comes of a sequence that has ended since it was planned is ignored.
        """
        assert self._flights, f"step {result.step} is not in flight; no step is"
        flight = self._flights[0]
        flight.check(result)
        self._flights.popleft()
        self._version += 1
        self._measure(now - max(flight.planned_at, self._applied_at))
        self._applied_at = now
        sampled, scored = iter(result.sampled), iter(result.scored)
        deltas: list[TokenDelta] = []
        block_size = self._capacity.block_size
        for chunk, sequence in zip(flight.plan.chunks, flight.sequences, strict=True):
            scores = () if chunk.score is None else next(scored).logprobs
            draws = () if chunk.sample is None else next(sampled).draws
            if sequence.status is Status.ENDED:
                continue
            sequence.n_applied = n_applied = sequence.n_applied + len(chunk.token_ids)
            if n_applied // block_size > sequence.n_registered:
                self._roster.register(sequence)
            if scores:
                sequence.call.collect(scores)
            if len(draws) == 1:
                deltas.append(self._take(sequence, draws[0]))
            elif draws:
                deltas += map(self._take, self._roster.fork(sequence), draws)
            elif scores:
                deltas += self._end_scored(sequence)
        self._tally.draw(sum([len(delta.token_ids) for delta in deltas]))
        return deltas

    def take_deltas(self) -> list[TokenDelta]:
        """The terminal deltas that arose in `add`, `abort` and `plan` since the last call, oldest first."""
        deltas, self._outbox = self._outbox, []
        return deltas

    def load(self) -> ReplicaLoad:
        """A snapshot for routers and metrics."""
        running, waiting = self._roster.running, self._roster.waiting
        waiting_tokens = sum(sequence.n_missing for sequence in waiting)
        waiting_tokens += sum(sequence.n_missing for sequence in running if not sequence.is_decoding)
        return ReplicaLoad(
            version=self._version,
            n_running=len(running),
            n_waiting=len(waiting),
            waiting_tokens=waiting_tokens,
            n_free_blocks=self._pool.n_free,
            n_cached_blocks=self._pool.n_cached,
            n_held_blocks=self._pool.n_held,
            step_time_s=self._step_time_s,
            resident=self._pool.resident_hashes(RESIDENT_HASHES_REPORTED),
        )

    def note(self, load: ReplicaLoad) -> None:
        """Puts the gauges of a snapshot into the counts. O(waiting)."""
        waiting = self._roster.waiting
        self._tally.note(load, sum(sequence.call.cached_tokens is not None for sequence in waiting))

    def check(self) -> None:
        """Asserts the invariants. O(blocks + sequences): an audit, not for every step."""
        self._roster.check()
        check_flights(self._flights, (*self._roster.waiting, *self._roster.running))

    def _enter(self, request: Request, n_output_limit: int, now: float) -> Sequence:
        seed = request.params.seed
        assert seed is not None, "output_limit() refuses requests without a seed"
        scope = HashScope(
            block_size=self._capacity.block_size,
            model_digest=self._model_digest,
            key=self._hash_key,
            salt=request.cache_salt,
        )
        call = Call.of(
            request,
            arrival=next(self._arrivals),
            now=now,
            n_output_limit=n_output_limit,
            root_hash=root_hash(scope),
        )
        return self._roster.enter(call, seed)

    def _end(self, sequence: Sequence, reason: FinishReason, failure: Failure | None = None) -> None:
        self._outbox += sequence.ends(reason, failure)
        self._forget(sequence, reason)

    def _forget(self, sequence: Sequence, reason: FinishReason) -> None:
        self._roster.end(sequence)
        request_id = sequence.call.request.request_id
        if request_id not in self._roster.calls:
            self._ended.remember(request_id)
            self._tally.end(sequence, reason, self._applied_at)

    def _end_without_room(self, sequence: Sequence) -> None:
        n_blocks = self._pool.n_blocks_for(len(sequence.tokens))
        message = (
            f"{len(sequence.tokens)} tokens of prompt and output need {n_blocks} KV blocks of "
            f"{self._pool.block_size}; this replica has {self._pool.n_blocks}"
        )
        self._end(sequence, FinishReason.ERROR, Failure(kind=FailureKind.NO_ROOM, message=message))

    def _expire(self, now: float) -> None:
        calls = self._roster.calls.values()
        for call in [call for call in calls if call.deadline is not None and call.deadline <= now]:
            message = f"the request's time limit of {call.request.timeout_s} s has passed"
            for sequence in list(call.sequences):
                self._end(sequence, FinishReason.ERROR, Failure(kind=FailureKind.DEADLINE, message=message))

    def _outranked(self) -> list[Sequence]:
        """The fewest running sequences of lower priority that the first waiting one needs gone, in order."""
        running = self._roster.running
        if not self._roster.waiting or not running:
            return []
        urgent = self._roster.waiting[0]
        n_outranked = sum(sequence.order[0] > urgent.order[0] for sequence in running)
        if n_outranked == 0:
            return []
        hits = self._roster.match(urgent)
        if not self._may_prefill(urgent.n_needed - len(hits) * self._pool.block_size):
            return []
        if not self._room(len(running) - n_outranked).fits(urgent, hits, self._pool):
            return []
        n_staying = len(running)
        while not self._room(n_staying).fits(urgent, hits, self._pool):
            n_staying -= 1
        return running[n_staying:]

    def _preempt_until_blocks_suffice(self, budget: StepBudget) -> bool:
        """Whether anyone had to go so that the rest of the grants can be honoured."""
        running, has_preempted = self._roster.running, False
        while n_blocks_needed(budget.grants, self._pool) > self._pool.n_available:
            last, has_preempted = running[-1], True
            budget.withdraw(last)
            if len(running) == 1:
                self._end_without_room(last)
            else:
                self._preempt(last)
        return has_preempted

    def _preempt(self, sequence: Sequence) -> None:
        self._roster.preempt(sequence)
        self._tally.preempt()

    def _admit(self, budget: StepBudget, now: float) -> list[BlockCopy]:
        copies: list[BlockCopy] = []
        if not self._roster.waiting:
            return copies
        room = self._room(len(self._roster.running))
        coming = set[bytes]()  # no more than the blocks of this step and of those in flight
        for sequence in self._roster.running:
            if len(sequence.block_hashes) > sequence.n_registered:  # else no more of it will be found
                coming.update(self._roster.coming(sequence, budget.grants.get(sequence, 0)))
        for sequence in list(self._roster.waiting):
            if budget.prefill_left == 0 or sequence.n_slots > room.slots_left:
                break
            if self._pool.n_blocks_for(sequence.n_needed) > self._pool.n_blocks:
                self._end_without_room(sequence)
                continue
            hits = self._roster.match(sequence)
            if not self._may_prefill(sequence.n_needed - len(hits) * self._pool.block_size):
                continue  # others pass it, or they would wait for two long prompts
            if not room.fits(sequence, hits, self._pool):
                break  # nobody passes it, or a large request would wait for ever behind small ones
            room.take(sequence, hits, self._pool)
            n_own = min(sequence.n_needed - len(hits) * self._pool.block_size, budget.prefill_left)
            n_coming = self._roster.n_coming(sequence, len(hits), coming) * self._pool.block_size
            if n_coming >= n_own * COMING_SHARE:
                continue  # it waits for these blocks; its place is kept
            is_first_time = sequence.call.cached_tokens is None
            self._roster.start(sequence, hits)
            if is_first_time:
                self._tally.admit(sequence.call, now)
            n_tokens = budget.grant(sequence)
            coming.update(self._roster.coming(sequence, n_tokens))
            copies += self._roster.grow(sequence, n_tokens)
        return copies

    def _fill(self, budget: StepBudget, going_on: Iterable[Sequence]) -> list[BlockCopy]:
        copies: list[BlockCopy] = []
        for sequence in going_on:
            if budget.prefill_left == 0:
                break
            n_granted = budget.grants.get(sequence, 0)
            if sequence.n_missing == n_granted:
                continue
            n_blocks = len(sequence.block_table) + self._pool.n_available
            if budget.grant(sequence, n_blocks * self._pool.block_size - sequence.n_computed - n_granted):
                copies += self._roster.grow(sequence, budget.grants[sequence])
        return copies

    def _depart(self, budget: StepBudget, copies: Ordered[BlockCopy], now: float) -> StepPlan | None:
        if not budget.grants:
            assert not self.has_work or self._flights, "sequences are left, but none of them can go on"
            return None
        chunks = tuple(sequence.book(n_tokens) for sequence, n_tokens in budget.grants.items())
        plan = StepPlan(step=next(self._steps), copies=tuple(copies), chunks=chunks)
        self._flights.append(Flight(plan, tuple(budget.grants), now))
        self._tally.depart(len(chunks), sum(budget.grants.values()), len(copies))
        return plan

    def _may_prefill(self, n_missing: int) -> bool:
        """Whether a newcomer with so many tokens to compute may join the prefills that run."""
        if not is_long(n_missing, self._policy):
            return True
        prefills = (sequence for sequence in self._roster.running if not sequence.is_decoding)
        n_long = sum(is_long(sequence.n_missing, self._policy) for sequence in prefills)
        return n_long < self._policy.max_long_prefills

    def _room(self, n_staying: int) -> Room:
        running = self._roster.running
        return Room.beside(running[:n_staying], self._pool, self._n_slots, leaving=running[n_staying:])

    def _take(self, choice: Sequence, draw: Draw) -> TokenDelta:
        """Appends what was drawn for a choice, and forgets it where it ends with that."""
        kept, reason = choice.accept(draw)
        if choice.call.first_token_at is None and kept.token_ids:
            self._tally.begin_output(choice.call, self._applied_at)
        if reason is None:
            return choice.delta(kept)
        failure = None
        if reason is FinishReason.ERROR:
            failure = Failure(kind=FailureKind.DRAW, message=draw.failure or "")
        delta = choice.delta(kept, reason, failure)
        self._forget(choice, reason)
        return delta

    def _end_scored(self, sequence: Sequence) -> list[TokenDelta]:
        """Ends a sequence that has waited for nothing but the scores of its prompt, once it has them."""
        reason = sequence.finish_reason()
        if reason is None or sequence.call.owes_scores:
            return []
        deltas = sequence.ends(reason)
        self._forget(sequence, reason)
        return deltas

    def _measure(self, elapsed_s: float) -> None:
        weight = STEP_TIME_WEIGHT if self._step_time_s else 1.0
        self._step_time_s += weight * (elapsed_s - self._step_time_s)
