"""A scheduler and an executor driven by hand, audited after every call, and the oracle for what comes out."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from bakehouse_replica.core.blocks import BlockPool
from bakehouse_replica.core.counts import Distribution
from bakehouse_replica.core.executor import Executor, Pending, execute
from bakehouse_replica.core.hashing import choice_seed
from bakehouse_replica.core.metric_table import Metric
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.scheduler import Scheduler
from bakehouse_replica.core.tally import replica_counts
from bakehouse_replica.core.types import (
    Capacity,
    Chunk,
    Cost,
    Draw,
    Failure,
    FinishReason,
    Request,
    Sample,
    SchedulingPolicy,
    Score,
    StepPlan,
    StepResult,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from bakehouse_replica.executors.fake import FakeExecutor

VOCABULARY_SIZE = 50
POLICY = SchedulingPolicy(max_model_len=1000)

MakeExecutor = Callable[[Capacity], Executor]


def make_fake(capacity: Capacity) -> Executor:
    """The fake executor, one token a draw."""
    return FakeExecutor(capacity, vocabulary_size=VOCABULARY_SIZE)


def make_fake_drawing(tokens_per_step: int) -> MakeExecutor:
    """Makes fake executors that draw so many tokens at once."""
    return lambda capacity: FakeExecutor(
        capacity, vocabulary_size=VOCABULARY_SIZE, tokens_per_step=tokens_per_step
    )


@dataclass
class Outcome:
    """What a client has received of one choice; `logprobs` are those of the tokens after a prior output."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    failure: Failure | None = None


