"""How sequences end other than by a draw: cancelled, expired, without room, or complete when they came.

Their terminal deltas wait here until the driver takes them. Whoever has ended is remembered for a while.
"""

from dataclasses import replace

from bakehouse_replica.core.blocks import BlockPool
from bakehouse_replica.core.recent import RecentIds
from bakehouse_replica.core.roster import Roster
from bakehouse_replica.core.sequence import Sequence
from bakehouse_replica.core.tally import Tally
from bakehouse_replica.core.types import Failure, FailureKind, FinishReason, TokenDelta

REMEMBERED_IDS = 4096  # an abort meets its request, or its end, within milliseconds: far fewer are on their way


class Ends:
    """The ends of one scheduler's sequences."""

    def __init__(self, *, roster: Roster, pool: BlockPool, tally: Tally) -> None:
        self._tally = tally
        self._roster = roster
        self._pool = pool
        self._ended = RecentIds(REMEMBERED_IDS)  # else a late abort would cancel the next request of that id
        self._outbox: list[TokenDelta] = []

    def has_ended(self, request_id: str) -> bool:
        """Whether the last request of that id has ended, and not long ago."""
        return request_id in self._ended

    def begin_anew(self, request_id: str) -> None:
        """A request of that id has come; what ended under it before counts no more."""
        self._ended.forget(request_id)

    def end(self, sequence: Sequence, reason: FinishReason, failure: Failure | None = None) -> None:
        """Ends a sequence with terminal deltas, which wait to be taken."""
        deltas = sequence.ends(reason, failure)
        self._outbox += [*deltas[:-1], self.close(sequence, reason, deltas[-1])]

    def close(self, sequence: Sequence, reason: FinishReason, last: TokenDelta) -> TokenDelta:
        """Ends a sequence by its `last` delta, which it returns; remembers its request with the last one.

        With that, the delta tells what the request has cost.
        """
        cost = self._roster.end(sequence)
        request_id = sequence.call.request.request_id
        if request_id not in self._roster.calls:
            self._ended.remember(request_id)
            self._tally.end(sequence, reason)
        return last if cost is None else replace(last, cost=cost)

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
