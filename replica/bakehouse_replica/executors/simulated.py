"""An executor that computes nothing and says how long a step would have taken on the machine that it stands for.

What it draws is a function of a sequence's past, which it knows from its blocks alone, as attention does. A block
holds the tokens written to it and one number that stands for everything before them; the number of the next block
follows from both. So a token costs the same after 10 tokens and after 100,000. What a chunk reads is the block in
which it goes on, or the one before: where that is wrong, lacks tokens or was never written, it fails loudly or
draws other tokens than a cold run. (`fake` reads all of them.)

It draws no end of its own: an answer goes on until its request's `max_tokens`, unless a stop id comes up. Whoever
simulates a trace gives each request the length that it had.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields

from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.maker import maker_of
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

_new_draw, _new_sampled = maker_of(Draw), maker_of(Sampled)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds that a step takes, as a linear function of what is in it; each at least 0.

    step_s + prefill_token_s * (tokens of chunks of several) + decode_sequence_s * (chunks of one token)
         + context_token_s * (tokens of KV cache that the chunks attend to, counted once for each chunk)
         + read_token_s * (the same, but blocks that several chunks have in their tables counted once for all)
         + pair_s * (query-key pairs of chunks of several: of n tokens from position s on, n * s + n * (n + 1) / 2)

    A decode computes as many pairs as it attends to tokens, so that `context_token_s` has its arithmetic, too.
    What an engine does between two steps, as planning the next, is no part of a step: nothing here adds it, and a
    calibration does not measure it. Raises `ValueError` for anything but finite numbers from 0 on.
    """

    step_s: float = 0.0
    prefill_token_s: float = 0.0
    decode_sequence_s: float = 0.0
    context_token_s: float = 0.0
    read_token_s: float = 0.0
    pair_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name} is {value}; it must be a finite number of seconds, 0 or more")

    def seconds(self, plan: StepPlan) -> float:
        """Of the step that carries out `plan`."""
        n_prefill = n_decoding = n_context = n_pairs = 0
        for chunk in plan.chunks:
            n_tokens = len(chunk.token_ids)
            n_context += chunk.start + n_tokens
            if n_tokens == 1:
                n_decoding += 1
            else:
                n_prefill += n_tokens
                n_pairs += n_tokens * chunk.start + n_tokens * (n_tokens + 1) // 2
        seconds = (
            self.step_s
            + self.prefill_token_s * n_prefill
            + self.decode_sequence_s * n_decoding
            + self.context_token_s * n_context
            + self.pair_s * n_pairs
        )
        return seconds + self.read_token_s * _n_read(plan.chunks) if self.read_token_s else seconds


def _n_read(chunks: Iterable[Chunk]) -> float:
    """Tokens of KV cache that are attended to, each block once.

    Tables share blocks from their beginning on (prefix cache, choices of one request), so only those that begin
    alike are compared. Of these, the tokens are as many as the share of their blocks that is left.
    """
    alike: defaultdict[int, list[Chunk]] = defaultdict(list)
    for chunk in chunks:
        alike[chunk.block_ids[0]].append(chunk)
    n_read = 0.0
    for some in alike.values():
        n_tokens = sum([chunk.start + len(chunk.token_ids) for chunk in some])
        if len(some) == 1:
            n_read += n_tokens
        else:
            n_distinct = len(set().union(*(chunk.block_ids for chunk in some)))
            n_read += n_tokens * n_distinct / sum([len(chunk.block_ids) for chunk in some])
    return n_read


@dataclass(slots=True)
class _Block:
    """`index`: its place in the table. `past`: stands for all tokens before `token_ids`, the ones in it."""

    index: int
    past: int
    token_ids: list[int]

    @property
    def state(self) -> int:
        """Stands for all tokens up to the last one here. Hashes of ints do not depend on the process."""
        return hash((self.past, *self.token_ids))


