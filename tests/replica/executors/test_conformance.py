"""What every executor promises of its KV cache and its draws; each test states one promise, for any model.

What executors report beside tokens is in `test_conformance_reports.py`.
"""

from dataclasses import replace

import pytest
from bakehouse_replica.core.executor import Executor
from bakehouse_replica.core.types import BlockCopy
from executors import (
    BLOCKS,
    CAPACITY,
    GREEDY,
    N_PROMPT,
    OTHER_BLOCKS,
    OTHER_PROMPT,
    PROMPT,
    SEEDED,
    MakeExecutor,
    chunk_of,
    cold,
    drawn,
    ids_drawn,
    run,
    sample_at,
)


def test_it_has_the_capacity_it_was_given(executor: Executor) -> None:
    assert executor.capacity == CAPACITY


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, 5, 10, N_PROMPT])
def test_the_greedy_id_does_not_depend_on_chunking(
    make_executor: MakeExecutor, executor: Executor, chunk_size: int
) -> None:
    for start in range(0, N_PROMPT, chunk_size):
        end = min(start + chunk_size, N_PROMPT)
        sample = sample_at(0) if end == N_PROMPT else None
        result = run(executor, chunk_of(PROMPT[:end], start=start, sample=sample))
        assert len(result.sampled) == (sample is not None)
    assert ids_drawn(result)[0] == (cold(make_executor, PROMPT),)


def test_the_greedy_id_does_not_depend_on_block_ids(make_executor: MakeExecutor, executor: Executor) -> None:
    found = drawn(executor, chunk_of(PROMPT, blocks=OTHER_BLOCKS, sample=sample_at(0)))
    assert found == (cold(make_executor, PROMPT),)


def test_the_greedy_id_does_not_depend_on_neighbours(make_executor: MakeExecutor, executor: Executor) -> None:
    run(executor, chunk_of(OTHER_PROMPT[:6], blocks=OTHER_BLOCKS, sequence_id=1))
    result = run(
        executor,
        chunk_of(PROMPT, sample=sample_at(0)),
        chunk_of(OTHER_PROMPT, start=6, blocks=OTHER_BLOCKS, sequence_id=1, sample=sample_at(0)),
    )
    assert [drawn_ids[0] for drawn_ids in ids_drawn(result)] == [
        cold(make_executor, PROMPT),
        cold(make_executor, OTHER_PROMPT),
    ]


def test_decoding_token_by_token_equals_computing_all_at_once(
    make_executor: MakeExecutor, executor: Executor
) -> None:
    tokens = PROMPT
    tokens += drawn(executor, chunk_of(tokens, sample=sample_at(0)))
    for output_index in range(1, 5):
        tokens += drawn(executor, chunk_of(tokens, start=len(tokens) - 1, sample=sample_at(output_index)))
    for n_output in range(5):
        assert tokens[N_PROMPT + n_output] == cold(make_executor, tokens[: N_PROMPT + n_output])


def test_a_full_block_is_shared_by_naming_it_in_two_tables(
    make_executor: MakeExecutor, executor: Executor
) -> None:
    run(executor, chunk_of(PROMPT))
    tokens = (*PROMPT[:8], *OTHER_PROMPT[8:])
    table = (*BLOCKS[:2], *OTHER_BLOCKS[2:])
    found = drawn(executor, chunk_of(tokens, start=8, blocks=table, sample=sample_at(0)))
    assert found == (cold(make_executor, tokens),)


def test_copies_happen_before_anything_is_written(make_executor: MakeExecutor, executor: Executor) -> None:
    run(executor, chunk_of(PROMPT))
    tail, own_tail = BLOCKS[2], OTHER_BLOCKS[2]
    ours, theirs = (*PROMPT, 1), (*PROMPT, 2)
    result = run(
        executor,
        chunk_of(ours, start=N_PROMPT, sample=sample_at(1)),  # in place, into the source of the copy
        chunk_of(theirs, start=N_PROMPT, blocks=(*BLOCKS[:2], own_tail), sequence_id=1, sample=sample_at(1)),
        copies=(BlockCopy(source=tail, target=own_tail),),
    )
    assert [drawn_ids[0] for drawn_ids in ids_drawn(result)] == [
        cold(make_executor, ours),
        cold(make_executor, theirs),
    ]


