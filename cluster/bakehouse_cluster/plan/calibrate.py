"""Measures what steps cost on this machine, and fits the cost model that plans are made with.

    steps of many sizes ─► executor of the model ─► seconds ─► two thirds: fit ─► StepCost
                                                          └──► one third: how far off it is

The steps are plans written by hand, so that batch, prompt and context vary independently: decodes alone, prompts
alone, and both together; prompts at the beginning of a context and at its end; decodes that share most of their
contexts and decodes that share nothing. Nobody reads what they draw. Every size is run in each of several rounds,
and its median counts, so that a machine's slow seconds do not fall on one size alone.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import combinations, count, product
from random import Random
from statistics import median
from time import perf_counter
from typing import Literal

import numpy as np
from bakehouse_replica.core.executor import Executor
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import BlockCopy, Capacity, Chunk, Sample, StepPlan
from bakehouse_replica.executors.simulated import StepCost
from numpy.typing import NDArray

from bakehouse_cluster.plan.cost_file import Fit

Kind = Literal["decodes", "prompts", "both"]

N_ROUNDS = 3
HELD_OUT_SHARE = 1 / 3
# What sizes are made of, up to what the machine and the model allow, and with that itself.
CONTEXTS = (16, 256, 1024, 4096, 16_384, 65_536)
ROWS = (1, 4, 16, 64, 256)
PROMPTS = (16, 64, 256, 512, 2048, 8192)
PROMPTS_AT_ONCE = (2, 8)
SHARED_SHARE = 3 / 4  # of the contexts of decodes that share one
COPIES_A_STEP = 256
GREEDY = SamplingParams(temperature=0.0, seed=0)
KINDS: tuple[Kind, ...] = ("decodes", "prompts", "both")
_UNITS = tuple(StepCost(**{field.name: 1.0}) for field in fields(StepCost))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """What a step holds: `n_decodes` sequences of `n_context` tokens, which share the first `n_shared` as far as
    these fill blocks, and `n_prompts` chunks of `n_prompt` tokens behind `n_before` that have been computed.
    """

    n_decodes: int = 0
    n_context: int = 1
    n_shared: int = 0
    n_prompts: int = 0
    n_prompt: int = 0
    n_before: int = 0

    @property
    def kind(self) -> Kind:
        """Of what it holds."""
        if not self.n_prompts:
            return "decodes"
        return "both" if self.n_decodes else "prompts"

    @property
    def n_tokens(self) -> int:
        """Tokens that the step computes."""
        return self.n_decodes + self.n_prompts * self.n_prompt

    def n_blocks(self, block_size: int) -> int:
        """Blocks that its tables take, shared ones counted once."""
        n_shared = self.n_shared // block_size
        of_decodes = n_shared + self.n_decodes * (-(-self.n_context // block_size) - n_shared)
        return of_decodes + self.n_prompts * -(-(self.n_before + self.n_prompt) // block_size)

    def plan(self, step: int = 0, *, block_size: int = 16, vocabulary_size: int = 1) -> StepPlan:
        """Such a step, from block 0 on. What it costs by a model does not depend on `step` and `vocabulary_size`,
        and on `block_size` only as far as fewer tokens fill blocks to be shared.
        """
        shared = tuple(range(self.n_shared // block_size))
        lengths = [(self.n_context - 1, 1, shared)] * self.n_decodes
        lengths += [(self.n_before, self.n_prompt, ())] * self.n_prompts
        chunks, n_used = [], len(shared)
        for sequence_id, (start, n_tokens, begin) in enumerate(lengths):
            n_own = -(-(start + n_tokens) // block_size) - len(begin)
            token_ids = tuple(token_id % vocabulary_size for token_id in range(n_tokens))
            block_ids = (*begin, *range(n_used, n_used + n_own))
            chunks.append(_chunk(sequence_id, token_ids, start, block_ids))
            n_used += n_own
        return StepPlan(step=step, copies=(), chunks=tuple(chunks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The median time of steps of one size."""

    size: StepSize
    seconds: float


def step_sizes(capacity: Capacity, *, max_model_len: int, max_prefill_tokens: int) -> list[StepSize]:
    """A spread of what may come up: each part from little to the most that there is room for."""
    contexts = _up_to(max_model_len, CONTEXTS)
    rows = _up_to(min(capacity.max_sequences, capacity.max_step_tokens), ROWS)
    prompts = _up_to(min(capacity.max_step_tokens, max_model_len), PROMPTS)
    beside = _up_to(min(max_prefill_tokens, max_model_len), PROMPTS)
    sizes = [StepSize(n_decodes=n, n_context=context) for n, context in product(rows, contexts)]
    sizes += [
        StepSize(n_decodes=n, n_context=context, n_shared=int(SHARED_SHARE * context))
        for n, context in product(rows[1:], contexts[1:])
    ]
    sizes += [
        StepSize(n_prompts=1, n_prompt=n, n_before=min(n_before, max_model_len - n))
        for n, n_before in product(prompts, (0, *contexts[1:]))
    ]
    sizes += [
        StepSize(n_prompts=n, n_prompt=n_prompt, n_before=min(n_before, max_model_len - n_prompt))
        for n, n_prompt, n_before in product(PROMPTS_AT_ONCE, prompts, (0, contexts[-1]))
    ]
    sizes += [
        StepSize(
            n_decodes=n,
            n_context=context,
            n_prompts=1,
            n_prompt=n_prompt,
            n_before=min(n_before, max_model_len - n_prompt),
        )
        for n, context, n_prompt, n_before in product(rows[1:], contexts[:3], beside[1:], (0, contexts[:3][-1]))
    ]
    return [
        size
        for size in dict.fromkeys(sizes)
        if size.n_tokens <= capacity.max_step_tokens
        and size.n_blocks(capacity.block_size) <= capacity.n_blocks
        and size.n_before + size.n_prompt <= max_model_len
    ]