def make_request(
    request_id: str,
    prompt: tuple[int, ...] | list[int] | range,
    *,
    prior_output: tuple[int, ...] = (),
    priority: int = 0,
    salt: str = "",
    timeout_s: float | None = None,
    n: int = 1,
    max_tokens: int | None = 8,
    min_tokens: int = 0,
    temperature: float = 0.0,
    seed: int = 7,
    stop: tuple[int, ...] = (),
    presence_penalty: float = 0.0,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> Request:
    """A greedy request for 8 tokens, unless told otherwise."""
    return Request(
        request_id=request_id,
        prompt_ids=tuple(prompt),
        prior_output=prior_output,
        priority=priority,
        cache_salt=salt,
        timeout_s=timeout_s,
        params=SamplingParams(
            n=n,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            seed=seed,
            stop_token_ids=stop,
            presence_penalty=presence_penalty,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            bad_words_ids=bad_words,
        ),
    )


def naive_generate(request: Request, max_model_len: int, make_executor: MakeExecutor = make_fake) -> list[Outcome]:
    """Each choice alone, its whole history as one chunk in one block, step after step: no scheduler, no pool."""
    n_limit = request.params.max_tokens
    if n_limit is None:
        n_limit = max_model_len - len(request.prompt_ids)
    capacity = Capacity(n_blocks=1, block_size=max_model_len, max_step_tokens=max_model_len, max_sequences=1)
    outcomes = []
    for choice in range(request.params.n):
        executor = make_executor(capacity)
        outcome = Outcome(token_ids=list(request.prior_output))
        if choice == 0:
            outcome.prompt_logprobs = _naive_scores(request, executor)
        while outcome.finish is None:
            outcome.finish = _natural_end(outcome, request, n_limit)
            if outcome.finish is None:
                draw = _naive_draw(request, choice, outcome, executor)
                outcome.token_ids += draw.token_ids
                outcome.logprobs += draw.logprobs
                if draw.is_complete:
                    outcome.finish = FinishReason.STOP
                elif draw.failure is not None:
                    outcome.finish = _natural_end(outcome, request, n_limit) or FinishReason.ERROR
        outcomes.append(outcome)
    return outcomes


def _natural_end(outcome: Outcome, request: Request, n_limit: int) -> FinishReason | None:
    if outcome.token_ids and outcome.token_ids[-1] in request.params.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(outcome.token_ids) >= n_limit else None


def _naive_draw(request: Request, choice: int, outcome: Outcome, executor: Executor) -> Draw:
    assert request.params.seed is not None
    sample = Sample(
        params=request.params,
        seeds=(choice_seed(request.params.seed, choice),),
        choice=choice,
        output_index=len(outcome.token_ids),
        prompt_ids=request.prompt_ids if request.params.has_penalties else (),
        output_ids=tuple(outcome.token_ids) if request.params.needs_output else (),
    )
    tokens = (*request.prompt_ids, *outcome.token_ids)
    chunk = Chunk(sequence_id=0, token_ids=tokens, start=0, block_ids=(0,), sample=sample)
    return execute(executor, StepPlan(step=0, copies=(), chunks=(chunk,))).sampled[0].draws[0]


def _naive_scores(request: Request, executor: Executor) -> tuple[TokenLogprob, ...]:
    n_top, prompt_ids = request.params.prompt_logprobs, request.prompt_ids
    if n_top is None or len(prompt_ids) == 1:
        return ()
    score = Score(first_row=0, target_ids=prompt_ids[1:], n_top=n_top)
    chunk = Chunk(sequence_id=0, token_ids=prompt_ids, start=0, block_ids=(0,), score=score)
    return execute(executor, StepPlan(step=0, copies=(), chunks=(chunk,))).scored[0].logprobs


class Driver:
    """Runs requests to their end; after every call the audit holds, and deltas fit together seamlessly.

    `early`: where another step could still be begun, it decides whether a result is taken first.
    """

    def __init__(
        self,
        capacity: Capacity,
        policy: SchedulingPolicy,
        *,
        pool_type: type[BlockPool] = BlockPool,
        make_executor: MakeExecutor = make_fake,
        early: Random | None = None,
    ) -> None:
        self.counts = replica_counts()
        self.scheduler = Scheduler(
            capacity=capacity,
            policy=policy,
            model_digest="model",
            hash_key=b"key",
            counts=self.counts,
            pool_type=pool_type,
        )
        self.executor = make_executor(capacity)
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self.n_ahead = 0  # plans made while another step was in flight
        self._begun: deque[Pending] = deque()
        self._early = early
        self.outcomes: dict[tuple[str, int], Outcome] = {}
        self.costs: dict[str, Cost] = {}
        self._requests: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        """Adds a request at the present time."""
        self.scheduler.add(request, self.now)
        self._requests[request.request_id] = request
        self.costs.pop(request.request_id, None)
        for choice in range(request.params.n):
            self.outcomes[request.request_id, choice] = Outcome(token_ids=list(request.prior_output))
        self._after_event()

    def abort(self, request_id: str) -> None:
        """Aborts a request."""
        self.scheduler.abort(request_id)
        self._after_event()

    def step(
        self,
        during: Callable[[], None] = lambda: None,
        tamper: Callable[[StepResult], StepResult] = lambda result: result,
    ) -> StepPlan | None:
        """Plans and begins a step of one second, and applies the oldest one unless another may be begun.

        `during` is called while steps are in flight; `tamper` puts another result in the place of the executor's.
        """
        plan = self.scheduler.plan(self.now)
        self._after_event()
        self.now += 1.0
        if plan is not None:
            self.plans.append(plan)
            self.n_ahead += bool(self._begun)
            self._begun.append(self.executor.begin(plan))
        if not self._begun:
            return None
        if plan is not None and len(self._begun) < self.executor.capacity.max_flights and not self._takes_early():
            during()
            return plan
        result = tamper(self._begun.popleft().result())
        during()
        self._receive(self.scheduler.apply(result, self.now))
        self._after_event()
        return plan

    def _takes_early(self) -> bool:
        return self._early is not None and self._early.random() < 0.3

    def run(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is left to do; then no block is held."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, f"work is left after {max_steps} steps"
        assert self.scheduler.load().n_held_blocks == 0

    @property
    def n_held(self) -> int:
        """Blocks in use."""
        return self.scheduler.load().n_held_blocks

    def outcome(self, request_id: str, choice: int = 0) -> Outcome:
        """What has come out so far."""
        return self.outcomes[request_id, choice]

    def counted(self, metric: Metric, *labels: str) -> float | Distribution:
        """What the scheduler has counted of a metric."""
        (series,) = (one for one in self.counts.series() if (one.name, one.labels) == (metric.name, labels))
        return series.value

    def n_samples(self, metric: Metric) -> int:
        """How many samples a histogram has."""
        distribution = self.counted(metric)
        assert isinstance(distribution, Distribution)
        return distribution.at_most[-1]

    def scored_positions(self) -> dict[int, list[int]]:
        """The positions of the prompt tokens that each sequence has asked scores for, in order."""
        asked: dict[int, list[int]] = {}
        for plan in self.plans:
            for chunk in plan.chunks:
                if chunk.score is not None:
                    first = chunk.start + chunk.score.first_row + 1
                    positions = range(first, first + len(chunk.score.target_ids))
                    asked.setdefault(chunk.sequence_id, []).extend(positions)
        return asked

    def _after_event(self) -> None:
        self.scheduler.check()
        self._receive(self.scheduler.take_deltas())

    def _receive(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            request = self._requests.get(delta.request_id)
            is_first = request is None or delta.start == len(request.prior_output)
            outcome = self.outcomes.setdefault((delta.request_id, delta.choice), Outcome())
            assert outcome.finish is None, f"{delta} comes after the terminal delta"
            assert delta.start == len(outcome.token_ids), f"{delta} leaves a gap or repeats"
            assert delta.usage or not (is_first or delta.finish), f"{delta} is first or last, without usage"
            assert not delta.prompt_logprobs or (is_first and delta.choice == 0), (
                f"{delta} has the prompt's scores"
            )
            if request is not None:
                n_logprobs = 0 if request.params.logprobs is None else len(delta.token_ids)
                assert len(delta.logprobs) == n_logprobs, f"{delta} should have {n_logprobs} log-probabilities"
            assert delta.request_id not in self.costs, f"{delta} comes after the request's cost"
            outcome.token_ids += delta.token_ids
            outcome.logprobs += delta.logprobs
            outcome.prompt_logprobs += delta.prompt_logprobs
            outcome.usage = delta.usage or outcome.usage
            outcome.finish, outcome.failure = delta.finish, delta.failure
            if delta.cost is not None:
                assert delta.finish is not None, f"{delta} tells the cost before the end"
                self.costs[delta.request_id] = delta.cost


def make_driver(
    *,
    n_blocks: int = 64,
    block_size: int = 16,
    max_step_tokens: int = 64,
    max_sequences: int = 8,
    max_flights: int = 1,
    policy: SchedulingPolicy = POLICY,
    make_executor: MakeExecutor = make_fake,
) -> Driver:
    """A driver with room for whatever a test does not want to be scarce."""
    capacity = Capacity(
        n_blocks=n_blocks,
        block_size=block_size,
        max_step_tokens=max_step_tokens,
        max_sequences=max_sequences,
        max_flights=max_flights,
    )
    return Driver(capacity, policy, make_executor=make_executor)
