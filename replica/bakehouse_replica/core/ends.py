"""How sequences end other than by a draw: cancelled, expired, without room, or complete when they came.

Their terminal deltas wait here until the driver takes them. Whoever has ended is remembered for a while.
"""

from collections import OrderedDict

from bakehouse_replica.core.blocks import BlockPool
from bakehouse_replica.core.recent import RecentIds
from bakehouse_replica.core.roster import Roster
from bakehouse_replica.core.sequence import NO_NEWS, Sequence
from bakehouse_replica.core.stories import Stories
from bakehouse_replica.core.story import Story
from bakehouse_replica.core.tally import Tally
from bakehouse_replica.core.types import Draw, Failure, FailureKind, FinishReason, TokenDelta

# Whoever cancels has left before the last delta, and may ask for the story a little later; 1 kB each, as a rule.
REMEMBERED_STORIES = 256
REMEMBERED_IDS = 4096  # an abort meets its request, or its end, within milliseconds: far fewer are on their way


class Ends:
    """The ends of one scheduler's sequences."""

    def __init__(self, *, roster: Roster, pool: BlockPool, tally: Tally, stories: Stories) -> None:
        self._tally = tally
        self._roster = roster
        self._pool = pool
        self._ended = RecentIds(REMEMBERED_IDS)  # else a late abort would cancel the next request of that id
        self._outbox: list[TokenDelta] = []
        self._stories = stories
        self._cancelled: OrderedDict[str, Story] = OrderedDict()

    def has_ended(self, request_id: str) -> bool:
        """Whether the last request of that id has ended, and not long ago."""
        return request_id in self._ended

    def begin_anew(self, request_id: str) -> None:
        """A request of that id has come; what ended under it before counts no more."""
        self._ended.forget(request_id)
        self._cancelled.pop(request_id, None)

    def end(self, sequence: Sequence, reason: FinishReason, failure: Failure | None = None) -> None:
        """Ends a sequence with terminal deltas, which wait to be taken."""
        self._outbox += self.ended(sequence, reason, failure)

    def ended(
        self, sequence: Sequence, reason: FinishReason, failure: Failure | None = None, news: Draw = NO_NEWS
    ) -> list[TokenDelta]:
        """Forgets a sequence that ends with these news; returns its terminal deltas.

        The last one of its request tells story and cost, and the request is remembered.
        """
        cost, story = self._roster.end(sequence), self._stories.end(sequence)
        if story is not None:
            self._ended.remember(sequence.call.request.request_id)
            self._tally.end(sequence, reason)
            if reason is FinishReason.CANCELLED:
                self._keep(sequence.call.request.request_id, story)
        return sequence.last_deltas(news, reason, failure, cost=cost, story=story)

    def story_of_cancelled(self, request_id: str) -> Story | None:
        """The story of a request that was cancelled not long ago."""
        return self._cancelled.get(request_id)

    def end_without_room(self, sequence: Sequence) -> None:
        """Ends a sequence that cannot grow although it runs alone, or never could."""
        n_blocks = self._pool.n_blocks_for(len(sequence.tokens))
        message = (
            f"{len(sequence.tokens)} tokens of prompt and output need {n_blocks} KV blocks of "
            f"{self._pool.block_size}; this replica has {self._pool.n_blocks}"
        )
        self.end(sequence, FinishReason.ERROR, Failure(kind=FailureKind.NO_ROOM, message=message))

    def expire(self, now: float) -> None:
        """Ends all sequences of the requests whose deadlines have passed."""
        calls = self._roster.calls.values()
        for call in [call for call in calls if call.deadline is not None and call.deadline <= now]:
            message = f"the request's time limit of {call.request.timeout_s} s has passed"
            for sequence in list(call.sequences):
                self.end(sequence, FinishReason.ERROR, Failure(kind=FailureKind.DEADLINE, message=message))

    def take_deltas(self) -> list[TokenDelta]:
        """The terminal deltas that have arisen since the last call, oldest first."""
        deltas, self._outbox = self._outbox, []
        return deltas

    def _keep(self, request_id: str, story: Story) -> None:
        self._cancelled[request_id] = story
        if len(self._cancelled) > REMEMBERED_STORIES:
            self._cancelled.popitem(last=False)
