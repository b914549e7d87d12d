"""The mutable record of one choice that is alive: a `Sequence`; what it shares with others is their `Call`.

A sequence's tokens, and what each stretch of them is:

    [0, len(prompt))              prompt
    [len(prompt), len(tokens))    output, replayed `prior_output` included
    [0, n_applied)                in the KV cache, in the blocks of `block_table`
    [n_applied, n_computed)       written there by the steps in flight
    [n_computed, len(tokens))     still to be planned: the newest draw while decoding, more while in prefill

A step counts as computed from the moment it is planned (`book`). Where it draws for a single choice, a placeholder
then stands at the end of `tokens`; the last `n_awaited` tokens are such. When the step is applied, the draw takes
its place, and more tokens follow it where the draw has several (`accept`). So the newest token of a live sequence
is never computed yet, except while the step that forks it is in flight. Nothing that leaves the core counts a
placeholder: neither deltas, nor usage, nor the hash of a block. Preemption sets `n_computed` to 0 and empties the
table; nothing else is lost. It meets no sequence of a step in flight, so what waits has no placeholders.

Where the log-probabilities of the prompt are asked for, token t gets its own from the step that computes position
t - 1. They are asked for in order, so `n_asked` says where to go on: neither a recomputed position nor a cached
block before it is asked twice. A sequence that has no output to wait for ends with the last of them; output that
it came with (`n_needless`) is never computed, and takes no room.

               admit                 end
    WAITING ──────────► RUNNING ──────────► ENDED        WAITING ──► ENDED: aborted, expired, or no room
            ◄──────────
              preempt

A request with n > 1 is one sequence until the end of its prefill, and reserves n slots; the fork makes n of it,
which from then on are scheduled, preempted and ended apart. Both records are private to the core.
"""

from dataclasses import dataclass, field, replace
from enum import Enum, auto

from bakehouse_replica.core.call import Call
from bakehouse_replica.core.hashing import choice_seed
from bakehouse_replica.core.maker import maker_of
from bakehouse_replica.core.story import Story
from bakehouse_replica.core.types import (
    Chunk,
    Cost,
    Draw,
    Failure,
    FinishReason,
    Sample,
    Score,
    TokenDelta,
    Usage,
)

NO_NEWS = Draw(token_ids=())
_PLACEHOLDER = 0  # as chunks carry it; `n_awaited` says which tokens are such
_new_chunk, _new_sample = maker_of(Chunk), maker_of(Sample)
_new_delta, _new_usage = maker_of(TokenDelta), maker_of(Usage)


