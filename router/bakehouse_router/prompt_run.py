"""What has come of one prompt so far: the replica's deltas in, the text pieces of its choices out; pure."""

from dataclasses import dataclass, replace

from bakehouse_replica.core.errors import BakehouseError, DeadlineExceeded, EngineDead, InvalidRequest, Unavailable
from bakehouse_replica.core.maker import maker_of
from bakehouse_replica.core.types import (
    Delivery,
    Failure,
    FailureKind,
    FinishReason,
    Request,
    TokenDelta,
    TokenLogprob,
)

from bakehouse_router.text.stream import OutputToken, TextStream


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


_make_piece = maker_of(TextPiece)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReport:
    """What is known of a prompt; `logprobs`: of each token but the first, where they were asked for, else none."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """The prompt as each of its choices begins with it.

    `offsets`: where each token begins in `text`; empty where no tokens are reported. `n_top`: alternatives to show
    at each token, None where no log-probabilities are.
    """

    text: str
    offsets: tuple[int, ...] = ()
    n_top: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptJob:
    """One prompt of a call: its request, the text stream of each choice, and what stands before these.

    `n_prompt_top`: alternatives to report at each prompt token, None where its log-probabilities are not reported.
    """

    request: Request
    streams: tuple[TextStream, ...]
    echo: Echo | None = None
    n_prompt_top: int | None = None


def _error_of(failure: Failure) -> BakehouseError:
    match failure.kind:
        case FailureKind.DEADLINE:
            return DeadlineExceeded(failure.message)
        case FailureKind.NO_ROOM | FailureKind.DRAW:  # what the client asked for cannot be done
            return InvalidRequest(failure.message)
        case FailureKind.ENGINE:
            return EngineDead(failure.message)


def _with_top(logprob: TokenLogprob, n_top: int) -> TokenLogprob:
    return logprob if len(logprob.top) <= n_top else replace(logprob, top=logprob.top[:n_top])


class PromptRun:
    """The choices of one prompt, numbered from `first_choice` on among those of the call."""

    def __init__(self, job: PromptJob, first_choice: int) -> None:
        assert len(job.streams) == job.request.params.n, "one stream for each choice"
        self.request = job.request
        self.cached_tokens = 0
        self.has_begun = False
        self.finishes: list[FinishReason] = []  # of the choices that have ended well
        self._job = job
        self._first_choice = first_choice
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._echoed: tuple[OutputToken, ...] = ()  # the same for each choice
        self._open = set(range(job.request.params.n))
        self._unheard = set(self._open)
        self._running = set(self._open)

    @property
    def is_over(self) -> bool:
        """Whether each choice has had its `finish`."""
        return not self._open

    @property
    def is_running(self) -> bool:
        """Whether the replica still works on a choice, as far as it has told."""
        return bool(self._running)

    @property
    def completion_tokens(self) -> int:
        """Tokens taken so far, over all choices."""
        return sum(stream.n_tokens for stream in self._job.streams)

    @property
    def report(self) -> PromptReport:
        """The prompt; its log-probabilities are known once the first piece is."""
        n_top = self._job.n_prompt_top
        logprobs = () if n_top is None else tuple(_with_top(logprob, n_top) for logprob in self._prompt_logprobs)
        return PromptReport(token_ids=self.request.prompt_ids, logprobs=logprobs)

    def take(self, delivery: Delivery) -> tuple[TextPiece, ...]:
        """The pieces that a delivery makes. Raises a `BakehouseError` where a choice has failed."""
        self.has_begun = True
        pieces: list[TextPiece] = []
        for delta in delivery.deltas:
            self._note(delta)
            if delta.choice not in self._open:
                continue
            piece = self._take_delta(delta)
            if delta.choice in self._unheard:
                self._unheard.discard(delta.choice)
                pieces += self._echo_pieces(delta.choice)
            pieces.append(piece)
        return tuple(piece for piece in pieces if piece.text or piece.tokens or piece.finish is not None)

    def _note(self, delta: TokenDelta) -> None:
        if delta.usage is not None:
            self.cached_tokens = max(self.cached_tokens, delta.usage.cached_tokens)
        if delta.prompt_logprobs:
            self._prompt_logprobs = delta.prompt_logprobs
        if delta.finish is not None:
            self._running.discard(delta.choice)

    def _take_delta(self, delta: TokenDelta) -> TextPiece:
        stream = self._job.streams[delta.choice]
        text = stream.feed(delta.token_ids, delta.logprobs)
        finish = FinishReason.STOP if stream.is_stopped else delta.finish
        if finish is not None:
            self._open.discard(delta.choice)
            if delta.failure is not None and not stream.is_stopped:
                raise _error_of(delta.failure)
            if finish is FinishReason.CANCELLED:
                raise Unavailable("the replica cancelled this request; it is probably going down")
            text += stream.finish()
            finish = FinishReason.STOP if stream.is_stopped else finish
            self.finishes.append(finish)
        return self._piece(delta.choice, text, finish)

    def _piece(self, choice: int, text: str, finish: FinishReason | None) -> TextPiece:
        tokens = self._job.streams[choice].take_tokens()
        return _make_piece(choice=self._first_choice + choice, text=text, tokens=tokens, finish=finish)

    def _echo_pieces(self, choice: int) -> list[TextPiece]:
        echo = self._job.echo
        if echo is None:
            return []
        if echo.offsets and not self._echoed:
            self._echoed = self._echo_tokens(echo)
        return [TextPiece(choice=self._first_choice + choice, text=echo.text, tokens=self._echoed)]

    def _echo_tokens(self, echo: Echo) -> tuple[OutputToken, ...]:
        prompt_ids = self.request.prompt_ids
        logprobs: list[TokenLogprob | None] = [None] * len(prompt_ids)
        if echo.n_top is not None:
            assert len(self._prompt_logprobs) == len(prompt_ids) - 1, "they come with the first delta of choice 0"
            logprobs[1:] = [_with_top(logprob, echo.n_top) for logprob in self._prompt_logprobs]
        return tuple(
            OutputToken(token_id=token_id, text_offset=offset, logprob=logprob)
            for token_id, offset, logprob in zip(prompt_ids, echo.offsets, logprobs, strict=True)
        )