def test_a_copy_stays_as_it_is_when_its_source_is_written_later(
    make_executor: MakeExecutor, executor: Executor
) -> None:
    run(executor, chunk_of(PROMPT))
    copies = (
        BlockCopy(source=BLOCKS[2], target=OTHER_BLOCKS[2]),
        BlockCopy(source=BLOCKS[1], target=OTHER_BLOCKS[1]),
    )
    run(executor, chunk_of(OTHER_PROMPT, blocks=(14, 15, 13), sequence_id=1), copies=copies)
    run(executor, chunk_of(OTHER_PROMPT, sequence_id=1))
    run(executor, chunk_of(PROMPT[:4], blocks=OTHER_BLOCKS))
    tokens = (*PROMPT, 4)
    found = drawn(executor, chunk_of(tokens, start=N_PROMPT, blocks=OTHER_BLOCKS, sample=sample_at(1)))
    assert found == (cold(make_executor, tokens),)


def test_a_reused_block_keeps_nothing_of_its_past(make_executor: MakeExecutor, executor: Executor) -> None:
    run(executor, chunk_of((*OTHER_PROMPT, *OTHER_PROMPT[:5])))
    assert drawn(executor, chunk_of(PROMPT, sample=sample_at(0))) == (cold(make_executor, PROMPT),)


def test_n_seeds_give_n_tokens_each_the_one_that_its_seed_gives_alone(executor: Executor) -> None:
    seeds = (5, -6, 7, 2**63 - 1, -(2**63))
    together = drawn(executor, chunk_of(PROMPT, sample=sample_at(0, SEEDED, seeds)))
    alone = [drawn(executor, chunk_of(PROMPT, sample=sample_at(0, SEEDED, (seed,)))) for seed in seeds]
    assert [(token_id,) for token_id in together] == alone


def test_a_seed_draws_the_same_token_again_and_seeds_differ(executor: Executor) -> None:
    seeds = tuple(range(40))
    first = drawn(executor, chunk_of(PROMPT, sample=sample_at(0, SEEDED, seeds)))
    second = drawn(executor, chunk_of(PROMPT, blocks=OTHER_BLOCKS, sample=sample_at(0, SEEDED, seeds)))
    assert first == second
    assert len(set(first)) > 1


def test_greedy_choices_ignore_the_seed(executor: Executor) -> None:
    assert len(set(drawn(executor, chunk_of(PROMPT, sample=sample_at(0, GREEDY, (1, 2, 3)))))) == 1


def test_results_come_in_the_plan_s_order_and_only_for_chunks_that_ask(executor: Executor) -> None:
    result = run(
        executor,
        chunk_of(PROMPT[:3], blocks=(0,), sequence_id=30, sample=sample_at(0)),
        chunk_of(PROMPT[:4], blocks=(1,), sequence_id=20),
        chunk_of(PROMPT[:2], blocks=(2,), sequence_id=10, sample=sample_at(0, SEEDED, (1, 2))),
        step=17,
    )
    assert result.step == 17
    assert [(sampled.sequence_id, len(sampled.draws)) for sampled in result.sampled] == [(30, 1), (10, 2)]
    assert result.elapsed_s >= 0


def test_no_stop_id_is_drawn_before_min_tokens(make_executor: MakeExecutor, executor: Executor) -> None:
    stop = cold(make_executor, PROMPT)
    params = replace(GREEDY, stop_token_ids=(stop,), min_tokens=3)
    for output_index in range(3):
        assert drawn(executor, chunk_of(PROMPT, sample=sample_at(output_index, params))) != (stop,)
    assert drawn(executor, chunk_of(PROMPT, sample=sample_at(3, params))) == (stop,)


def test_a_plan_without_samples_gives_an_empty_result(executor: Executor) -> None:
    assert run(executor, chunk_of(PROMPT)).sampled == ()


def test_closing_twice_is_harmless(executor: Executor) -> None:
    run(executor, chunk_of(PROMPT))
    executor.close()
    executor.close()
