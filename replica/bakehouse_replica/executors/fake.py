"""An executor without a model: its KV cache stores token ids, and the next id is a function of what it reads back.

Everything it knows of a sequence's past comes through the block table, as it would in attention (`token_cache`).
A wrong table therefore fails loudly, or yields other text and other log-probabilities than a cold run does. It
needs no weights and no compute, so that scheduler, engine and gateway can be tested, and loaded, as they are
shipped.

After a history h, a hash of h names the most likely token, from which `invented` goes on, in output and prompt
alike. Greedy draws yield that token, others one that seed and h choose.
"""

import hashlib
from array import array
from collections.abc import Callable
from time import perf_counter, sleep

from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.sampling import SamplingParams
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
from bakehouse_replica.executors.invented import invented_logprob, nearest_token
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
            best = self._number(digest)
            logprobs.append(invented_logprob(target_id, best, score.n_top, self._vocabulary_size))
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
            token_id = nearest_token(wanted, params, output_ids, output_index, self._vocabulary_size)
            if token_id is None:
                failure = "no token may follow: all are banned or held back"
                return Draw(token_ids=tuple(token_ids), logprobs=tuple(logprobs), failure=failure)
            token_ids.append(token_id)
            output_ids.append(token_id)
            if params.logprobs is not None:
                logprobs.append(invented_logprob(token_id, best, params.logprobs, self._vocabulary_size))
            digest.update(array("q", [token_id]).tobytes())
        return Draw(token_ids=tuple(token_ids), logprobs=tuple(logprobs))

    def _number(self, digest: "hashlib.blake2b") -> int:
        return int.from_bytes(digest.digest(), "little") % self._vocabulary_size


def _digest_of(history: "array[int]") -> "hashlib.blake2b":
    return hashlib.blake2b(history.tobytes(), digest_size=8)


def _check_history(history: "array[int]", sample: Sample) -> None:
    """Asserts that the ids which penalties and bad words look at are those that were computed."""
    told = (*sample.prompt_ids, *sample.output_ids)
    found = tuple(history[len(history) - len(told) :]) if told else ()
    if sample.params.has_penalties:
        found = tuple(history)
    assert not sample.params.needs_output or found == told, f"the sampler is told {told}; the cache holds {found}"