class SimulatedExecutor:
    """Takes its time by `cost`, without waiting: `elapsed_s` says how long each step would have taken.

    It holds back stop ids before `min_tokens`, and keeps to `allowed_token_ids`, `bad_words_ids` and those entries
    of `logit_bias` that are 100 or -100; see `invented`. Any other bias, the penalties, and `temperature` above 0,
    `top_k`, `top_p` and `min_p` change nothing. A grammar it refuses.
    """

    def __init__(self, capacity: Capacity, cost: StepCost, *, vocabulary_size: int = 1000) -> None:
        self._capacity = capacity
        self._cost = cost
        self._vocabulary_size = vocabulary_size
        self._blocks: dict[int, _Block] = {}
        self._steps = HostSteps(self._carry_out, capacity.max_flights)

    @property
    def capacity(self) -> Capacity:
        """What it was told to have."""
        return self._capacity

    @property
    def cost(self) -> StepCost:
        """What it was told that a step costs."""
        return self._cost

    def prepare(self, params: SamplingParams) -> None:
        """Nothing to make ready; refuses a grammar."""
        if params.grammar is not None:
            raise InvalidRequest("grammar is given; the simulated executor cannot keep to one", "grammar")

    def begin(self, plan: StepPlan) -> HostStep:
        """A step copies, writes, scores and draws. Each chunk must find its own past complete."""
        return self._steps.begin(plan)

    def close(self) -> None:
        """Forgets all it stored."""
        self._blocks.clear()

    def _carry_out(self, plan: StepPlan, begun_at: float) -> StepResult:
        blocks = self._blocks
        for copy in plan.copies:
            source = blocks[copy.source]
            blocks[copy.target] = _Block(source.index, source.past, list(source.token_ids))
        states = [self._write(chunk) for chunk in plan.chunks]
        sampled, scored = [], []
        for chunk, state in zip(plan.chunks, states, strict=True):
            if chunk.score is not None:
                scored.append(Scored(sequence_id=chunk.sequence_id, logprobs=self._scores(chunk)))
            sample = chunk.sample
            if sample is not None:
                draws = tuple([self._draw(state, sample, seed) for seed in sample.seeds])
                sampled.append(_new_sampled(sequence_id=chunk.sequence_id, draws=draws))
        return StepResult(
            step=plan.step, sampled=tuple(sampled), scored=tuple(scored), elapsed_s=self._cost.seconds(plan)
        )

    def _write(self, chunk: Chunk) -> int:
        """Writes a chunk's tokens behind its past; returns what stands for all of them."""
        size, token_ids, n_written = self._capacity.block_size, chunk.token_ids, 0
        index, offset = divmod(chunk.start, size)
        block = self._block(chunk, index) if offset else None
        while True:
            if block is None:
                past = self._past(chunk, index)
                block = self._blocks[chunk.block_ids[index]] = _Block(index, past, [])
            assert len(block.token_ids) >= offset, f"{_said(chunk)} misses {offset - len(block.token_ids)} tokens"
            n_room = size - offset
            block.token_ids[offset:] = token_ids[n_written : n_written + n_room]
            n_written += n_room
            if n_written >= len(token_ids):
                return block.state
            block, index, offset = None, index + 1, 0

    def _past(self, chunk: Chunk, index: int) -> int:
        """What stands for all tokens before block `index` of the chunk's table."""
        if index == 0:
            return 0
        before = self._block(chunk, index - 1)
        assert len(before.token_ids) == self._capacity.block_size, (
            f"{_said(chunk)} finds block {index - 1} not full"
        )
        return before.state

    def _block(self, chunk: Chunk, index: int) -> _Block:
        block = self._blocks.get(chunk.block_ids[index])
        assert block is not None, f"{_said(chunk)} finds nothing in block {index}"
        assert block.index == index, f"{_said(chunk)} finds block {block.index} of some sequence as its {index}"
        return block

    def _draw(self, state: int, sample: Sample, seed: int) -> Draw:
        params, size, output_index = sample.params, self._vocabulary_size, sample.output_index
        wanted = (hash((state, seed)) if params.temperature > 0 else state) % size
        is_free = (
            params.logprobs is None
            and not params.logit_bias
            and not params.bad_words_ids
            and params.allowed_token_ids is None
            and output_index >= params.min_tokens
        )
        if is_free:
            return _new_draw(token_ids=(wanted,))
        token_id = nearest_token(wanted, params, list(sample.output_ids), output_index, size)
        if token_id is None:
            return Draw(token_ids=(), failure="no token may follow: all are banned or held back")
        logprobs: tuple[TokenLogprob, ...] = ()
        if params.logprobs is not None:
            logprobs = (invented_logprob(token_id, state % size, params.logprobs, size),)
        return Draw(token_ids=(token_id,), logprobs=logprobs)

    def _scores(self, chunk: Chunk) -> tuple[TokenLogprob, ...]:
        score, block_size = chunk.score, self._capacity.block_size
        assert score is not None, "only chunks that ask for scores get any"
        logprobs = []
        for row, target_id in enumerate(score.target_ids, start=chunk.start + score.first_row):
            index, offset = divmod(row, block_size)
            block = self._block(chunk, index)
            best = _Block(index, block.past, block.token_ids[: offset + 1]).state % self._vocabulary_size
            logprobs.append(invented_logprob(target_id, best, score.n_top, self._vocabulary_size))
        return tuple(logprobs)


def _said(chunk: Chunk) -> str:
    return f"sequence {chunk.sequence_id}, which goes on at {chunk.start} in blocks {chunk.block_ids},"
