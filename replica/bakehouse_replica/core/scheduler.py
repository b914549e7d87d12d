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

A plan is made in this order, each phase (`phases`) choosing first (`budget`, `room`: reads only) and then
committing, so that a refused admission leaves no trace:

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
from collections.abc import Sequence as Ordered
from itertools import count

from bakehouse_replica.core.admission import n_slots_of, output_limit
from bakehouse_replica.core.blocks import BlockPool
from bakehouse_replica.core.budget import StepBudget
from bakehouse_replica.core.call import Call
from bakehouse_replica.core.counts import Counts
from bakehouse_replica.core.ends import REMEMBERED_IDS, Ends
from bakehouse_replica.core.errors import InvalidRequest, Overloaded
from bakehouse_replica.core.flight import Flight, check_flights
from bakehouse_replica.core.hashing import HashScope, root_hash
from bakehouse_replica.core.phases import Phases
from bakehouse_replica.core.recent import RecentIds
from bakehouse_replica.core.room import n_blocks_needed
from bakehouse_replica.core.roster import Roster
from bakehouse_replica.core.sequence import Sequence, Status
from bakehouse_replica.core.stories import Stories
from bakehouse_replica.core.story import Story, WaitReason
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

RESIDENT_HASHES_REPORTED = 512  # 4 KiB a snapshot
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
        self._pool = pool_type(n_blocks=capacity.n_blocks, block_size=capacity.block_size, hash_key=hash_key)
        self._tally = Tally(replica_counts() if counts is None else counts, capacity)
        self._roster = Roster(pool=self._pool, n_slots=n_slots_of(capacity))
        self._stories = Stories(self._pool)
        self._ends = Ends(roster=self._roster, pool=self._pool, tally=self._tally, stories=self._stories)
        self._phases = Phases(
            roster=self._roster,
            pool=self._pool,
            ends=self._ends,
            tally=self._tally,
            stories=self._stories,
            policy=policy,
            n_slots=n_slots_of(capacity),
        )
        self._early_aborts = RecentIds(REMEMBERED_IDS)
        self._flights: deque[Flight] = deque()  # oldest first
        self._arrivals = count()
        self._n_steps = 0
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
        self._phases.adopt(policy)

    def add(self, request: Request, now: float, prepared_s: float = 0.0) -> None:
        """Queues a request; its deadline is `now + timeout_s`. `prepared_s`: spent on it before, for its story.

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
        self._pool.advance(now)
        self._ends.begin_anew(request.request_id)
        sequence = self._enter(request, n_output_limit, now)
        sequence.call.story.prepared_s = prepared_s
        self._stories.enter(sequence)
        self._early_aborts.forget(request.request_id)
        reason = FinishReason.CANCELLED if is_aborted else sequence.finish_reason()
        if reason is not None and (is_aborted or not sequence.call.owes_scores):
            self._ends.end(sequence, reason)

    def abort(self, request_id: str) -> None:
        """Ends all choices of a request as cancelled and frees their blocks; harmless when it has ended before.

        An id that was never seen is remembered for a while, and its `add` ends at once.
        """
        self._version += 1
        call = self._roster.calls.get(request_id)
        if call is not None:
            for sequence in list(call.sequences):
                self._ends.end(sequence, FinishReason.CANCELLED)
        elif not self._ends.has_ended(request_id):
            self._early_aborts.remember(request_id)

    def plan(self, now: float) -> StepPlan | None:
        """The next step; None where there is none to make before the next `apply`, or where nothing is left to do.

        Fewer than `max_flights` steps may be in flight.
        """
        flights, running, is_ahead = self._flights, self._roster.running, bool(self._flights)
        assert len(flights) < self._capacity.max_flights, (
            f"step {flights[0].plan.step} is in flight, {len(flights)} in all; apply its result first"
        )
        self._pool.advance(now)
        if is_ahead and not flights[-1].may_be_overtaken:
            self._await_apply(WaitReason.DRAW_IN_FLIGHT)
            return None
        self._version += 1
        self._stories.begin_plan(self._n_steps)
        self._ends.expire(now)
        outranked = self._phases.outranked()
        if is_ahead and outranked:
            self._await_apply(WaitReason.PREEMPTION_AHEAD)
            return None
        self._phases.preempt_outranked(outranked)
        going_on = [sequence for sequence in running if sequence.wants_steps] if is_ahead else running
        budget = StepBudget.shared_among(going_on, self._capacity, self._policy)
        if is_ahead and n_blocks_needed(budget.grants, self._pool) > self._pool.n_available:
            self._await_apply(WaitReason.PREEMPTION_AHEAD)
            return None
        has_preempted = not is_ahead and self._phases.preempt_until_blocks_suffice(budget)
        copies: list[BlockCopy] = []
        for sequence, n_tokens in budget.grants.items():
            copies += self._roster.grow(sequence, n_tokens)
        if not has_preempted or not running:
            copies += self._phases.admit(budget, now)
        self._stories.close_plan()
        copies += self._phases.fill(budget, going_on)
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
        self._pool.advance(now)
        self._tally.begin_apply(now)
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
        return self._ends.take_deltas()

    def explain(self, request_id: str, now: float) -> Story | None:
        """The story so far of a request that is alive, or that of one that was cancelled not long ago."""
        self._pool.advance(now)
        call = self._roster.calls.get(request_id)
        return self._ends.story_of_cancelled(request_id) if call is None else self._stories.story_of(call)

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

    def note(self, load: ReplicaLoad, now: float) -> None:
        """Puts the gauges of a snapshot, and the pool's time up to `now`, into the counts. O(waiting)."""
        waiting = self._roster.waiting
        self._pool.advance(now)
        self._tally.note(
            load, sum(sequence.call.cached_tokens is not None for sequence in waiting), self._pool.time
        )

    def check(self) -> None:
        """Asserts the invariants. O(blocks + sequences): an audit, not for every step."""
        self._roster.check()
        self._stories.check()
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

    def _await_apply(self, reason: WaitReason) -> None:
        """No plan is made ahead, which is what everybody waits for."""
        self._stories.stop(reason)
        self._stories.close_plan()

    def _depart(self, budget: StepBudget, copies: Ordered[BlockCopy], now: float) -> StepPlan | None:
        if not budget.grants:
            assert not self.has_work or self._flights, "sequences are left, but none of them can go on"
            return None
        chunks = tuple([sequence.book(n_tokens) for sequence, n_tokens in budget.grants.items()])
        for sequence in budget.prefilling:
            sequence.call.story.n_chunks += sequence in budget.grants
        plan = StepPlan(step=self._n_steps, copies=tuple(copies), chunks=chunks)
        self._n_steps += 1
        self._flights.append(Flight(plan, tuple(budget.grants), now))
        self._tally.depart(len(chunks), sum(budget.grants.values()), len(copies))
        return plan

    def _take(self, choice: Sequence, draw: Draw) -> TokenDelta:
        """Appends what was drawn for a choice, and forgets it where it ends with that."""
        kept, reason = choice.accept(draw)
        if choice.call.first_token_at is None and kept.token_ids:
            self._tally.begin_output(choice.call)
        if reason is None:
            return choice.delta(kept)
        failure = None
        if reason is FinishReason.ERROR:
            failure = Failure(kind=FailureKind.DRAW, message=draw.failure or "")
        (delta,) = self._ends.ended(choice, reason, failure, kept)
        return delta

    def _end_scored(self, sequence: Sequence) -> list[TokenDelta]:
        """Ends a sequence that has waited for nothing but the scores of its prompt, once it has them."""
        reason = sequence.finish_reason()
        if reason is None or sequence.call.owes_scores:
            return []
        return self._ends.ended(sequence, reason)

    def _measure(self, elapsed_s: float) -> None:
        weight = STEP_TIME_WEIGHT if self._step_time_s else 1.0
        self._step_time_s += weight * (elapsed_s - self._step_time_s)
