"""One replica's engine: a thread that plans, begins, applies and publishes, step after step.

Two sides share three things only. The thread owns scheduler, executor and the table of open streams. Event loops
own their mailboxes, or whatever else receives deltas. Between them stand the command queue (add, abort, drain,
stop; in order of arrival), `post` (once per step and loop), and values that are replaced whole: the load snapshot
and the failure.

    generate ──add──► commands ──► scheduler.add │ plan → begin ┄ result → apply │ ──post──► mailbox ──► Delivery
             ──abort─►                           └────── while there is work ────┘

Where the executor lets steps overlap (`Capacity.max_flights`), the next one is planned and begun before the result
of the last one is taken, so that the device need not wait for the host; where the scheduler has no next one yet,
the result comes first. Commands are taken between any two steps.

An exception out of scheduler or executor ends the engine, because the KV cache can no longer be trusted: each open
choice gets a terminal delta with `FinishReason.ERROR`. Whoever comes later is refused by `Unavailable`: it was not
that request of which the engine died.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager

from bakehouse_replica.commands import Abort, Add, Adopt, Command, Drain, Explain, Fail, Stop
from bakehouse_replica.core.counts import Series
from bakehouse_replica.core.errors import BakehouseError, RankLost, Unavailable
from bakehouse_replica.core.executor import Executor, Pending
from bakehouse_replica.core.scheduler import Scheduler
from bakehouse_replica.core.story import Story, ToldStory
from bakehouse_replica.core.types import (
    Delivery,
    Failure,
    FailureKind,
    ReplicaCard,
    ReplicaLoad,
    ReplicaStatus,
    Request,
    SchedulingPolicy,
    TokenDelta,
)
from bakehouse_replica.core.vocabulary import check_vocabulary
from bakehouse_replica.mailbox import Mailbox, Recipient, post
from bakehouse_replica.meter import Meter
from bakehouse_replica.preparing import prepared
from bakehouse_replica.streams import StreamTable

logger = logging.getLogger(__name__)

FAILURE_MESSAGE = "the engine of this replica has failed"
# Routers poll every 0.2 s or slower, and a snapshot lists up to some hundreds of hashes: not one per step.
LOAD_PERIOD_S = 0.05
# Longer than any step that makes progress.
CLOSE_GRACE_S = 10.0
# Longer than most steps: stories are told between two of them.
EXPLAIN_TIMEOUT_S = 2.0


class Engine:
    """Serves requests through one executor; satisfies the router's `ReplicaClient` as it is."""

    def __init__(
        self,
        *,
        executor: Executor,
        policy: SchedulingPolicy,
        card: ReplicaCard,
        clock: Callable[[], float] = time.monotonic,
        on_failure: Callable[[str], None] | None = None,
        close_grace_s: float = CLOSE_GRACE_S,
        explain_timeout_s: float = EXPLAIN_TIMEOUT_S,
    ) -> None:
        """`on_failure` is called once, from the engine's thread, after the open streams have been told."""
        self._executor = executor
        self._meter = Meter()
        self._scheduler = Scheduler(
            capacity=executor.capacity,
            policy=policy,
            model_digest=card.model_digest,
            hash_key=card.hash_key,
            counts=self._meter.counts,
        )
        self._policy = policy
        self._card = card
        self._clock = clock
        self._on_failure = on_failure
        self._close_grace_s = close_grace_s
        self._explain_timeout_s = explain_timeout_s
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._begun: deque[Pending] = deque()  # oldest first
        self._streams = StreamTable()
        self._drains: list[Future[None]] = []
        self._load = self._scheduler.load()
        self._loaded_s = clock()
        self._failure: str | None = None
        self._refusal: str | None = "the replica has not started"
        self._stepping_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="bakehouse-engine", daemon=True)

    # --- Any thread, any event loop -------------------------------------------------------------------------

    @property
    def card(self) -> ReplicaCard:
        """What this engine serves; constant."""
        return self._card

    @property
    def policy(self) -> SchedulingPolicy:
        """By which requests that come from now on are scheduled."""
        return self._policy

    @property
    def failure(self) -> str | None:
        """Why the engine is dead, without internals; None while it is not."""
        return self._failure

    def stall(self, limit_s: float) -> str | None:
        """What is wrong where the step that runs now has taken longer than `limit_s`; None where none has."""
        since = self._stepping_since
        if since is None or self._clock() - since <= limit_s:
            return None
        return f"{FAILURE_MESSAGE}: a step has taken longer than {limit_s:g} s"

    @property
    def series(self) -> tuple[Series, ...]:
        """All that this replica counts, as of half a second ago or later."""
        return self._meter.series(self._clock())

    def start(self) -> None:
        """Begin to serve; once."""
        self._refusal = None
        self._thread.start()

    async def generate(self, request: Request) -> AsyncGenerator[Delivery, None]:
        """The request's deliveries, until each choice has had its terminal delta; closing it cancels the request.

        Raises what `serving` raises and its recipient gets, on the first step.
        """
        mailbox = Mailbox(request.params.n)
        async with self.serving(request, mailbox):
            while not mailbox.is_finished:
                yield Delivery(replica_id=self._card.replica_id, deltas=await mailbox.take())

    @asynccontextmanager
    async def serving(self, request: Request, recipient: Recipient) -> AsyncGenerator[None, None]:
        """Lets the request's deltas go to `recipient`; leaving the context before they are complete cancels it.

        Raises, on entry, `InvalidRequest`, `Unavailable`, and `DeadlineExceeded` where the request's time ran out
        before it could be queued. What the scheduler refuses it with, or `Overloaded`, the recipient gets.
        """
        self._refuse_unless_serving()
        check_vocabulary(request, self._card.vocabulary_size)
        prepared_s = 0.0
        if request.params.grammar is not None:
            begun_at = self._clock()
            request = await prepared(request, self._executor, self._clock)
            prepared_s = self._clock() - begun_at
            self._refuse_unless_serving()
        self._commands.put(Add(request, recipient, prepared_s))
        try:
            yield
        finally:
            if not recipient.is_complete:
                self._commands.put(Abort(request.request_id, recipient))

    def abort(self, request_id: str) -> None:
        """Cancel a request; its open choices end with `FinishReason.CANCELLED`. Idempotent, never waits."""
        self._commands.put(Abort(request_id))

    async def explain(self, request_ids: Sequence[str]) -> tuple[ToldStory, ...]:
        """The stories so far of those of these requests that live here, or were cancelled not long ago.

        None of them where the engine has failed, or a step takes longer than `explain_timeout_s`; never raises.
        """
        if not self._thread.is_alive():
            return ()
        answer: Future[dict[str, Story]] = Future()
        self._commands.put(Explain(tuple(request_ids), answer))
        try:
            stories = await asyncio.wait_for(asyncio.wrap_future(answer), self._explain_timeout_s)
        except TimeoutError:
            return ()
        return tuple(
            ToldStory(replica_id=self._card.replica_id, request_id=request_id, story=story)
            for request_id, story in stories.items()
        )

    def adopt(self, policy: SchedulingPolicy) -> None:
        """Schedule by another policy, between two steps; nothing that runs or waits is touched, and never waits.

        `max_model_len` must stay.
        """
        self._policy = policy
        self._commands.put(Adopt(policy))

    def fail(self, error: BakehouseError) -> None:
        """The executor has broken, perhaps while no step ran: the engine ends as if a step had raised `error`."""
        self._commands.put(Fail(error))

    def load(self) -> ReplicaLoad:
        """The latest snapshot, at most a step and `LOAD_PERIOD_S` old."""
        return self._load

    async def statuses(self) -> tuple[ReplicaStatus, ...]:
        """This replica alone."""
        problem, counted = self._failure or self._refusal, self._meter.status_series(self._clock())
        return (ReplicaStatus(card=self._card, load=self._load, problem=problem, counted=counted),)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the others to end; whether all did within `timeout_s`."""
        self._refusal = self._refusal or "the replica is draining"
        if not self._thread.is_alive():
            return True
        is_idle: Future[None] = Future()
        self._commands.put(Drain(is_idle))
        try:
            await asyncio.wait_for(asyncio.wrap_future(is_idle), timeout_s)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Cancel what is in flight, end the thread, close the executor; idempotent.

        A step that takes longer than the grace time is not waited for.
        """
        self._refusal = "the replica has been closed"
        if self._thread.is_alive():
            self._commands.put(Stop())
            await asyncio.to_thread(self._thread.join, self._close_grace_s)
        self._executor.close()  # where a step hangs, it ends with this, or its thread is left behind: a daemon

    def _refuse_unless_serving(self) -> None:
        if self._failure is not None:
            raise Unavailable(self._failure)
        if self._refusal is not None:
            raise Unavailable(self._refusal)

    # --- The engine's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        is_serving = True
        while is_serving:
            try:
                is_serving = self._take_commands()
                if is_serving and self._failure is None and self._scheduler.has_work:
                    self._step()
            except Exception as error:
                self._fail(error)
        self._wind_up()

    def _take_commands(self) -> bool:
        """Obey what has come in, waiting for it where there is no work; False once told to stop."""
        is_idle = self._failure is not None or not self._scheduler.has_work
        if self._failure is None:
            self._meter.audit_if_due(self._scheduler.check, self._clock, is_idle=is_idle)
        self._refresh_load(is_idle=is_idle)
        if is_idle:
            self._tell_drains()
        while True:
            try:
                command = self._commands.get(block=is_idle)
            except queue.Empty:
                return True
            if is_idle:
                self._meter.wake(self._clock())
            if isinstance(command, Stop):
                return False
            self._obey(command)
            is_idle = False

    def _obey(self, command: Add | Abort | Adopt | Drain | Explain | Fail) -> None:
        match command:
            case Add():
                self._add(command)
            case Abort():
                self._abort(command.request_id, command.recipient)
            case Adopt():
                self._scheduler.adopt(command.policy)
            case Drain():
                self._drains.append(command.is_idle)
            case Explain():
                self._explain(command)
            case Fail() if self._failure is None:
                raise command.error

    def _explain(self, command: Explain) -> None:
        if not command.answer.set_running_or_notify_cancel():
            return  # the asker's time ran out
        told = dict[str, Story]()
        if self._failure is None:  # else the scheduler may be what has failed
            now = self._clock()
            stories = {request_id: self._scheduler.explain(request_id, now) for request_id in command.request_ids}
            told = {request_id: story for request_id, story in stories.items() if story is not None}
        command.answer.set_result(told)

    def _add(self, command: Add) -> None:
        request, recipient = command.request, command.recipient
        try:
            if self._failure is not None:
                raise Unavailable(self._failure)
            self._streams.open(request, recipient)
            self._scheduler.add(request, self._clock(), command.prepared_s)
        except BakehouseError as error:
            self._streams.leave(request.request_id, recipient)
            post({recipient.loop: [(recipient, error)]})
        self._deliver(self._scheduler.take_deltas())

    def _abort(self, request_id: str, recipient: Recipient | None) -> None:
        """`recipient`: it has left, so the request is aborted only if it is still that recipient's.

        It is sent the end all the same, with what the request has cost.
        """
        if self._failure is None and (recipient is None or self._streams.goes_to(request_id, recipient)):
            self._scheduler.abort(request_id)
            self._deliver(self._scheduler.take_deltas())

    def _step(self) -> None:
        """Begins the next step where there is one; takes the oldest result unless yet another may be begun."""
        begun_at = self._stepping_since = self._clock()
        plan = self._scheduler.plan(begun_at)
        deltas = self._scheduler.take_deltas()
        planned_at, result = self._clock(), None
        if plan is not None:
            self._begun.append(self._executor.begin(plan))
        if self._begun and (plan is None or len(self._begun) == self._executor.capacity.max_flights):
            result = self._begun.popleft().result()
        executed_at = self._clock()
        if result is not None:
            deltas += self._scheduler.apply(result, executed_at)
        self._deliver(deltas)
        self._meter.count_step(begun_at, planned_at, executed_at, self._clock())
        self._stepping_since = None

    def _deliver(self, deltas: Iterable[TokenDelta]) -> None:
        for request_id in self._streams.deliver(deltas):
            logger.warning("request %s: the event loop of its consumer has closed; aborting it", request_id)
            self._scheduler.abort(request_id)

    def _fail(self, error: Exception) -> None:
        self._stepping_since = None
        logger.error("the engine has failed; open requests: %s", self._streams.request_ids, exc_info=error)
        self._failure = f"{FAILURE_MESSAGE}: {error}" if isinstance(error, RankLost) else FAILURE_MESSAGE
        self._meter.take(self._clock(), serves=False)
        self._streams.fail_all(Failure(kind=FailureKind.ENGINE, message=self._failure))
        if self._on_failure is not None:
            self._on_failure(self._failure)

    def _refresh_load(self, *, is_idle: bool) -> None:
        if self._failure is not None:
            return  # the scheduler may be what has failed
        now = self._clock()
        if is_idle or now - self._loaded_s >= LOAD_PERIOD_S:
            self._load, self._loaded_s = self._scheduler.load(), now
        if is_idle or self._meter.is_due(now):
            self._scheduler.note(self._load, now)
            self._meter.take(now, serves=self._refusal is None, sleeps=is_idle)

    def _finish_steps(self) -> None:
        """So that none is in flight when the executor is closed; after a failure, nobody knows what would come."""
        if self._failure is not None:
            return
        try:
            while self._begun:
                self._scheduler.apply(self._begun.popleft().result(), self._clock())
        except Exception as error:
            logger.error("a step that was in flight at the end has failed", exc_info=error)

    def _tell_drains(self) -> None:
        drains, self._drains = self._drains, []
        for is_idle in drains:
            if is_idle.set_running_or_notify_cancel():  # False where the waiter's time ran out
                is_idle.set_result(None)

    def _wind_up(self) -> None:
        """Tell everybody who still waits: open streams, and commands that came after the stop; let steps end."""
        for request_id in self._streams.request_ids:
            self._abort(request_id, None)
        self._finish_steps()
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, Add):
                closed = Unavailable("the replica has been closed")
                post({command.recipient.loop: [(command.recipient, closed)]})
            elif isinstance(command, Drain):
                self._drains.append(command.is_idle)
            elif isinstance(command, Explain) and command.answer.set_running_or_notify_cancel():
                command.answer.set_result({})
        self._refresh_load(is_idle=True)
        self._tell_drains()
