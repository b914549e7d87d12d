"""One call in flight: its requests' deliveries, turned into text pieces of its choices as they come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from bakehouse_replica.core.errors import BakehouseError, DeadlineExceeded, EngineDead, InvalidRequest, Unavailable
from bakehouse_replica.core.types import (
    Delivery,
    Failure,
    FailureKind,
    FinishReason,
    ReplicaStatus,
    Request,
    TokenDelta,
)

from bakehouse_router.text.stream import OutputToken, TextStream

# After the last terminal delta a stream ends by itself at once; closing it before that would count as a cancel.
_END_GRACE_S = 0.05


class RequestDispatcher(Protocol):
    """What a gateway needs of `bakehouse_router.dispatch.Dispatcher`."""

    def stream(self, request: Request) -> AsyncGenerator[Delivery, None]:
        """The request's deliveries, each token once; closing the generator cancels the request."""
        ...

    async def statuses(self) -> tuple[ReplicaStatus, ...]:
        """Every known replica."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """New text of one choice; the last piece carries `finish`, and possibly no text.

    `tokens`: those whose text has been released in full by now and was not before, where the call asked for token
    ids or logprobs; then `text` is the text of exactly these. An echoed prompt is the first piece of each choice.
    """

    choice: int
    text: str
    tokens: tuple[OutputToken, ...] = ()
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallUsage:
    """Token counts over all prompts and choices of a call; each prompt counts once, whatever `n` is."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """A request's stream is over; `error` where it broke."""

    error: Exception | None = None


def _error_of(failure: Failure) -> BakehouseError:
    match failure.kind:
        case FailureKind.DEADLINE:
            return DeadlineExceeded(failure.message)
        case FailureKind.NO_ROOM | FailureKind.GRAMMAR:
            return InvalidRequest(failure.message)
        case FailureKind.ENGINE:
            return EngineDead(failure.message)


class Generation:
    """Runs the requests of one call; choice k of request r is choice `r * n + k` of the call.

    The requests share one `n`. `replica_id` is known from the first delivery on.
    """

    def __init__(
        self,
        dispatcher: RequestDispatcher,
        requests: Sequence[Request],
        streams: Sequence[TextStream],
        pause_s: float,
    ) -> None:
        assert len(streams) == len(requests) * requests[0].params.n, "one stream per choice"
        self.replica_id: str | None = None
        self._dispatcher = dispatcher
        self._requests = requests
        self._streams = streams
        self._pause_s = pause_s
        self._n_choices = requests[0].params.n
        self._cached_tokens = [0] * len(requests)
        self._open = set(range(len(streams)))
        self._queue: asyncio.Queue[tuple[int, Delivery | _Ended]] = asyncio.Queue()

    @property
    def usage(self) -> CallUsage:
        """The counts so far; final once `pieces` has ended."""
        return CallUsage(
            prompt_tokens=sum(len(request.prompt_ids) for request in self._requests),
            cached_tokens=sum(self._cached_tokens),
            completion_tokens=sum(stream.n_tokens for stream in self._streams),
        )

    async def pieces(self) -> AsyncGenerator[tuple[TextPiece, ...], None]:
        """The text as it comes, until each choice has had its `finish`; an empty tuple after each idle pause.

        Closing the generator cancels the requests. Raises a `BakehouseError` where a request fails; the others
        are cancelled then. Iterate it once.
        """
        pumps = [asyncio.create_task(self._pump(index)) for index in range(len(self._requests))]
        try:
            while self._open:
                arrived = await self._next()
                if arrived is None:
                    yield ()
                    continue
                index, item = arrived
                if isinstance(item, _Ended):
                    self._check_ended(index, item)
                    continue
                pieces = self._take(index, item)
                if not self._open_of(index):  # stop strings may have ended it before the replica knows
                    pumps[index].cancel()
                if pieces:
                    yield pieces
            await asyncio.wait(pumps, timeout=_END_GRACE_S)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, index: int) -> None:
        ended = _Ended()
        try:
            async with aclosing(self._dispatcher.stream(self._requests[index])) as deliveries:
                async for delivery in deliveries:
                    self._queue.put_nowait((index, delivery))
        except Exception as error:  # raised again by `pieces`, whose caller it concerns
            ended = _Ended(error=error)
        self._queue.put_nowait((index, ended))

    async def _next(self) -> tuple[int, Delivery | _Ended] | None:
        """What arrived first, or None after a pause without any."""
        if not self._queue.empty():
            return self._queue.get_nowait()
        try:
            async with asyncio.timeout(self._pause_s):
                return await self._queue.get()
        except TimeoutError:
            return None

    def _open_of(self, index: int) -> set[int]:
        return self._open & set(range(index * self._n_choices, (index + 1) * self._n_choices))

    def _check_ended(self, index: int, ended: _Ended) -> None:
        if not self._open_of(index):
            return  # whatever ended it, its choices had all they needed
        if ended.error is not None:
            raise ended.error
        raise EngineDead(f"the stream of {self._requests[index].request_id} ended before its choices did")

    def _take(self, index: int, delivery: Delivery) -> tuple[TextPiece, ...]:
        if self.replica_id is None:
            self.replica_id = delivery.replica_id
        pieces = []
        for delta in delivery.deltas:
            if delta.usage is not None:
                self._cached_tokens[index] = max(self._cached_tokens[index], delta.usage.cached_tokens)
            choice = index * self._n_choices + delta.choice
            if choice in self._open:
                pieces.append(self._take_delta(choice, delta))
        return tuple(piece for piece in pieces if piece.text or piece.finish is not None)

    def _take_delta(self, choice: int, delta: TokenDelta) -> TextPiece:
        stream = self._streams[choice]
        text = stream.feed(delta.token_ids)
        finish = FinishReason.STOP if stream.is_stopped else delta.finish
        if finish is not None:
            self._open.discard(choice)
            if delta.failure is not None and not stream.is_stopped:
                raise _error_of(delta.failure)
            if finish is FinishReason.CANCELLED:
                raise Unavailable("the replica cancelled this request; it is probably going down")
            text += stream.finish()
            finish = FinishReason.STOP if stream.is_stopped else finish
        return TextPiece(choice=choice, text=text, finish=finish)
