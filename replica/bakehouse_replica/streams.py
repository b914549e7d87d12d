"""The open requests of one engine: to whom their deltas go, and how far each choice has come.

Owned by the engine's thread; an event loop is reached through `mailbox.post` only.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.types import Failure, FinishReason, Request, TokenDelta
from bakehouse_replica.mailbox import Letter, Recipient, post


@dataclass(frozen=True, slots=True)
class _Stream:
    recipient: Recipient
    loop: asyncio.AbstractEventLoop
    next_index: dict[int, int]  # of each choice that is open: the output index of its next token


class StreamTable:
    """Who gets each open request. It leaves when its choices have all ended, or when its consumer has left."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Of all open requests."""
        return tuple(self._streams)

    def open(self, request: Request, recipient: Recipient) -> None:
        """Begin to deliver the request's deltas. Raises `InvalidRequest` where its id is in use."""
        if request.request_id in self._streams:
            raise InvalidRequest(f"request_id {request.request_id!r} is already being served", "request_id")
        next_index = dict.fromkeys(range(request.params.n), len(request.prior_output))
        self._streams[request.request_id] = _Stream(recipient, recipient.loop, next_index)

    def goes_to(self, request_id: str, recipient: Recipient) -> bool:
        """Whether the open request of this id is that recipient's."""
        stream = self._streams.get(request_id)
        return stream is not None and stream.recipient is recipient

    def leave(self, request_id: str, recipient: Recipient) -> None:
        """Deliver nothing more to this recipient, if it is the one under this id."""
        if self.goes_to(request_id, recipient):
            del self._streams[request_id]

    def deliver(self, deltas: Iterable[TokenDelta]) -> list[str]:
        """Post the deltas, one wake-up per event loop; returns the requests whose loop has closed, now left."""
        letters: dict[asyncio.AbstractEventLoop, list[tuple[Recipient, Letter]]] = {}
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue  # its consumer has left
            group = letters.get(stream.loop)
            if group is None:
                group = letters[stream.loop] = []
            group.append((stream.recipient, delta))
            if delta.finish is None:
                stream.next_index[delta.choice] += len(delta.token_ids)
            else:
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

    def _leave_unreachable(self, recipients: list[Recipient]) -> list[str]:
        if not recipients:
            return []
        lost = [request_id for request_id, stream in self._streams.items() if stream.recipient in recipients]
        for request_id in lost:
            del self._streams[request_id]
        return lost
