"""An executor without a model: its KV cache stores token ids, and the next id is a function of what it reads back.

Everything it knows of a sequence's past comes through the block table, as it would in attention (`token_cache`).
A wrong table therefore fails loudly, or yields other text and other log-probabilities than a cold run does. It
needs no weights and no compute, so that scheduler, engine and gateway can be tested, and loaded, as they are
shipped.

After a history h, a hash b of h names the most likely token; b + 1 is half as likely, b + 2 a quarter, and so on
around the vocabulary. That is what log-probabilities say of any token, in output and prompt alike. Greedy draws
yield b, others a token that seed and h choose.
"""

import hashlib
import math
from array import array
from collections.abc import Callable, Iterable
from itertools import chain
from time import perf_counter, sleep

from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.sampling import MAX_BIAS, SamplingParams
from bakehouse_replica.core.types import (
    Capacity,
    Chunk,
    Draw,
    Sample,
    Sampled,
    Scored,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from bakehouse_replica.executors.host_steps import HostStep, HostSteps
from bakehouse_replica.executors.token_cache import TokenCache


class FakeExecutor:
    """Draws ids from `range(vocabulary_size)`, so that any stop id comes up every so often.

    It holds back stop ids before `min_tokens`, and keeps to `allowed_token_ids`, `bad_words_ids` and those entries
    of `logit_bias` that are 100 (one of these tokens comes) or -100 (none of these). Where the token that history
    and seed name may not come, the next one in the order of ids does. It has no probabilities to shift or to cut:
    any other bias, the penalties, whose ids are only checked, and `temperature` above 0, `top_k`, `top_p` and
    `min_p` change nothing. A grammar it refuses.

    `tokens_per_step`: how many tokens it draws at once, one where steps overlap; the ids do not depend on it.
    `step_s` paces it: while there is work, steps end in a beat of so long, whatever the caller does in between, so
    that n streams are offered n / `step_s` tokens a second; a step begun less than a beat late is made up for. A
    step takes its time from its begin on, or from the end of the one before. `before_step` is called first thing
    in each step, in the thread that takes its result; what it raises is what that raises.
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        vocabulary_size: int = 1000,
        tokens_per_step: int = 1,
        step_s: float = 0.0,
        before_step: Callable[[StepPlan], None] | None = None,
    ) -> None:
        assert tokens_per_step == 1 or capacity.max_flights == 1, "a step that overlaps draws one token a choice"
        self._capacity = capacity
        self._vocabulary_size = vocabulary_size
        self._tokens_per_step = tokens_per_step
        self._step_s = step_s
        self._ends_at = 0.0
        self._before_step = before_step
        self._cache = TokenCache(capacity)
        self._steps = HostSteps(self._carry_out, capacity.max_flights)

    @property
    def capacity(self) -> Capacity:
        """What it was told to have."""
        return self._capacity

    def prepare(self, params: SamplingParams) -> None:
        """Nothing to make ready; refuses a grammar."""
        if params.grammar is not None:
            raise InvalidRequest("grammar is given; the fake executor cannot keep to one", "grammar")

    def begin(self, plan: StepPlan) -> HostStep:
        """A step stores, reads back, scores and draws. Each chunk must read its own past, in order, complete."""
        return self._steps.begin(plan)

    def close(self) -> None:
        """Forgets all it stored."""
        self._cache.clear()

    def _carry_out(self, plan: StepPlan, begun_at: float) -> StepResult:
        turn_at = perf_counter()
        if self._before_step is not None:
            self._before_step(plan)
        self._cache.store(plan)
        sampled, scored = [], []
        for chunk in plan.chunks:
            history = self._cache.read(chunk)
            if chunk.score is not None:
                scored.append(Scored(sequence_id=chunk.sequence_id, logprobs=self._scores(history, chunk)))
            if chunk.sample is not None:
                _check_history(history, chunk.sample)
                draws = tuple(self._draw(history, chunk.sample, seed) for seed in chunk.sample.seeds)
                sampled.append(Sampled(sequence_id=chunk.sequence_id, draws=draws))
        self._wait_for_end(begun_at)
        elapsed_s = perf_counter() - turn_at
        return StepResult(step=plan.step, sampled=tuple(sampled), scored=tuple(scored), elapsed_s=elapsed_s)

    def _wait_for_end(self, begun_at: float) -> None:
        """A step that begins less than a beat after the last one's end keeps to the beat; others begin one."""
        keeps_beat = begun_at - self._ends_at < self._step_s
        self._ends_at = (self._ends_at if keeps_beat else begun_at) + self._step_s
        sleep(max(self._ends_at - perf_counter(), 0.0))

    def _scores(self, history: "array[int]", chunk: Chunk) -> tuple[TokenLogprob, ...]:
        score = chunk.score
        assert score is not None, "only chunks that ask for scores get any"
        n_known = chunk.start + score.first_row + 1
        digest = _digest_of(history[:n_known])
        logprobs = []
        for target_id in score.target_ids:
            logprobs.append(self._logprob(target_id, self._number(digest), score.n_top))
            digest.update(array("q", [target_id]).tobytes())
        return tuple(logprobs)

    def _draw(self, history: "array[int]", sample: Sample, seed: int) -> Draw:
        params, output_ids = sample.params, list(sample.output_ids)
        digest = _digest_of(history)
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        for output_index in range(sample.output_index, sample.output_index + self._tokens_per_step):
            best = wanted = self._number(digest)
            if params.temperature > 0:
                seeded = digest.copy()
                seeded.update(b"seed" + seed.to_bytes(8, "little", signed=True))  # no history has such a length
                wanted = self._number(seeded)
            token_id = self._nearest(wanted, params, output_ids, output_index)
            if token_id is None:
                failure = "no token may follow: all are banned or held back"
                return Draw(token_ids=tuple(token_ids), logprobs=tuple(logprobs), failure=failure)
            token_ids.append(token_id)
            output_ids.append(token_id)
            if params.logprobs is not None:
                logprobs.append(self._logprob(token_id, best, params.logprobs))
            digest.update(array("q", [token_id]).tobytes())
        return Draw(token_ids=tuple(token_ids), logprobs=tuple(logprobs))

    def _nearest(
        self, wanted: int, params: SamplingParams, output_ids: list[int], output_index: int
    ) -> int | None:
        """The first token from `wanted` on, around the vocabulary, that may come; None where none may."""
        banned = {word[-1] for word in params.bad_words_ids if _would_complete(word, output_ids)}
        if output_index < params.min_tokens:
            banned.update(params.stop_token_ids)
        allowed: Iterable[int] = chain(range(wanted, self._vocabulary_size), range(wanted))
        if params.allowed_token_ids is not None:
            choice = {*params.allowed_token_ids, *params.stop_token_ids}
            allowed = (token_id for token_id in allowed if token_id in choice)
        possible = (token_id for token_id in allowed if token_id not in banned)
        if not params.logit_bias:
            return next(possible, None)
        bias, candidates = dict(params.logit_bias), list(possible)
        forced = (token_id for token_id in candidates if bias.get(token_id, 0.0) >= MAX_BIAS)
        unharmed = (token_id for token_id in candidates if bias.get(token_id, 0.0) > -MAX_BIAS)
        return next(chain(forced, unharmed, candidates), None)

    def _logprob(self, token_id: int, best: int, n_top: int) -> TokenLogprob:
        size = self._vocabulary_size
        place = (token_id - best) % size
        top = tuple(((best + other) % size, _logprob_at(other)) for other in range(min(n_top, size)))
        return TokenLogprob(logprob=_logprob_at(place), rank=place + 1, top=top)

    def _number(self, digest: "hashlib.blake2b") -> int:
        return int.from_bytes(digest.digest(), "little") % self._vocabulary_size


def _digest_of(history: "array[int]") -> "hashlib.blake2b":
    return hashlib.blake2b(history.tobytes(), digest_size=8)


def _logprob_at(place: int) -> float:
    return -math.log(2.0) * (place + 1)


def _would_complete(word: tuple[int, ...], output_ids: list[int]) -> bool:
    return len(word) == 1 or tuple(output_ids[1 - len(word) :]) == word[:-1]


def _check_history(history: "array[int]", sample: Sample) -> None:
    """Asserts that the ids which penalties and bad words look at are those that were computed."""
    told = (*sample.prompt_ids, *sample.output_ids)
    found = tuple(history[len(history) - len(told) :]) if told else ()
    if sample.params.has_penalties:
        found = tuple(history)
    assert not sample.params.needs_output or found == told, f"the sampler is told {told}; the cache holds {found}"
