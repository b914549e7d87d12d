"""One call in flight: the deliveries of all its requests, turned into text pieces as they come."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from bakehouse_replica.core.errors import DeadlineExceeded, EngineDead
from bakehouse_replica.core.metric_table import CANCELLED, COMPLETE
from bakehouse_replica.core.story import ToldStory
from bakehouse_replica.core.types import Cost, Delivery, FinishReason, ReplicaStatus, Request

from bakehouse_router.api.errors import error_code
from bakehouse_router.attempts import Attempts, total_cost
from bakehouse_router.inbox import Inbox
from bakehouse_router.prompt_run import PromptJob, PromptReport, PromptRun, TextPiece

# After the last terminal delta a stream ends by itself at once; closing it before that would count as a cancel.
_END_GRACE_S = 0.05


class RequestDispatcher(Protocol):
    """What a gateway needs of `bakehouse_router.dispatch.Dispatcher`."""

    def stream(self, request: Request, attempts: Attempts | None = None) -> AsyncGenerator[Delivery, None]:
        """The request's deliveries, each token once; closing the generator cancels the request.

        `attempts`, if given, hears what it takes.
        """
        ...

    async def statuses(self) -> tuple[ReplicaStatus, ...]:
        """Every known replica."""
        ...

    async def explain(self, request_ids: Sequence[str]) -> tuple[ToldStory, ...]:
        """The stories of these requests that replicas know."""
        ...


class QueuePlace(Protocol):
    """A call's place among those that wait for their first tokens."""

    def leave(self) -> None:
        """Give it up; idempotent."""
        ...


class Admission(Protocol):
    """What a gateway needs of `bakehouse_router.admission.WaitingQueue`."""

    def enter(self, n_requests: int, n_tokens: int) -> QueuePlace:
        """A place for so many requests with so many prompt tokens together. Raises `Overloaded`."""
        ...

    def limit(self, *, max_requests: int, max_tokens: int) -> None:
        """Other limits for who comes from now on."""
        ...


class CallWatch(Protocol):
    """What a gateway needs of `bakehouse_router.metrics.CallWatch`."""

    def see_tokens(self, prompt: int, n_tokens: int, n_choices: int) -> None:
        """So many tokens of a prompt, for so many of its choices together, have come in one message."""
        ...

    def end(self, outcome: str, usage: "CallUsage", cost: Cost | None) -> None:
        """The call is over; once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CallUsage:
    """Token counts over all prompts and choices of a call; each prompt counts once, whatever `n` is."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """The moment `at`, by the event loop's clock, when a call's `timeout_s` are over."""

    timeout_s: float
    at: float

    def left_s(self, now: float) -> float:
        """What is left of it. Raises `DeadlineExceeded` where that is nothing."""
        if now >= self.at:
            raise self.exceeded()
        return self.at - now

    def exceeded(self) -> DeadlineExceeded:
        """What the client is told."""
        return DeadlineExceeded(f"the {self.timeout_s:g} s that the request allowed have passed")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """A request's stream is over; `error` where it broke."""

    error: Exception | None = None


# Of the request with this index.
_News = tuple[int, Delivery | _Ended]


