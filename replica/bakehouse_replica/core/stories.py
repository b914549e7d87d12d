"""Records what a scheduler decides, where it is decided, in the story of the call that it concerns.

In each plan, each sequence that waits has exactly one reason. Those that the plan looked at have their own. All
others wait behind one that nobody passes, or for what holds up the whole queue: they share the plan's *common*
reason, and cost nothing while they do. How long each common reason has held is summed up once for all; a sequence
keeps the sums as they were when it joined, and the difference is its own when it is looked at, admitted, or ends.
So a plan costs what it looks at, however many wait:

    enter ──► next_plan ──close──► common ◄──close──► its own reason ──► admit, or end
              ▲                                                            │
              └────────────────────────── preempt ─────────────────────────┘

A reason holds from its plan to the next, so the seconds of a wait add up to its length. An abort comes without
the time: there a wait ends at the latest moment that the scheduler has been told.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from bakehouse_replica.core.blocks import BlockPool
from bakehouse_replica.core.call import Call
from bakehouse_replica.core.maker import maker_of
from bakehouse_replica.core.sequence import Sequence, Status
from bakehouse_replica.core.story import Admitted, Preempted, PreemptionRule, Story, Waited, WaitReason

_COMMON = tuple((reason, is_behind) for is_behind in (False, True) for reason in WaitReason)
_new_waited, _new_admitted = maker_of(Waited), maker_of(Admitted)
_INDEX = {cause: index for index, cause in enumerate(_COMMON)}


@dataclass(slots=True, eq=False)
class Wait:
    """The newest stretch of a sequence's waiting; `reason` None: the common one.

    `n_plans` and `n_seconds`: how long each common reason had held when it joined.
    """

    reason: WaitReason | None
    since: float
    since_plan: int
    n_plans: tuple[int, ...] = ()
    n_seconds: tuple[float, ...] = ()


class Stories:
    """The stories of one scheduler's calls."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool  # which knows what time it is
        self._waits: dict[Sequence, Wait] = {}
        self._step = 0
        self._n_plans = 0
        self._common: int | None = None  # as an index of `_COMMON`
        self._settled_at = 0.0
        self._common_plans = [0] * len(_COMMON)
        self._common_s = [0.0] * len(_COMMON)
        self._cause: tuple[WaitReason, bool] | None = None  # of the plan being made
        self._looked_at: dict[Sequence, WaitReason] = {}  # in the plan being made
        self._own: list[Sequence] = []  # what the plan before looked at
        self._fresh: dict[Sequence, None] = {}  # what has come since

    def enter(self, sequence: Sequence) -> None:
        """It has come into the queue, for the first time or again."""
        self._waits[sequence] = Wait(WaitReason.NEXT_PLAN, self._pool.now, self._n_plans)
        self._fresh[sequence] = None

    # --- A plan -----------------------------------------------------------------------------------------------

    def begin_plan(self, step: int) -> None:
        """A plan is made, which will be this step if it comes to one."""
        self._step = step

    def pass_over(self, sequence: Sequence, reason: WaitReason) -> None:
        """The plan does not admit this one, and goes on to the next."""
        self._looked_at[sequence] = reason

    def stop_at(self, sequence: Sequence, reason: WaitReason) -> None:
        """The plan does not admit this one, nor any behind it."""
        self._looked_at[sequence] = reason
        self._cause = (reason, True)

    def stop(self, reason: WaitReason) -> None:
        """The plan admits nobody that it has not looked at so far."""
        self._cause = (reason, False)

    def close_plan(self) -> None:
        """The plan is made: whoever waits now does so for what has been said."""
        looked_at, cause = self._looked_at, self._cause
        self._settle()
        if looked_at or self._own or self._fresh:
            self._turn_all(looked_at)
        self._common = None if cause is None else _INDEX[cause]
        if self._common is not None:
            self._common_plans[self._common] += 1
        self._cause = None
        self._n_plans += 1

    # --- What happens to one ----------------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> None:
        """It runs from this step on, and holds what it computes in that."""
        self._leave_queue(sequence)
        sequence.call.story.add(
            _new_admitted(
                choice=sequence.choice,
                at_s=self._pool.now - sequence.call.arrived_at,
                step=self._step,
                n_cached_tokens=sequence.n_computed,
                n_blocks=len(sequence.block_table),
            )
        )

    def preempt(
        self,
        sequence: Sequence,
        rule: PreemptionRule,
        *,
        n_freed: int,
        for_priority: int | None = None,
        n_short: int | None = None,
    ) -> None:
        """It makes way, by this rule, and is back in the queue."""
        sequence.call.story.add(
            Preempted(
                choice=sequence.choice,
                at_s=self._pool.now - sequence.call.arrived_at,
                step=self._step,
                rule=rule,
                for_priority=for_priority,
                n_short=n_short,
                n_freed=n_freed,
            )
        )
        self.enter(sequence)

    def end(self, sequence: Sequence) -> Story | None:
        """It has ended; the whole story where it was the last of its call."""
        if sequence in self._waits:
            self._leave_queue(sequence)
        call = sequence.call
        return None if call.sequences else call.story.told(ended_at_s=self._pool.now - call.arrived_at)

    def story_of(self, call: Call) -> Story:
        """The story of a call that is alive, as of the latest moment known."""
        self._settle()
        waiting = [sequence for sequence in call.sequences if sequence.status is Status.WAITING]
        return call.story.told(open_waits=[run for sequence in waiting for run in self._runs(sequence)])

    def check(self) -> None:
        """Asserts that of all who wait, and of nobody else, the newest stretch is kept."""
        for sequence in self._waits:
            assert sequence.status is Status.WAITING, f"sequence {sequence.sequence_id} has left the queue"

    def _turn_all(self, looked_at: dict[Sequence, WaitReason]) -> None:
        for sequence in (*self._own, *self._fresh):
            if sequence not in looked_at:
                self._turn(sequence, None)
        for sequence, reason in looked_at.items():
            self._turn(sequence, reason)
        self._own, self._looked_at, self._fresh = list(looked_at), {}, {}

    def _turn(self, sequence: Sequence, reason: WaitReason | None) -> None:
        """From this plan on it waits for another reason, if it waits at all."""
        wait = self._waits.get(sequence)
        if wait is None or wait.reason is reason:
            return
        for run in self._runs(sequence):
            sequence.call.story.add(run)
        self._waits[sequence] = turned = Wait(reason, self._pool.now, self._n_plans)
        if reason is None:
            turned.n_plans, turned.n_seconds = tuple(self._common_plans), tuple(self._common_s)

    def _leave_queue(self, sequence: Sequence) -> None:
        self._settle()
        for run in self._runs(sequence):
            sequence.call.story.add(run)
        del self._waits[sequence]
        self._fresh.pop(sequence, None)  # or those that end at once would stay where no plan is made

    def _settle(self) -> None:
        if self._common is not None:
            self._common_s[self._common] += self._pool.now - self._settled_at
        self._settled_at = self._pool.now

    def _runs(self, sequence: Sequence) -> Iterator[Waited]:
        """The newest stretch up to now, by reason; `_settle` first."""
        wait, at_s = self._waits[sequence], self._waits[sequence].since - sequence.call.arrived_at
        parts: list[tuple[WaitReason, bool, int, float]]
        if wait.reason is not None:
            parts = [(wait.reason, False, self._n_plans - wait.since_plan, self._pool.now - wait.since)]
        else:
            parts = [
                (*cause, n_plans - n_plans_then, seconds - seconds_then)
                for cause, n_plans, n_plans_then, seconds, seconds_then in zip(
                    _COMMON, self._common_plans, wait.n_plans, self._common_s, wait.n_seconds, strict=True
                )
            ]
        for reason, is_behind, n_plans, seconds in parts:
            if n_plans or seconds:
                yield _new_waited(
                    choice=sequence.choice,
                    at_s=at_s,
                    reason=reason,
                    is_behind=is_behind,
                    n_plans=n_plans,
                    seconds=seconds,
                )
