"""An executor that says what a script says: its logits come from a file, all else is what a model's would be.

It knows of a sequence's past only what it reads from its KV cache through the block table (see `token_cache`), and
keeps no state but that cache. Which reply a sequence follows is decided by its prompt and its choice, how far it
has come by the number of its output tokens; so preemption, forks and resumed requests replay correctly. Tokens are
drawn by the production sampler, under the same penalties, masks and grammars.

Logits at an output index: those of the reply's own token and of the preferred ones after it stand `PEAK` above all
others, each `HAIR` below the one before. Greedy draws therefore follow the order; at temperature 1 the tokens are
nearly equally likely, and where a mask takes the first away, the next one is drawn. Where the reply gives
log-probabilities, those are the logits, and the mass they leave is spread evenly. Rows inside a prompt, of which
no reply speaks, are a fixed function of the token that they stand at.

Shape legend: R rows of logits, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from threading import Event
from time import perf_counter

import torch
from bakehouse_kernels.reference import ReferenceOps
from torch import Tensor

from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import (
    Capacity,
    Chunk,
    Draw,
    Sample,
    Sampled,
    Score,
    Scored,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from bakehouse_replica.executors.host_steps import HostStep, HostSteps
from bakehouse_replica.executors.token_cache import TokenCache
from bakehouse_replica.model.constraint import ConstraintSource, constraint_of, prepare_constraint
from bakehouse_replica.model.logprobs import token_logprobs
from bakehouse_replica.model.sampler import draw
from bakehouse_replica.script import LogprobRow, Reply, Script

PEAK = 30.0  # exp(-30) is 1e-13: of a thousand other tokens none is ever drawn at temperature 1
HAIR = 2.0**-10
# Where listed probabilities leave nothing, the others are still possible where a mask leaves nothing else.
_LEAST_LOGIT = -60.0
_N_PROMPTS_REMEMBERED = 64


@dataclass(slots=True, kw_only=True)
class _Choice:
    """One choice of a step while its tokens are drawn."""

    sequence_id: int
    reply: Reply
    sample: Sample  # of the next token
    position: int  # of the next token
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: Draw | None = None

    def take(self, drawn: Draw) -> None:
        """Append one token, and ask for the one after it unless it ends the choice."""
        self.token_ids += drawn.token_ids
        self.logprobs += drawn.logprobs
        params = self.sample.params
        has_stopped = bool(set(params.stop_token_ids).intersection(drawn.token_ids))
        if drawn.failure is not None or drawn.is_complete or has_stopped:
            self.end = drawn
        self.position += len(drawn.token_ids)
        self.sample = replace(
            self.sample,
            output_index=self.sample.output_index + len(drawn.token_ids),
            output_ids=(*self.sample.output_ids, *drawn.token_ids) if params.needs_output else (),
        )

    def drawn(self) -> Draw:
        """All its tokens of this step."""
        return Draw(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            is_complete=self.end is not None and self.end.is_complete,
            failure=None if self.end is None else self.end.failure,
        )


class ScriptedExecutor:
    """Follows `script`, without grammars unless it is given `constraints`.

    `before_step` is called first thing in each step, in the thread that takes its result. Where steps overlap, the
    script must draw one token a step.
    """

    def __init__(
        self,
        script: Script,
        capacity: Capacity,
        *,
        constraints: ConstraintSource | None = None,
        before_step: Callable[[StepPlan], None] | None = None,
    ) -> None:
        assert script.tokens_per_step == 1 or capacity.max_flights == 1, "a step that overlaps draws one token"
        self._script = script
        self._capacity = capacity
        self._constraints = constraints
        self._ops = ReferenceOps()
        self._before_step = before_step
        self._cache = TokenCache(capacity)
        self._ends_at = 0.0
        self._token_bytes = script.token_bytes()
        self._token_ids_V = torch.arange(script.vocabulary_size)
        self._replies_to = lru_cache(_N_PROMPTS_REMEMBERED)(self._choose_replies)
        self._closed = Event()
        self._steps = HostSteps(self._carry_out, capacity.max_flights)

    @property
    def capacity(self) -> Capacity:
        """What it was told to have."""
        return self._capacity

    def prepare(self, params: SamplingParams) -> None:
        """Compiles the grammar."""
        prepare_constraint(self._constraints, params)

    def begin(self, plan: StepPlan) -> HostStep:
        """A step stores, reads back, scores and draws. Each chunk must read its own past, in order and complete.

        Its result raises, or waits until `close` is called, where the script says so.
        """
        return self._steps.begin(plan)

    def close(self) -> None:
        """Forgets all it stored; a step that stalls ends."""
        self._closed.set()
        self._cache.clear()

    @torch.inference_mode()
    def _carry_out(self, plan: StepPlan, begun_at: float) -> StepResult:
        turn_at = perf_counter()
        if self._before_step is not None:
            self._before_step(plan)
        self._cache.store(plan)
        choices = [choice for chunk in plan.chunks for choice in self._begin(chunk)]
        for _ in range(self._script.tokens_per_step):
            self._draw_once([choice for choice in choices if choice.end is None])
        sampled = _sampled(plan.chunks, choices)
        scored = tuple(self._score(chunk, chunk.score) for chunk in plan.chunks if chunk.score is not None)
        if self._script.step_s:
            self._ends_at = max(self._ends_at, begun_at) + self._script.step_s
            self._closed.wait(max(self._ends_at - perf_counter(), 0.0))
        elapsed_s = perf_counter() - turn_at
        return StepResult(step=plan.step, sampled=sampled, scored=scored, elapsed_s=elapsed_s)

    def _begin(self, chunk: Chunk) -> list[_Choice]:
        """The choices that draw after a chunk, which is read back in any case."""
        history = self._cache.read(chunk)
        sample = chunk.sample
        if sample is None:
            return []
        if sample.params.has_penalties:
            assert history.tolist() == [*sample.prompt_ids, *sample.output_ids], "penalties count other tokens"
        replies = self._replies_to(history[: len(history) - sample.output_index].tobytes())
        return [
            _Choice(
                sequence_id=chunk.sequence_id,
                reply=replies[choice % len(replies)],
                sample=replace(sample, seeds=(seed,), choice=choice),
                position=len(history),
            )
            for choice, seed in enumerate(sample.seeds, start=sample.choice)
        ]

    def _choose_replies(self, packed_prompt: bytes) -> tuple[Reply, ...]:
        prompt_ids = memoryview(packed_prompt).cast("q")
        spelled = b"".join(map(self._token_bytes.__getitem__, prompt_ids))
        return self._script.replies_to(spelled.decode(errors="replace"))

    def _draw_once(self, choices: Sequence[_Choice]) -> None:
        if not choices:
            return
        for choice in choices:
            self._break_where_told(choice.sample.output_index)
        logits_RV = torch.stack([self._logits(choice.reply, choice.sample.output_index) for choice in choices])
        drawn = draw(
            self._ops,
            logits_RV,
            [choice.sample for choice in choices],
            [choice.position for choice in choices],
            [constraint_of(self._constraints, choice.sequence_id, choice.sample) for choice in choices],
        )
        for choice, (one,) in zip(choices, drawn, strict=True):
            choice.take(one)

    def _score(self, chunk: Chunk, score: Score) -> Scored:
        """Log-probabilities of prompt tokens, each by the token that stands before it."""
        rows = chunk.token_ids[score.first_row : score.first_row + len(score.target_ids)]
        logits_RV = torch.stack([self._prompt_logits(token_id) for token_id in rows])
        logprobs = token_logprobs(self._ops, logits_RV, score.target_ids, score.n_top)
        return Scored(sequence_id=chunk.sequence_id, logprobs=tuple(logprobs))

    def _prompt_logits(self, token_id: int) -> Tensor:
        """Steps of 0.01 between 0 and 10, in an order that looks random."""
        return (self._token_ids_V * 7919 + (token_id + 1) * 104_729).remainder(997) / 100

    def _break_where_told(self, output_index: int) -> None:
        if output_index == self._script.raise_at:
            raise RuntimeError(f"the script raises at output token {output_index}")
        if output_index == self._script.stall_at:
            self._closed.wait()
            raise RuntimeError(f"closed while the script stalled at output token {output_index}")

    def _logits(self, reply: Reply, output_index: int) -> Tensor:
        row = reply.logprobs[output_index] if output_index < len(reply.logprobs) else ()
        if row:
            return self._given_logits(row)
        wanted = (self._script.wanted_id(reply, output_index), *self._script.preferred_ids(output_index))
        logits_V = torch.zeros(self._script.vocabulary_size)
        for rank, token_id in enumerate(dict.fromkeys(wanted)):
            logits_V[token_id] = PEAK - rank * HAIR
        return logits_V

    def _given_logits(self, row: LogprobRow) -> Tensor:
        n_others = self._script.vocabulary_size - len(row)
        rest = 1.0 - sum(math.exp(logprob) for _, logprob in row)
        others = max(_LEAST_LOGIT, math.log(rest / n_others)) if rest > 0.0 and n_others else _LEAST_LOGIT
        logits_V = torch.full((self._script.vocabulary_size,), others)
        for token_id, logprob in row:
            logits_V[token_id] = logprob
        return logits_V


def _sampled(chunks: Sequence[Chunk], choices: Sequence[_Choice]) -> tuple[Sampled, ...]:
    draws = iter(choices)
    return tuple(
        Sampled(sequence_id=chunk.sequence_id, draws=tuple(next(draws).drawn() for _ in chunk.sample.seeds))
        for chunk in chunks
        if chunk.sample is not None
    )