class Status(Enum):
    """Where a sequence stands."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One choice of a call: its tokens, its blocks, and how far both are computed and registered.

    `order` = (priority, arrival, choice): who is served first; it never changes, so a preempted sequence keeps
    its place. `block_hashes` are those of the leading full blocks of `tokens`, as far as anyone asked.

    What a decode step asks of each sequence is kept, and changed only where it changes, once in a block's length:
    `block_ids` is the table as chunks carry it, and the tokens from `n_computed` to `n_writable` have room in
    blocks that no other table holds and nobody can find, so that they are written without asking the pool.
    """

    sequence_id: int
    call: Call
    choice: int
    order: tuple[int, int, int]
    seeds: tuple[int, ...]  # one for each choice it is or will become
    n_prompt: int
    tokens: list[int]
    block_hashes: list[bytes]
    status: Status = Status.WAITING
    block_table: list[int] = field(default_factory=list)
    block_ids: tuple[int, ...] = ()
    n_applied: int = 0
    n_computed: int = 0
    n_awaited: int = 0  # draws of steps in flight, for which placeholders stand at the end of `tokens`
    n_writable: int = 0
    n_drawn: int = 1  # tokens of the newest draw
    n_begun: int = 0  # where its present run began to compute
    n_reached: int = 0  # how far its earlier runs got
    n_needless: int = 0  # tokens of an output that came complete: only the scores of the prompt are waited for
    n_registered: int = 0  # leading blocks of the table that are findable
    is_registrable: bool = True  # False once a hash collided: what follows would have no registered parent

    @classmethod
    def first(cls, call: Call, sequence_id: int, seed: int) -> "Sequence":
        """The sequence a call begins with."""
        request = call.request
        sequence = cls(
            sequence_id=sequence_id,
            call=call,
            choice=0,
            order=(request.priority, call.arrival, 0),
            seeds=tuple(choice_seed(seed, choice) for choice in range(request.params.n)),
            n_prompt=len(request.prompt_ids),
            tokens=[*request.prompt_ids, *request.prior_output],
            block_hashes=[],
        )
        if sequence.finish_reason() is not None:
            sequence.n_needless = len(request.prior_output)
        return sequence

    def forked(self, choice: int, sequence_id: int) -> "Sequence":
        """Choice `choice` of the same call, with this one's tokens and blocks. The caller shares the blocks."""
        priority, arrival, _ = self.order
        return Sequence(
            sequence_id=sequence_id,
            call=self.call,
            choice=choice,
            order=(priority, arrival, choice),
            seeds=(self.seeds[choice],),
            n_prompt=self.n_prompt,
            tokens=list(self.tokens),
            block_hashes=list(self.block_hashes),
            status=self.status,
            block_table=list(self.block_table),
            block_ids=self.block_ids,
            n_applied=self.n_applied,
            n_computed=self.n_computed,
            n_writable=self.n_computed,
            n_begun=self.n_computed,
            n_reached=self.n_computed,
            n_registered=self.n_registered,
            is_registrable=self.is_registrable,
        )

    @property
    def n_output(self) -> int:
        """Output tokens so far, replayed ones included, awaited ones not."""
        return len(self.tokens) - self.n_awaited - self.n_prompt

    @property
    def n_needed(self) -> int:
        """Tokens that must be in the KV cache before the next one can be drawn, or the prompt is scored."""
        return len(self.tokens) - self.n_needless

    @property
    def n_missing(self) -> int:
        """Those of them that are still to be planned."""
        return len(self.tokens) - self.n_needless - self.n_computed

    @property
    def is_decoding(self) -> bool:
        """Whether nothing but its newest draw is missing."""
        return len(self.tokens) - self.n_computed <= self.n_drawn

    @property
    def n_slots(self) -> int:
        """Sequences this one is or will become."""
        return len(self.seeds)

    @property
    def may_run_ahead(self) -> bool:
        """Whether its next draw may be planned while one is in flight: nothing is needed of that but its token.

        Penalties, grammars and bad words need its token on the host, and a fork makes sequences of its draws.
        """
        return not self.call.shows_output and len(self.seeds) == 1

    @property
    def wants_steps(self) -> bool:
        """Whether steps beyond those in flight are needed, unless a draw in flight turns out to end the choice."""
        if self.call.has_scores_to_ask:
            return True
        if self.n_awaited:
            return len(self.tokens) - self.n_prompt < self.call.n_output_limit
        return self.finish_reason() is None

    def finish_reason(self) -> FinishReason | None:
        """Why the tokens so far are complete, None while more are wanted.

        A stop id ends the choice wherever it stands: not drawing one before `min_tokens` is the sampler's
        promise, kept in one place.
        """
        return self._end_at(len(self.tokens) - self.n_awaited)

    def accept(self, draw: Draw) -> tuple[Draw, FinishReason | None]:
        """Puts the oldest draw in flight in its place, up to the token that ends the choice.

        Returns what was kept of it, and why the choice ends. Where it does, further placeholders stay as they are.
        """
        reason: FinishReason | None = None
        token_ids = draw.token_ids
        for n_kept, token_id in enumerate(token_ids, start=1):
            n_awaited = self.n_awaited
            if n_awaited and n_kept == 1:
                self.tokens[-n_awaited] = token_id
                self.n_awaited = n_awaited = n_awaited - 1
            else:
                assert not n_awaited, f"{draw} has several tokens, but a step follows the first"
                self.tokens.append(token_id)
            reason = self._end_at(len(self.tokens) - n_awaited)
            if reason is not None and n_kept < len(token_ids):
                kept = replace(draw, token_ids=token_ids[:n_kept], logprobs=draw.logprobs[:n_kept])
                return kept, reason
        self.n_drawn = len(token_ids)
        if draw.is_complete:
            return draw, FinishReason.STOP
        if reason is None and draw.failure is not None:
            return draw, FinishReason.ERROR
        return draw, reason

    def book(self, n_tokens: int) -> Chunk:
        """Its next `n_tokens` as work, which count as computed from here on; sampled where no more are missing."""
        call, tokens, start, n_awaited = self.call, self.tokens, self.n_computed, self.n_awaited
        end, has_scores = start + n_tokens, call.n_asked < call.n_to_score
        is_last = end == len(tokens) and not (has_scores and self.finish_reason() is not None)
        chunk = _new_chunk(
            sequence_id=self.sequence_id,
            token_ids=(tokens[start],) if n_tokens == 1 else tuple(tokens[start:end]),
            start=start,
            block_ids=self.block_ids,
            sample=self._sample() if is_last else None,
            score=self._ask_scores(start, end) if has_scores else None,
            follows_draw=n_awaited > 0,
        )
        self.n_computed = end
        if is_last and len(self.seeds) == 1:
            tokens.append(_PLACEHOLDER)
            self.n_awaited = n_awaited + 1
        return chunk

    def bill_computed(self) -> None:
        """It runs no longer: puts what was computed since it did onto its call's bill."""
        bill, n_computed, n_begun = self.call.bill, self.n_computed, self.n_begun
        n_new = max(n_begun, self.n_reached)
        n_given = self.n_prompt + len(self.call.request.prior_output)
        bill.computed_tokens += max(0, min(n_computed, self.n_prompt) - n_new)
        bill.recomputed_tokens += max(0, min(n_computed, self.n_reached) - n_begun)
        bill.recomputed_tokens += max(0, min(n_computed, n_given) - max(n_new, self.n_prompt))
        self.n_reached = max(n_computed, self.n_reached)

    def delta(self, news: Draw) -> TokenDelta:
        """The news of this choice, which goes on; they are what was appended last."""
        request, token_ids = self.call.request, news.token_ids
        start = len(self.tokens) - self.n_awaited - self.n_prompt - len(token_ids)
        if start == len(request.prior_output):
            # Usage with the first tokens too: whoever ends the choice by a stop string never sees the last delta.
            return self._told(news, start, self.choice)
        return _new_delta(
            request_id=request.request_id,
            choice=self.choice,
            start=start,
            token_ids=token_ids,
            logprobs=news.logprobs,
        )

    def last_deltas(
        self,
        news: Draw,
        finish: FinishReason,
        failure: Failure | None,
        *,
        cost: Cost | None,
        story: Story | None,
    ) -> list[TokenDelta]:
        """Terminal deltas with these news, for each choice that it is or would have become.

        `cost` and `story`: of the whole call, told with the last of them.
        """
        start, last = self.n_output - len(news.token_ids), self.choice + len(self.seeds) - 1
        deltas = [self._told(news, start, choice, finish, failure) for choice in range(self.choice, last)]
        return [*deltas, self._told(news, start, last, finish, failure, cost, story)]

    def _told(
        self,
        news: Draw,
        start: int,
        choice: int,
        finish: FinishReason | None = None,
        failure: Failure | None = None,
        cost: Cost | None = None,
        story: Story | None = None,
    ) -> TokenDelta:
        """The first or last delta of a choice, which tell more than tokens."""
        call = self.call
        is_first = start == len(call.request.prior_output)
        return _new_delta(
            request_id=call.request.request_id,
            choice=choice,
            start=start,
            token_ids=news.token_ids,
            logprobs=news.logprobs,
            prompt_logprobs=call.take_scores() if is_first and choice == 0 else (),
            finish=finish,
            # The prompt's counts are the request's: equal in all of its choices, not to be summed over them.
            usage=_new_usage(
                prompt_tokens=self.n_prompt,
                cached_tokens=call.cached_tokens or 0,
                completion_tokens=start + len(news.token_ids),
                queue_s=call.queue_s,
            ),
            failure=failure,
            cost=cost,
            story=story,
        )

    def _end_at(self, n_known: int) -> FinishReason | None:
        """Why the first `n_known` tokens are complete."""
        call, n_output = self.call, n_known - self.n_prompt
        if n_output and self.tokens[n_known - 1] in call.stop_ids:
            return FinishReason.STOP
        if n_output >= call.n_output_limit:
            return FinishReason.LENGTH
        return None

    def _sample(self) -> Sample:
        call = self.call
        return _new_sample(
            params=call.request.params,
            seeds=self.seeds,
            output_index=len(self.tokens) - self.n_prompt,
            choice=call.request.first_choice + self.choice,
            prompt_ids=call.request.prompt_ids if call.shows_prompt else (),
            output_ids=tuple(self.tokens[self.n_prompt :]) if call.shows_output else (),
        )

    def _ask_scores(self, start: int, end: int) -> Score | None:
        """What the positions `start` to `end` can add to the scores that are owed; counts them as asked for."""
        n_asked, n_top = self.call.n_asked, self.call.request.params.prompt_logprobs
        assert n_top is not None, "nothing is owed where nothing was asked for"
        assert start <= n_asked, f"positions {n_asked} to {start} were skipped, which the prompt's scores need"
        target_ids = tuple(self.tokens[n_asked + 1 : min(end + 1, self.n_prompt)])
        self.call.n_asked += len(target_ids)
        return Score(first_row=n_asked - start, target_ids=target_ids, n_top=n_top) if target_ids else None
