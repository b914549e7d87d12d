"""The open requests of one engine: to whom their deltas go, and how far each choice has come.

Owned by the engine's thread; an event loop is reached through `mailbox.post` only.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.types import Failure, FinishReason, Request, TokenDelta
from bakehouse_replica.mailbox import Letter, Mailbox, post


@dataclass(frozen=True, slots=True)
class _Stream:
    mailbox: Mailbox
    next_index: dict[int, int]  # of each choice that is open: the output index of its next token


class StreamTable:
    """Each open request's mailbox. A request leaves when its choices have all ended, or when its consumer has."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Of all open requests."""
        return tuple(self._streams)

    def open(self, request: Request, mailbox: Mailbox) -> None:
        """Begin to deliver the request's deltas. Raises `InvalidRequest` where its id is in use."""
        if request.request_id in self._streams:
            raise InvalidRequest(f"request_id {request.request_id!r} is already being served", "request_id")
        next_index = dict.fromkeys(range(request.params.n), len(request.prior_output))
        self._streams[request.request_id] = _Stream(mailbox, next_index)

    def leave(self, request_id: str, mailbox: Mailbox) -> bool:
        """Deliver nothing more to this mailbox; whether it was the open one under this id."""
        stream = self._streams.get(request_id)
        if stream is None or stream.mailbox is not mailbox:
            return False
        del self._streams[request_id]
        return True

    def deliver(self, deltas: Iterable[TokenDelta]) -> list[str]:
        """Post the deltas, one wake-up per event loop; returns the requests whose loop has closed, now left."""
        letters: list[tuple[Mailbox, Letter]] = []
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue  # its consumer has left
            letters.append((stream.mailbox, delta))
            stream.next_index[delta.choice] += len(delta.token_ids)
            if delta.finish is not None:
                del stream.next_index[delta.choice]
                if not stream.next_index:
                    del self._streams[delta.request_id]
        return self._leave_unreachable(post(letters))

    def fail_all(self, failure: Failure) -> None:
        """End each open choice of each request with `FinishReason.ERROR`."""
        self.deliver(
            [
                TokenDelta(
                    request_id=request_id,
                    choice=choice,
                    start=start,
                    token_ids=(),
                    finish=FinishReason.ERROR,
                    failure=failure,
                )
                for request_id, stream in self._streams.items()
                for choice, start in stream.next_index.items()
            ]
        )

    def _leave_unreachable(self, mailboxes: Iterable[Mailbox]) -> list[str]:
        unreachable = set(mailboxes)
        lost = [request_id for request_id, stream in self._streams.items() if stream.mailbox in unreachable]
        for request_id in lost:
            del self._streams[request_id]
        return lost
