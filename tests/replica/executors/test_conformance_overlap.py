"""What every executor promises where a step is begun while another is in flight, for any model."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
from bakehouse_replica.core.executor import Executor, Pending
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import BlockCopy, Chunk, StepPlan, StepResult
from executors import (
    BLOCKS,
    CAPACITY,
    GREEDY,
    N_PROMPT,
    OTHER_BLOCKS,
    OTHER_PROMPT,
    OVERLAPPING,
    PROMPT,
    SEEDED,
    MakeExecutor,
    chunk_of,
    closing_all,
    cold,
    drawn,
    ids_drawn,
    sample_at,
)

N_OUTPUT = 5


@pytest.fixture(params=OVERLAPPING)
def make_executor(request: pytest.FixtureRequest) -> Iterator[MakeExecutor]:
    with closing_all(request.param) as factory:
        yield factory


@pytest.fixture
def executor(make_executor: MakeExecutor) -> Executor:
    return make_executor(replace(CAPACITY, max_flights=2))


def run_two_at_once(executor: Executor, plans: Iterable[StepPlan]) -> list[StepResult]:
    """Carries out the plans, each but the first begun before the result of the last one is taken."""
    begun: deque[Pending] = deque()
    results = []
    for plan in plans:
        begun.append(executor.begin(plan))
        if len(begun) == 2:
            results.append(begun.popleft().result())
    return [*results, *(pending.result() for pending in begun)]


def step(number: int, *chunks: Chunk, copies: tuple[BlockCopy, ...] = ()) -> StepPlan:
    return StepPlan(step=number, copies=copies, chunks=chunks)


def following(
    output_index: int, params: SamplingParams, *, blocks: tuple[int, ...] = BLOCKS, sequence_id: int = 0
) -> Chunk:
    """Asks for output token `output_index` of the prompt, where the one before is still in flight."""
    known = (0,) * (N_PROMPT + output_index)
    chunk = chunk_of(
        known,
        start=len(known) - 1,
        blocks=blocks,
        sequence_id=sequence_id,
        sample=sample_at(output_index, params),
    )
    return replace(chunk, follows_draw=True)


def decoded(executor: Executor, prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    """The output that comes of steps one by one."""
    tokens = prompt
    for output_index in range(N_OUTPUT):
        start = 0 if output_index == 0 else len(tokens) - 1
        tokens += drawn(executor, chunk_of(tokens, start=start, sample=sample_at(output_index, params)))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_token_may_be_asked_for_while_the_one_before_is_in_flight(
    make_executor: MakeExecutor, executor: Executor, params: SamplingParams
) -> None:
    plans = [step(0, chunk_of(PROMPT, sample=sample_at(0, params)))]
    plans += [step(number, following(number, params)) for number in range(1, N_OUTPUT)]
    results = run_two_at_once(executor, plans)
    assert [result.step for result in results] == list(range(N_OUTPUT))
    assert tuple(ids_drawn(result)[0][0] for result in results) == decoded(make_executor(CAPACITY), PROMPT, params)


def test_each_sequence_follows_its_own_draw_whatever_its_place_in_the_step(
    make_executor: MakeExecutor, executor: Executor
) -> None:
    ours = chunk_of(PROMPT, sample=sample_at(0))
    theirs = chunk_of(OTHER_PROMPT, blocks=OTHER_BLOCKS, sequence_id=1, sample=sample_at(0))
    third = chunk_of(PROMPT[:3], blocks=(15,), sequence_id=2, sample=sample_at(0))
    next_of_theirs = following(1, GREEDY, blocks=OTHER_BLOCKS, sequence_id=1)
    first, second = run_two_at_once(
        executor, [step(0, ours, theirs), step(1, next_of_theirs, third, following(1, GREEDY))]
    )
    (ours_0,), (theirs_0,) = ids_drawn(first)
    assert ids_drawn(second) == [
        (cold(make_executor, (*OTHER_PROMPT, theirs_0)),),
        (cold(make_executor, PROMPT[:3]),),
        (cold(make_executor, (*PROMPT, ours_0)),),
    ]


def test_log_probabilities_are_those_of_steps_one_by_one(make_executor: MakeExecutor, executor: Executor) -> None:
    params = replace(GREEDY, logprobs=2)
    first, second = run_two_at_once(
        executor, [step(0, chunk_of(PROMPT, sample=sample_at(0, params))), step(1, following(1, params))]
    )
    tokens = (*PROMPT, ids_drawn(first)[0][0])
    alone = make_executor(CAPACITY).begin(step(0, chunk_of(tokens, sample=sample_at(1, params)))).result()
    (found,), (expected,) = second.sampled[0].draws[0].logprobs, alone.sampled[0].draws[0].logprobs
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
    assert [token_id for token_id, _ in found.top] == [token_id for token_id, _ in expected.top]


def test_what_a_later_step_writes_comes_after_what_an_earlier_one_reads(
    make_executor: MakeExecutor, executor: Executor
) -> None:
    results = run_two_at_once(
        executor,
        [
            step(0, chunk_of(PROMPT, sample=sample_at(0))),
            step(1, chunk_of(OTHER_PROMPT, sequence_id=1, sample=sample_at(0))),
            step(2, chunk_of((*OTHER_PROMPT, 4), start=N_PROMPT, sequence_id=1, sample=sample_at(1))),
        ],
    )
    assert [ids_drawn(result)[0][0] for result in results] == [
        cold(make_executor, PROMPT),
        cold(make_executor, OTHER_PROMPT),
        cold(make_executor, (*OTHER_PROMPT, 4)),
    ]


def test_a_copy_has_what_the_step_before_wrote(make_executor: MakeExecutor, executor: Executor) -> None:
    ours = (*PROMPT, 1)
    table = (*BLOCKS[:2], OTHER_BLOCKS[2])
    _, second = run_two_at_once(
        executor,
        [
            step(0, chunk_of(PROMPT, sample=sample_at(0))),
            step(
                1,
                chunk_of(ours, start=N_PROMPT, blocks=table, sequence_id=1, sample=sample_at(1)),
                copies=(BlockCopy(source=BLOCKS[2], target=OTHER_BLOCKS[2]),),
            ),
        ],
    )
    assert ids_drawn(second)[0] == (cold(make_executor, ours),)


def test_a_draw_without_tokens_may_be_followed_and_harms_no_neighbour(
    make_executor: MakeExecutor, executor: Executor
) -> None:
    params = replace(GREEDY, allowed_token_ids=(5,), stop_token_ids=(5,), min_tokens=9)  # no token is left to draw
    first, second = run_two_at_once(
        executor,
        [
            step(
                0,
                chunk_of(PROMPT, sample=sample_at(0, params)),
                chunk_of(OTHER_PROMPT, blocks=OTHER_BLOCKS, sequence_id=1, sample=sample_at(0)),
            ),
            step(1, following(1, params), following(1, GREEDY, blocks=OTHER_BLOCKS, sequence_id=1)),
        ],
    )
    failed, (theirs,) = first.sampled[0].draws[0], ids_drawn(replace(first, sampled=first.sampled[1:]))[0]
    assert failed.token_ids == ()
    assert failed.failure is not None
    found = second.sampled[1].draws[0].token_ids[0]
    assert found == cold(make_executor, (*OTHER_PROMPT, theirs))
