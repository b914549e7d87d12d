"""A scheduler and an executor driven by hand, audited after every call, and the oracle for what comes out."""

from collections.abc import Callable
from dataclasses import dataclass, field

from bakehouse_replica.core.blocks import BlockPool
from bakehouse_replica.core.hashing import choice_seed
from bakehouse_replica.core.scheduler import Scheduler
from bakehouse_replica.core.types import (
    Capacity,
    Chunk,
    Failure,
    FinishReason,
    Request,
    Sample,
    SamplingParams,
    SchedulingPolicy,
    StepPlan,
    TokenDelta,
    Usage,
)
from bakehouse_replica.executors.fake import FakeExecutor

VOCABULARY_SIZE = 50
POLICY = SchedulingPolicy(max_model_len=1000)


@dataclass
class Outcome:
    """What a client has received of one choice."""

    token_ids: list[int] = field(default_factory=list)
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
        ),
    )


def naive_generate(request: Request, max_model_len: int) -> list[Outcome]:
    """Each choice alone, its whole history as one chunk in one block, step after step: no scheduler, no pool."""
    params, n_prompt = request.params, len(request.prompt_ids)
    n_limit = max_model_len - n_prompt if params.max_tokens is None else params.max_tokens
    capacity = Capacity(n_blocks=1, block_size=max_model_len, max_step_tokens=max_model_len, max_sequences=1)
    outcomes = []
    for choice in range(params.n):
        executor = FakeExecutor(capacity, vocabulary_size=VOCABULARY_SIZE)
        outcome = Outcome(token_ids=list(request.prior_output))
        while outcome.finish is None:
            tokens = (*request.prompt_ids, *outcome.token_ids)
            if outcome.token_ids and outcome.token_ids[-1] in params.stop_token_ids:
                outcome.finish = FinishReason.STOP
            elif len(outcome.token_ids) >= n_limit:
                outcome.finish = FinishReason.LENGTH
            else:
                assert params.seed is not None
                sample = Sample(
                    params=params,
                    seeds=(choice_seed(params.seed, choice),),
                    output_index=len(outcome.token_ids),
                    prompt_ids=request.prompt_ids,
                    output_ids=tuple(outcome.token_ids),
                )
                chunk = Chunk(sequence_id=0, token_ids=tokens, start=0, block_ids=(0,), sample=sample)
                result = executor.execute(StepPlan(step=0, copies=(), chunks=(chunk,)))
                outcome.token_ids += result.sampled[0].draws[0].token_ids
        outcomes.append(outcome)
    return outcomes


class Driver:
    """Runs requests to their end; after every call the audit holds, and deltas fit together seamlessly."""

    def __init__(
        self,
        capacity: Capacity,
        policy: SchedulingPolicy,
        *,
        pool_type: type[BlockPool] = BlockPool,
    ) -> None:
        self.scheduler = Scheduler(
            capacity=capacity, policy=policy, model_digest="model", hash_key=b"key", pool_type=pool_type
        )
        self.executor = FakeExecutor(capacity, vocabulary_size=VOCABULARY_SIZE)
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self.outcomes: dict[tuple[str, int], Outcome] = {}

    def add(self, request: Request) -> None:
        """Adds a request at the present time."""
        self.scheduler.add(request, self.now)
        for choice in range(request.params.n):
            self.outcomes[request.request_id, choice] = Outcome(token_ids=list(request.prior_output))
        self._after_event()

    def abort(self, request_id: str) -> None:
        """Aborts a request."""
        self.scheduler.abort(request_id)
        self._after_event()

    def step(self, during: Callable[[], None] = lambda: None) -> StepPlan | None:
        """Plans, executes and applies one step of one second; `during` is called while it is in flight."""
        plan = self.scheduler.plan(self.now)
        self._after_event()
        self.now += 1.0
        if plan is not None:
            self.plans.append(plan)
            result = self.executor.execute(plan)
            during()
            self._receive(self.scheduler.apply(result, self.now))
            self._after_event()
        return plan

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

    def _after_event(self) -> None:
        self.scheduler.check()
        self._receive(self.scheduler.take_deltas())

    def _receive(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            is_first = (delta.request_id, delta.choice) not in self.outcomes
            outcome = self.outcomes.setdefault((delta.request_id, delta.choice), Outcome())
            assert outcome.finish is None, f"{delta} comes after the terminal delta"
            assert delta.start == len(outcome.token_ids), f"{delta} leaves a gap or repeats"
            assert delta.usage or not (is_first or delta.finish), (
                f"{delta} is the first or the last, without usage"
            )
            outcome.token_ids += delta.token_ids
            outcome.usage = delta.usage or outcome.usage
            outcome.finish, outcome.failure = delta.finish, delta.failure


def make_driver(
    *,
    n_blocks: int = 64,
    block_size: int = 16,
    max_step_tokens: int = 64,
    max_sequences: int = 8,
    policy: SchedulingPolicy = POLICY,
) -> Driver:
    """A driver with room for whatever a test does not want to be scarce."""
    capacity = Capacity(
        n_blocks=n_blocks, block_size=block_size, max_step_tokens=max_step_tokens, max_sequences=max_sequences
    )
    return Driver(capacity, policy)