class Generation:
    """Runs the prompts of one call; choice k of prompt r is choice `r * n + k` of the call.

    The prompts share one `n`. `pause_s`: after so long without news an empty tuple comes. `replica_id` is known
    from the first delivery on, `first_token_at` (`time.monotonic`'s) from the first output token, `queued_at` from
    its place in the gateway's queue on, `outcome` and `error` at the end. `enter` is called in each task that
    sends a request. `keeps_text`: for the `texts` of the choices.
    """

    def __init__(
        self,
        dispatcher: RequestDispatcher,
        jobs: Sequence[PromptJob],
        *,
        pause_s: float,
        deadline: Deadline | None = None,
        admission: Admission | None = None,
        watch: CallWatch | None = None,
        enter: Callable[[], object] | None = None,
        keeps_text: bool = False,
    ) -> None:
        self.replica_id: str | None = None
        self.queued_at: float | None = None
        self.first_token_at: float | None = None
        self.outcome: str | None = None
        self.error: Exception | None = None
        self.attempts = tuple(Attempts(enter) for _ in jobs)
        self._dispatcher = dispatcher
        self._n_choices = jobs[0].request.params.n
        self._runs = [PromptRun(job, index * self._n_choices) for index, job in enumerate(jobs)]
        self._texts: list[list[str]] | None = (
            [[] for _ in range(self._n_choices * len(jobs))] if keeps_text else None
        )
        self._pause_s = pause_s
        self._deadline = deadline
        self._admission = admission
        self._watch = watch
        self._pumps: list[asyncio.Task[None]] = []

    @property
    def usage(self) -> CallUsage:
        """The counts so far; a prompt's are final from its first piece on, all of them once `pieces` has ended."""
        return CallUsage(
            prompt_tokens=self._n_prompt_tokens,
            cached_tokens=sum(run.cached_tokens for run in self._runs),
            completion_tokens=sum(run.completion_tokens for run in self._runs),
        )

    @property
    def cost(self) -> Cost | None:
        """What replicas have told so far that the call has cost them; None where none has.

        They tell with a request's last delta: of one that was cancelled, or an attempt that was lost, none has.
        """
        return total_cost(attempt.cost for attempts in self.attempts for attempt in attempts.made)

    @property
    def completion_tokens(self) -> tuple[int, ...]:
        """Output tokens so far, by prompt."""
        return tuple(run.completion_tokens for run in self._runs)

    @property
    def finishes(self) -> tuple[FinishReason, ...]:
        """Why choices have ended so far, in the order of their prompts."""
        return tuple(finish for run in self._runs for finish in run.finishes)

    @property
    def texts(self) -> tuple[str, ...]:
        """The text of each choice so far, where it is kept."""
        return tuple("".join(parts) for parts in self._texts or ())

    @property
    def route(self) -> str | None:
        """How the first prompt that an answer has come for was routed, in one line, where that is known."""
        answered = [attempt for each in self.attempts for attempt in each.made if attempt.replica_ids]
        routings = [routing for attempt in answered for routing in attempt.routings.values()]
        return str(routings[0]) if routings else None

    def prompt_of(self, choice: int) -> PromptReport:
        """The prompt of one of the call's choices, as far as its pieces have told."""
        return self._runs[choice // self._n_choices].report

    async def pieces(self) -> AsyncGenerator[tuple[TextPiece, ...], None]:
        """The text as it comes, until each choice has had its `finish`; an empty tuple after each idle pause.

        Closing the generator cancels the requests. Raises a `BakehouseError` where a request fails or the deadline
        passes; the others are cancelled then. Iterate it once.
        """
        place: QueuePlace | None = None
        outcome = CANCELLED
        inbox: Inbox[_News] = Inbox(self._pause_s)
        try:
            if self._admission is not None:
                place = self._admission.enter(len(self._runs), self._n_prompt_tokens)
            self.queued_at = time.monotonic()
            self._pumps = [asyncio.create_task(self._pump(index, inbox)) for index in range(len(self._runs))]
            while not all(run.is_over for run in self._runs):
                news = await self._next(inbox)
                if not news:
                    yield ()
                for index, item in news:  # one by one: `usage` is that of what has been told by then
                    pieces = self._take(index, item)
                    if place is not None and all(run.has_begun for run in self._runs):
                        place.leave()
                        place = None
                    if pieces:
                        yield pieces
            outcome = COMPLETE
            await asyncio.wait(self._pumps, timeout=_END_GRACE_S)
        except Exception as error:
            outcome, self.error = error_code(error), error
            raise
        finally:
            inbox.close()
            self.outcome = outcome
            if place is not None:
                place.leave()
            if self._watch is not None:
                self._watch.end(outcome, self.usage, self.cost)
            for pump in self._pumps:
                pump.cancel()
            await asyncio.gather(*self._pumps, return_exceptions=True)

    @property
    def _n_prompt_tokens(self) -> int:
        return sum(len(run.request.prompt_ids) for run in self._runs)

    async def _pump(self, index: int, inbox: Inbox[_News]) -> None:
        ended = _Ended()
        try:
            async with aclosing(
                self._dispatcher.stream(self._runs[index].request, self.attempts[index])
            ) as deliveries:
                async for delivery in deliveries:
                    inbox.put((index, delivery))
        except Exception as error:  # raised again by `pieces`, whose caller it concerns
            ended = _Ended(error=error)
        inbox.put((index, ended))

    async def _next(self, inbox: Inbox[_News]) -> list[_News]:
        """What has arrived, nothing after a pause. Raises `DeadlineExceeded`."""
        if self._deadline is None:
            return await inbox.take()
        news = await inbox.take(until=self._deadline.at)
        if not news:
            self._deadline.left_s(asyncio.get_running_loop().time())
        return news

    def _take(self, index: int, item: Delivery | _Ended) -> tuple[TextPiece, ...]:
        run = self._runs[index]
        if isinstance(item, Delivery):
            self.replica_id = self.replica_id or item.replica_id
            n_before = run.completion_tokens
            pieces = run.take(item)
            n_tokens = run.completion_tokens - n_before
            if self._watch is not None and n_tokens:
                n_choices = len({delta.choice for delta in item.deltas if delta.token_ids})
                self._watch.see_tokens(index, n_tokens, n_choices)
            if self.first_token_at is None and n_tokens:
                self.first_token_at = time.monotonic()
            if self._texts is not None:
                for piece in pieces:
                    self._texts[piece.choice].append(piece.text)
            self._cancel_if_over(index)
            return pieces
        if not run.is_over:  # otherwise, whatever ended it, its choices had all they needed
            raise item.error or EngineDead(f"the stream of {run.request.request_id} ended before its choices did")
        return ()

    def _cancel_if_over(self, index: int) -> None:
        """Stop strings and whole calls, which the replica does not know, may have ended what it goes on with."""
        if self._runs[index].is_over and self._runs[index].is_running:
            self._pumps[index].cancel()