def measure(
    executor: Executor,
    sizes: Sequence[StepSize],
    *,
    vocabulary_size: int,
    advance: Callable[[], None],
    n_rounds: int = N_ROUNDS,
    clock: Callable[[], float] = perf_counter,
) -> list[Measured]:
    """Runs a step of each size, `n_rounds` times after a first that does not count; `advance` after each."""
    capacity, steps = executor.capacity, count()
    for plan in _filling(capacity, max(size.n_blocks(capacity.block_size) for size in sizes), steps):
        executor.begin(plan).result()
    seconds: defaultdict[StepSize, list[float]] = defaultdict(list)
    for index in range(n_rounds + 1):
        for size in Random(index).sample(sizes, len(sizes)):
            elapsed_s = _timed(executor, size, vocabulary_size, steps, clock)
            if index:
                seconds[size].append(elapsed_s)
            advance()
    return [Measured(size=size, seconds=median(seconds[size])) for size in sizes]


def split(measured: Sequence[Measured]) -> tuple[list[Measured], list[Measured]]:
    """Those to fit to, and those held out; the same each time."""
    shuffled = Random(0).sample(measured, len(measured))
    n_held_out = round(len(measured) * HELD_OUT_SHARE)
    return shuffled[n_held_out:], shuffled[:n_held_out]


def fit(measured: Sequence[Measured]) -> StepCost:
    """The least squares of relative errors, each coefficient at least 0.

    The best of such fits is the unconstrained one over some of the coefficients, the others being 0; with six of
    them all 63 choices are tried.
    """
    plans = [one.size.plan() for one in measured]
    features = np.array([[unit.seconds(plan) for unit in _UNITS] for plan in plans])
    shares = features / np.array([[one.seconds] for one in measured])
    candidates = (
        _fitted(shares, chosen)
        for n in range(1, len(_UNITS) + 1)
        for chosen in combinations(range(len(_UNITS)), n)
    )
    possible = [coefficients for coefficients in candidates if (coefficients >= 0).all()]
    best = min(possible, key=lambda coefficients: float(np.square(shares @ coefficients - 1).sum()))
    return StepCost(**{field.name: float(value) for field, value in zip(fields(StepCost), best, strict=True)})


def fits_by_kind(cost: StepCost, held_out: Sequence[Measured]) -> dict[str, Fit]:
    """How well the model describes steps that it has not seen: those of each kind that there is."""
    of_kind = {kind: [one for one in held_out if one.size.kind == kind] for kind in KINDS}
    return {kind: fit_of(cost, some) for kind, some in of_kind.items() if some}


def fit_of(cost: StepCost, measured: Sequence[Measured]) -> Fit:
    """How well the model describes these steps, one at least."""
    predicted_s = np.array([cost.seconds(one.size.plan()) for one in measured])
    measured_s = np.array([one.seconds for one in measured])
    relative = np.abs(predicted_s / measured_s - 1)
    p50, p90 = np.percentile(relative, (50, 90), method="inverted_cdf")
    return Fit(
        n_steps=len(measured),
        measured_s=float(measured_s.sum()),
        error_p50=float(p50),
        error_p90=float(p90),
        error_max=float(relative.max()),
        error_total=float(predicted_s.sum() / measured_s.sum() - 1),
    )


def _fitted(shares: NDArray[np.float64], chosen: tuple[int, ...]) -> NDArray[np.float64]:
    """Columns of length 1, or 0, for those of pairs are millions of times as long as those of steps."""
    columns = shares[:, chosen]
    lengths = np.maximum(np.linalg.norm(columns, axis=0), np.finfo(float).tiny)
    coefficients = np.zeros(shares.shape[1])
    coefficients[list(chosen)] = np.linalg.lstsq(columns / lengths, np.ones(len(shares)), rcond=None)[0] / lengths
    return coefficients


def _up_to(limit: int, values: Sequence[int]) -> tuple[int, ...]:
    return (*(value for value in values if value < limit), limit)


def _filling(capacity: Capacity, n_blocks: int, steps: Iterator[int]) -> Iterator[StepPlan]:
    """Steps that write something to the first blocks: memory that nobody has written is faster to read."""
    chunk = _chunk(0, (0,) * capacity.block_size, 0, (0,))
    yield StepPlan(step=next(steps), copies=(), chunks=(chunk,))
    for begin in range(1, n_blocks, COPIES_A_STEP):
        targets = range(begin, min(begin + COPIES_A_STEP, n_blocks))
        copies = tuple(BlockCopy(source=0, target=target) for target in targets)
        yield StepPlan(step=next(steps), copies=copies, chunks=(chunk,))


def _timed(
    executor: Executor, size: StepSize, vocabulary_size: int, steps: Iterator[int], clock: Callable[[], float]
) -> float:
    """Seconds from the end of the step before to that of this one; where steps overlap, both are in flight."""
    capacity = executor.capacity
    plans = [
        size.plan(next(steps), block_size=capacity.block_size, vocabulary_size=vocabulary_size)
        for _ in range(capacity.max_flights)
    ]
    begun_at = clock()
    pending = [executor.begin(plan) for plan in plans]
    for before in pending[:-1]:
        before.result()
        begun_at = clock()
    pending[-1].result()
    return clock() - begun_at


def _chunk(sequence_id: int, token_ids: tuple[int, ...], start: int, block_ids: tuple[int, ...]) -> Chunk:
    return Chunk(
        sequence_id=sequence_id,
        token_ids=token_ids,
        start=start,
        block_ids=block_ids,
        sample=Sample(params=GREEDY, seeds=(0,), output_index=0),
    )
