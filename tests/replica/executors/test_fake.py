"""What the fake executor adds to the promises of all executors: it notices a wrong past."""

import time
from dataclasses import replace

import pytest
from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.executor import execute
from bakehouse_replica.core.sampling import Grammar, GrammarKind, SamplingParams
from bakehouse_replica.core.types import Capacity, Chunk, Sample, Score, StepPlan
from bakehouse_replica.executors.fake import FakeExecutor

CAPACITY = Capacity(n_blocks=8, block_size=4, max_step_tokens=64, max_sequences=8)
PENALISED = Sample(
    params=SamplingParams(seed=0, presence_penalty=1.0),
    seeds=(0,),
    output_index=2,
    prompt_ids=(1, 2, 3),
    output_ids=(4, 5),
)


def plan_of(*chunks: Chunk) -> StepPlan:
    return StepPlan(step=0, copies=(), chunks=chunks)


def chunk_of(token_ids: tuple[int, ...], start: int, block_ids: tuple[int, ...]) -> Chunk:
    return Chunk(sequence_id=0, token_ids=token_ids, start=start, block_ids=block_ids)


@pytest.mark.parametrize(
    "block_ids",
    [
        pytest.param((0, 2), id="never written"),
        pytest.param((1, 1), id="another position"),
        pytest.param((0, 3), id="not written so far"),
    ],
)
def test_reading_a_past_that_is_not_there_is_an_error(block_ids: tuple[int, ...]) -> None:
    executor = FakeExecutor(CAPACITY)
    execute(executor, plan_of(chunk_of((1, 2, 3, 4, 5, 6), 0, (0, 1))))
    execute(executor, plan_of(chunk_of((1, 2, 3, 4, 5), 0, (0, 3))))
    execute(executor, plan_of(chunk_of((7,), 6, (0, 1))))
    with pytest.raises(AssertionError, match="reads positions"):
        execute(executor, plan_of(chunk_of((7,), 6, block_ids)))


def test_penalties_must_count_the_tokens_that_were_computed() -> None:
    executor = FakeExecutor(CAPACITY)
    chunk = Chunk(sequence_id=0, token_ids=(1, 2, 3, 4, 5), start=0, block_ids=(0, 1), sample=PENALISED)
    assert len(execute(executor, plan_of(chunk)).sampled) == 1
    with pytest.raises(AssertionError, match=r"told \(1, 2, 3, 4, 6\); the cache holds \(1, 2, 3, 4, 5\)"):
        execute(executor, plan_of(replace(chunk, sample=replace(PENALISED, output_ids=(4, 6)))))


def test_bad_words_must_look_at_the_tokens_that_were_computed() -> None:
    executor = FakeExecutor(CAPACITY)
    params = SamplingParams(seed=0, bad_words_ids=((4, 5),))
    sample = Sample(params=params, seeds=(0,), output_index=2, output_ids=(4, 6))
    chunk = Chunk(sequence_id=0, token_ids=(1, 2, 3, 4, 5), start=0, block_ids=(0, 1), sample=sample)
    with pytest.raises(AssertionError, match=r"told \(4, 6\); the cache holds \(4, 5\)"):
        execute(executor, plan_of(chunk))


def test_another_past_yields_other_log_probabilities() -> None:
    executor = FakeExecutor(CAPACITY)
    score = Score(first_row=4, target_ids=(6,), n_top=1)
    found = []
    for first in range(20):
        chunk = replace(chunk_of((first, 2, 3, 4, 5, 6), 0, (0, 1)), score=score)
        found.append(execute(executor, plan_of(chunk)).scored[0].logprobs[0])
    assert len(set(found)) == 20


def test_a_grammar_is_refused_by_name() -> None:
    params = SamplingParams(grammar=Grammar(kind=GrammarKind.REGEX, text="a"))
    with pytest.raises(InvalidRequest, match="cannot keep to one") as caught:
        FakeExecutor(CAPACITY).prepare(params)
    assert caught.value.param == "grammar"


def test_where_every_token_is_banned_by_bias_one_comes_all_the_same() -> None:
    executor = FakeExecutor(CAPACITY, vocabulary_size=4)
    params = SamplingParams(seed=0, logit_bias=tuple((token_id, -100.0) for token_id in range(4)))
    sample = Sample(params=params, seeds=(0,), output_index=0)
    chunk = replace(chunk_of((1, 2), 0, (0,)), sample=sample)
    assert len(execute(executor, plan_of(chunk)).sampled[0].draws[0].token_ids) == 1


def test_the_hook_sees_each_plan_and_may_end_the_step() -> None:
    seen: list[StepPlan] = []

    def watch(plan: StepPlan) -> None:
        seen.append(plan)
        if len(seen) == 2:
            raise RuntimeError("broken")

    executor = FakeExecutor(CAPACITY, before_step=watch)
    plan = plan_of(chunk_of((1, 2), 0, (0,)))
    execute(executor, plan)
    with pytest.raises(RuntimeError, match="broken"):
        execute(executor, plan)
    assert seen == [plan, plan]


def test_every_id_lies_in_the_vocabulary_and_most_of_it_comes_up() -> None:
    executor = FakeExecutor(CAPACITY, vocabulary_size=10)
    sample = Sample(params=SamplingParams(seed=0), seeds=tuple(range(200)), output_index=0)
    chunk = replace(chunk_of((1, 2), 0, (0,)), sample=sample)
    token_ids = tuple(draw.token_ids[0] for draw in execute(executor, plan_of(chunk)).sampled[0].draws)
    assert set(token_ids) == set(range(10))  # fails for one seeding in 7e7; the seeds are fixed


def test_steps_end_no_closer_than_their_time_whatever_they_compute() -> None:
    """By lower bounds alone, which no busy machine can break."""
    executor = FakeExecutor(CAPACITY, step_s=0.02)
    begun_at = time.perf_counter()
    for start in range(3):
        execute(executor, plan_of(chunk_of((1,), start, (0,))))
        assert time.perf_counter() - begun_at >= 0.02 * (start + 1)


def test_steps_in_flight_together_take_their_time_one_after_the_other() -> None:
    executor = FakeExecutor(replace(CAPACITY, max_flights=2), step_s=0.02)
    begun_at = time.perf_counter()
    first, second = (executor.begin(replace(plan_of(chunk_of((1,), 0, (0,))), step=step)) for step in range(2))
    first.result()
    assert time.perf_counter() - begun_at >= 0.02
    second.result()
    assert time.perf_counter() - begun_at >= 0.04


def test_to_begin_a_step_is_not_to_wait_for_it() -> None:
    executor = FakeExecutor(CAPACITY, step_s=1e6)
    executor.begin(plan_of(chunk_of((1,), 0, (0,))))
