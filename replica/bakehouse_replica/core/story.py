"""The story of a call at one replica: why it waited, when it was admitted, for whom it made way.

What is told of others is what load numbers tell anyway: how urgent they were, and how much was lacking; never
whose requests they were.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from bakehouse_replica.core.maker import maker_of

# Of a story's entries, the first and the last are kept; those between them live on in its sums. A request that is
# preempted every few steps for an hour has thousands; one that waits and runs has two to six.
FIRST_ENTRIES = 8
LAST_ENTRIES = 24


class WaitReason(StrEnum):
    """Why a sequence was not admitted in a plan, in the order in which a plan decides."""

    NEXT_PLAN = "next_plan"  # it came between two plans; only seconds, as no plan has looked at it
    DRAW_IN_FLIGHT = "draw_in_flight"  # no step could be made before the host knew a draw of one in flight
    PREEMPTION_AHEAD = "preemption_ahead"  # somebody had to make way, which waits until no step is in flight
    PREEMPTING = "preempting"  # the step preempted others for want of blocks, and then admits nobody
    NO_TOKENS = "no_tokens"  # the step's tokens were spent before its turn
    NO_SLOT = "no_slot"  # fewer slots were free than it has choices
    LONG_PREFILLS = "long_prefills"  # as many long prompts as may be were in prefill; others passed it
    NO_BLOCKS = "no_blocks"  # too few blocks were free beside the claims of those that ran
    PREFIX_COMING = "prefix_coming"  # the beginning of its prompt was being computed by another


class PreemptionRule(StrEnum):
    """Why running sequences had to make way; whoever is last in order goes first."""

    OUTRANKED = "outranked"  # a more urgent one waited, and fitted without them
    BLOCKS = "blocks"  # the running ones needed more blocks for this step than there were


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSum:
    """How long a reason held, over all choices of a call.

    `is_behind`: it was that of one before it in the queue, whom nobody passes. `n_plans`: in so many plans.
    """

    reason: WaitReason
    is_behind: bool
    n_plans: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """A stretch of waiting that began at `at_s`; of one behind others, a part for each of their reasons."""

    choice: int
    at_s: float
    reason: WaitReason
    is_behind: bool
    n_plans: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """It runs from this step on: so many tokens found in the cache, so many blocks held at first."""

    choice: int
    at_s: float
    step: int
    n_cached_tokens: int
    n_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """It made way in the plan of this step, and waits again.

    `for_priority`: that of the more urgent one, where it was outranked. `n_short`: blocks that were lacking, where
    it was for those. `n_freed`: blocks that its going gave back.
    """

    choice: int
    at_s: float
    step: int
    rule: PreemptionRule
    for_priority: int | None = None
    n_short: int | None = None
    n_freed: int


Entry = Waited | Admitted | Preempted


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What a replica has decided about one call. Moments are seconds since it was queued there.

    `n_left_out` entries stood behind the first `FIRST_ENTRIES`; `waited` and the counts are of all. `ended_at_s`
    None: it is alive, and the last entries are of waits that go on. `prepared_s`: spent before it was queued, on
    its grammar. `n_chunks`: pieces in which prompts were computed, those after a preemption included. `n_copies`:
    blocks shared with others that were copied before they were written.
    """

    entries: tuple[Entry, ...]
    n_left_out: int
    waited: tuple[WaitSum, ...]
    n_preemptions: int
    n_chunks: int
    n_copies: int
    prepared_s: float
    ended_at_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldStory:
    """A story, with whose it is and who tells it."""

    replica_id: str
    request_id: str
    story: Story


_Sums = dict[tuple[WaitReason, bool], tuple[int, float]]  # plans and seconds, by cause
_new_sum, _new_story = maker_of(WaitSum), maker_of(Story)


@dataclass(slots=True, eq=False)
class StoryLog:
    """The story of one call as it grows."""

    prepared_s: float = 0.0
    n_preemptions: int = 0
    n_chunks: int = 0
    n_copies: int = 0
    _n_entries: int = 0
    _first: tuple[Entry, ...] = ()
    _last: deque[Entry] | None = None
    _sums: _Sums = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """The next entry; whatever it is, the story stays bounded."""
        self._n_entries += 1
        if isinstance(entry, Waited):
            _sum_up(self._sums, entry)
        elif isinstance(entry, Preempted):
            self.n_preemptions += 1
        if len(self._first) < FIRST_ENTRIES:
            self._first += (entry,)
            return
        if self._last is None:
            self._last = deque(maxlen=LAST_ENTRIES)
        self._last.append(entry)

    def told(self, *, open_waits: Iterable[Waited] = (), ended_at_s: float | None = None) -> Story:
        """The story so far; `open_waits`: those that go on."""
        waits, sums = tuple(open_waits), dict(self._sums)
        for wait in waits:
            _sum_up(sums, wait)
        last = tuple(self._last or ())
        return _new_story(
            entries=self._first + last + waits,
            n_left_out=self._n_entries - len(self._first) - len(last),
            waited=tuple(
                [
                    _new_sum(reason=reason, is_behind=is_behind, n_plans=n_plans, seconds=seconds)
                    for (reason, is_behind), (n_plans, seconds) in sums.items()
                ]
            ),
            n_preemptions=self.n_preemptions,
            n_chunks=self.n_chunks,
            n_copies=self.n_copies,
            prepared_s=self.prepared_s,
            ended_at_s=ended_at_s,
        )


def _sum_up(sums: _Sums, wait: Waited) -> None:
    """Adds a wait to the sum of its cause, which then is the last in order."""
    cause = (wait.reason, wait.is_behind)
    n_plans, seconds = sums.pop(cause, (0, 0.0))
    sums[cause] = (n_plans + wait.n_plans, seconds + wait.seconds)
