"""The mutable records behind a request: one `Call`, and one `Sequence` for each choice that is alive.

A sequence's tokens, and what each stretch of them is:

    [0, len(prompt))              prompt
    [len(prompt), len(tokens))    output, replayed `prior_output` included
    [0, n_computed)               in the KV cache, in the blocks of `block_table`
    [n_computed, len(tokens))     still to be computed: one token while decoding, more while in prefill

After the step that computes the last of them, one token is drawn and appended; so the newest token of a live
sequence is never computed yet. Preemption sets `n_computed` to 0 and empties the table; nothing else is lost.

               admit                 end
    WAITING ──────────► RUNNING ──────────► ENDED        WAITING ──► ENDED: aborted, expired, or no room
            ◄──────────
              preempt

A request with n > 1 is one sequence until the end of its prefill, and reserves n slots; the fork makes n of it,
which from then on are scheduled, preempted and ended apart. Both records are private to the core.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from bakehouse_replica.core.hashing import choice_seed
from bakehouse_replica.core.types import Chunk, Failure, FinishReason, Request, Sample, TokenDelta, Usage


class Status(Enum):
    """Where a sequence stands."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """What the choices of one request share. `cached_tokens` is None until the first admission."""

    request: Request
    arrival: int
    deadline: float | None
    n_output_limit: int
    root_hash: bytes
    stop_ids: frozenset[int]
    cached_tokens: int | None = None
    sequences: list["Sequence"] = field(default_factory=list)


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One choice of a call: its tokens, its blocks, and how far both are computed and registered.

    `order` = (priority, arrival, choice): who is served first; it never changes, so a preempted sequence keeps
    its place. `block_hashes` are those of the leading full blocks of `tokens`, as far as anyone asked.
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
    n_computed: int = 0
    n_registered: int = 0  # leading blocks of the table that are findable
    is_registrable: bool = True  # False once a hash collided: what follows would have no registered parent

    @classmethod
    def first(cls, call: Call, sequence_id: int, seed: int) -> "Sequence":
        """The sequence a call begins with."""
        request = call.request
        return cls(
            sequence_id=sequence_id,
            call=call,
            choice=0,
            order=(request.priority, call.arrival, 0),
            seeds=tuple(choice_seed(seed, choice) for choice in range(request.params.n)),
            n_prompt=len(request.prompt_ids),
            tokens=[*request.prompt_ids, *request.prior_output],
            block_hashes=[],
        )

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
            n_computed=self.n_computed,
            n_registered=self.n_registered,
            is_registrable=self.is_registrable,
        )

    @property
    def n_output(self) -> int:
        """Output tokens so far, replayed ones included."""
        return len(self.tokens) - self.n_prompt

    @property
    def n_missing(self) -> int:
        """Tokens still to be computed before the next one can be drawn; at least 1 while alive."""
        return len(self.tokens) - self.n_computed

    @property
    def n_slots(self) -> int:
        """Sequences this one is or will become."""
        return len(self.seeds)

    def finish_reason(self) -> FinishReason | None:
        """Why the tokens so far are complete, None while more are wanted.

        A stop id ends the choice wherever it stands: not drawing one before `min_tokens` is the sampler's
        promise, kept in one place.
        """
        if self.n_output and self.tokens[-1] in self.call.stop_ids:
            return FinishReason.STOP
        if self.n_output >= self.call.n_output_limit:
            return FinishReason.LENGTH
        return None

    def chunk(self, n_tokens: int) -> Chunk:
        """Its next `n_tokens` as work for an executor; sampled where they are all that is missing."""
        start, end = self.n_computed, self.n_computed + n_tokens
        return Chunk(
            sequence_id=self.sequence_id,
            token_ids=tuple(self.tokens[start:end]),
            start=start,
            block_ids=tuple(self.block_table),
            sample=self._sample() if end == len(self.tokens) else None,
        )

    def deltas(
        self,
        token_ids: tuple[int, ...] = (),
        finish: FinishReason | None = None,
        failure: Failure | None = None,
    ) -> list[TokenDelta]:
        """The news that `token_ids` are its newest output, for each choice that it is or would have become."""
        request = self.call.request
        start = self.n_output - len(token_ids)
        usage = None
        # With the first tokens too: whoever ends the choice by a stop string never sees the last delta.
        if finish is not None or start == len(request.prior_output):
            # The prompt's counts are the request's: equal in all of its choices, not to be summed over them.
            usage = Usage(
                prompt_tokens=self.n_prompt,
                cached_tokens=self.call.cached_tokens or 0,
                completion_tokens=self.n_output,
            )
        return [
            TokenDelta(
                request_id=request.request_id,
                choice=choice,
                start=start,
                token_ids=token_ids,
                finish=finish,
                usage=usage,
                failure=failure,
            )
            for choice in range(self.choice, self.choice + self.n_slots)
        ]

    def _sample(self) -> Sample:
        request = self.call.request
        has_penalties = request.params.has_penalties
        return Sample(
            params=request.params,
            seeds=self.seeds,
            output_index=self.n_output,
            prompt_ids=request.prompt_ids if has_penalties else (),
            output_ids=tuple(self.tokens[self.n_prompt :]) if has_penalties else (),
        )
