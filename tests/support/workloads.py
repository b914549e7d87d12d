"""Random workloads on tiny pools, played on a driver, and what must be true of every outcome."""

from dataclasses import dataclass, replace

from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.types import Capacity, FailureKind, FinishReason, Request, SchedulingPolicy
from driving import Driver, MakeExecutor, Outcome, make_fake, make_request, naive_generate
from eventful import make_eventful
from hypothesis import strategies as st

MAX_MODEL_LEN = 40
COMMON = tuple(range(30, 46))  # prompts begin alike, so that blocks are shared
STOP_IDS = (3, 11, 19)  # of 50 ids: one draw in 17 stops

CAPACITIES = st.builds(
    Capacity,
    n_blocks=st.integers(6, 14),
    block_size=st.sampled_from([2, 3, 4]),
    max_step_tokens=st.integers(1, 12),
    max_sequences=st.integers(1, 6),
)
POLICIES = st.builds(
    SchedulingPolicy,
    max_model_len=st.just(MAX_MODEL_LEN),
    max_prefill_tokens=st.integers(1, 8),
    long_prefill_tokens=st.integers(3, 12),
    max_long_prefills=st.integers(1, 2),
)


@dataclass(frozen=True)
class Visit:
    """One request: when it comes, and when its client leaves (before coming, while a step runs, between steps)."""

    request: Request
    arrives_at: int
    leaves_at: int | None
    leaves_in_flight: bool


@st.composite
def visits(draw: st.DrawFn, request_id: str) -> Visit:
    request = make_request(
        request_id,
        COMMON[: draw(st.integers(0, 12))] + draw(st.tuples(st.integers(0, 49), st.integers(0, 2))),
        n=draw(st.sampled_from([1, 1, 1, 2, 4])),
        max_tokens=draw(st.one_of(st.none(), st.integers(0, 12))),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(-3, 3)),
        stop=draw(st.sampled_from([(), STOP_IDS])),
        priority=draw(st.sampled_from([0, 0, 0, -1, 1])),
        salt=draw(st.sampled_from(["", "", "tenant"])),
        timeout_s=draw(st.sampled_from([None, None, None, 5.0, 20.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.0])),
        logprobs=draw(st.sampled_from([None, None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0, 3])),
        bad_words=draw(st.sampled_from([(), (), ((5,), (7, 8))])),
    )
    if request.params.n == 1 and draw(st.booleans()):
        whole = naive_generate(request, MAX_MODEL_LEN, make_eventful())[0].token_ids
        request = replace(request, prior_output=tuple(whole[: draw(st.integers(0, len(whole)))]))
    arrives_at = draw(st.integers(0, 12))
    leaves_at = draw(st.one_of(st.none(), st.none(), st.integers(-1, 15).map(lambda delay: arrives_at + delay)))
    return Visit(request, arrives_at, leaves_at, draw(st.booleans()))


WORKLOADS = st.integers(1, 9).flatmap(lambda n: st.tuples(*(visits(f"r{index}") for index in range(n))))


def run_workload(driver: Driver, workload: tuple[Visit, ...]) -> set[str]:
    """Plays the visits; returns the ids of the requests that were refused as impossible."""
    refused = set()

    def leave(step: int, in_flight: bool) -> None:
        for visit in workload:
            if visit.leaves_at == step and visit.leaves_in_flight == in_flight:
                driver.abort(visit.request.request_id)

    last_event = max(max(visit.arrives_at, visit.leaves_at or 0) for visit in workload)
    step = -1
    while step <= last_event or driver.scheduler.has_work:
        leave(step, in_flight=False)
        for visit in workload:
            if visit.arrives_at == step:
                try:
                    driver.add(visit.request)
                except InvalidRequest:
                    refused.add(visit.request.request_id)
        if driver.step(during=lambda step=step: leave(step, in_flight=True)) is None:  # type: ignore[misc]
            leave(step, in_flight=True)
        step += 1
        assert step < 5_000, "the workload does not end"
    return refused


def assert_text_is_naive(
    driver: Driver, workload: tuple[Visit, ...], refused: set[str], make_executor: MakeExecutor = make_fake
) -> None:
    """Each choice ended once, as an undisturbed run does, or with its beginning where it was cut short."""
    for visit in workload:
        request = visit.request
        if request.request_id in refused:
            continue
        for choice, expected in enumerate(naive_generate(request, MAX_MODEL_LEN, make_executor)):
            outcome = driver.outcome(request.request_id, choice)
            assert outcome.finish is not None, f"{request.request_id} choice {choice} never ended"
            is_whole = outcome.finish in (FinishReason.STOP, FinishReason.LENGTH)
            if is_whole or (outcome.failure is not None and outcome.failure.kind is FailureKind.DRAW):
                assert (outcome.token_ids, outcome.logprobs) == (expected.token_ids, expected.logprobs)
                assert outcome.finish is expected.finish
            else:
                assert_cut_short(visit, outcome, expected)
            if is_whole or len(outcome.token_ids) > len(request.prior_output):
                assert outcome.prompt_logprobs == expected.prompt_logprobs
            assert outcome.prompt_logprobs in ((), expected.prompt_logprobs)
            assert outcome.usage is not None
            assert outcome.usage.completion_tokens == len(outcome.token_ids)
            assert outcome.usage.cached_tokens <= len(request.prompt_ids)


def assert_cut_short(visit: Visit, outcome: Outcome, expected: Outcome) -> None:
    """The choice has the beginning of what was expected, and a cause for the missing end."""
    assert outcome.token_ids == expected.token_ids[: len(outcome.token_ids)]
    assert outcome.logprobs == expected.logprobs[: len(outcome.logprobs)]
    if outcome.finish is FinishReason.CANCELLED:
        assert visit.leaves_at is not None
        return
    assert (outcome.finish, outcome.failure is not None) == (FinishReason.ERROR, True)
    if outcome.failure is not None and outcome.failure.kind is FailureKind.DEADLINE:
        assert visit.request.timeout_s is not None
    elif outcome.failure is not None:
        assert outcome.failure.kind is FailureKind.NO_ROOM
        assert visit.request.params.max_tokens is None, "what was accepted with a limit must fit"


def assert_plans_are_sound(driver: Driver, capacity: Capacity) -> None:
    """No copy depends on the order of the others, no step is too large, no score is asked for twice."""
    for plan in driver.plans:
        sources, targets = {copy.source for copy in plan.copies}, [copy.target for copy in plan.copies]
        assert len(set(targets)) == len(targets), "two copies onto one block"
        assert not sources & set(targets), "copies would depend on their order"
        assert sum(len(chunk.token_ids) for chunk in plan.chunks) <= capacity.max_step_tokens
    for positions in driver.scored_positions().values():
        assert positions == list(range(1, len(positions) + 1))
