"""What every executor promises of parameters, log-probabilities and scores; each test states one promise.

Log-probabilities are compared to 1e-4: a matrix product of other shapes may sum in another order.
"""

from dataclasses import replace

import pytest
from bakehouse_replica.core.executor import Executor
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Draw, Score, TokenLogprob
from bakehouse_replica.executors.scripted import ScriptedExecutor
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
    run,
    sample_at,
)

TOLERANCE = 1e-4
ALL_BUT_THE_FIRST = Score(first_row=0, target_ids=PROMPT[1:], n_top=3)


def draw_of(executor: Executor, params: SamplingParams, *, output_index: int = 0) -> Draw:
    """The draw after the prompt."""
    chunk = chunk_of(PROMPT, sample=sample_at(output_index, params))
    return run(executor, chunk).sampled[0].draws[0]


def scores_of(executor: Executor, *chunk_sizes: int, blocks: tuple[int, ...] = BLOCKS) -> list[TokenLogprob]:
    """The scores of the prompt, computed in chunks of these sizes."""
    scores: list[TokenLogprob] = []
    start = 0
    for size in chunk_sizes:
        end = start + size
        score = replace(ALL_BUT_THE_FIRST, target_ids=PROMPT[start + 1 : end + 1])
        chunk = chunk_of(PROMPT[:end], start=start, blocks=blocks, score=score if score.target_ids else None)
        for scored in run(executor, chunk).scored:
            scores += scored.logprobs
        start = end
    return scores


def assert_same(found: list[TokenLogprob], expected: list[TokenLogprob]) -> None:
    assert [each.logprob for each in found] == pytest.approx([each.logprob for each in expected], abs=TOLERANCE)
    for one, other in zip(found, expected, strict=True):
        assert [logprob for _, logprob in one.top] == pytest.approx(
            [logprob for _, logprob in other.top], abs=TOLERANCE
        )


def assert_well_formed(logprob: TokenLogprob, token_id: int, n_top: int) -> None:
    assert logprob.logprob <= 0.0
    assert logprob.rank >= 1
    assert len(logprob.top) == n_top
    values = [value for _, value in logprob.top]
    assert values == sorted(values, reverse=True)
    assert len({top_id for top_id, _ in logprob.top}) == n_top
    if logprob.rank <= n_top:
        assert dict(logprob.top)[token_id] == pytest.approx(logprob.logprob, abs=TOLERANCE)
    elif n_top:
        assert logprob.logprob <= values[-1]


@pytest.mark.parametrize("n_top", [0, 1, 5])
@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_each_token_drawn_has_its_log_probability_and_the_best_ones(
    executor: Executor, params: SamplingParams, n_top: int
) -> None:
    draw = draw_of(executor, replace(params, logprobs=n_top))
    assert len(draw.logprobs) == len(draw.token_ids) >= 1
    for token_id, logprob in zip(draw.token_ids, draw.logprobs, strict=True):
        assert_well_formed(logprob, token_id, n_top)


def test_nothing_is_reported_that_was_not_asked_for(executor: Executor) -> None:
    result = run(executor, chunk_of(PROMPT, sample=sample_at(0)))
    assert result.sampled[0].draws[0].logprobs == ()
    assert result.scored == ()


def test_a_greedy_token_is_the_best(executor: Executor) -> None:
    draw = draw_of(executor, replace(GREEDY, logprobs=2))
    assert [each.rank for each in draw.logprobs] == [1] * len(draw.token_ids)
    assert [each.top[0][0] for each in draw.logprobs] == list(draw.token_ids)


def test_log_probabilities_are_the_model_s_own_whatever_adjusts_the_draw(executor: Executor) -> None:
    plain = draw_of(executor, replace(GREEDY, logprobs=4)).logprobs[0]
    best = plain.top[0][0]
    adjusted = draw_of(executor, replace(SEEDED, logprobs=4, temperature=2.0, logit_bias=((best, -100.0),)))
    assert adjusted.token_ids[0] != best
    assert [top_id for top_id, _ in adjusted.logprobs[0].top] == [top_id for top_id, _ in plain.top]
    assert_well_formed(adjusted.logprobs[0], adjusted.token_ids[0], 4)


@pytest.mark.parametrize("sizes", [(N_PROMPT,), (1,) * N_PROMPT, (4, 4, 3), (3, 5, 3), (10, 1)])
def test_scores_do_not_depend_on_chunking(
    make_executor: MakeExecutor, executor: Executor, sizes: tuple[int, ...]
) -> None:
    whole = scores_of(make_executor(CAPACITY), N_PROMPT)
    assert len(whole) == N_PROMPT - 1
    for logprob, token_id in zip(whole, PROMPT[1:], strict=True):
        assert_well_formed(logprob, token_id, 3)
    assert_same(scores_of(executor, *sizes), whole)


def test_scores_do_not_depend_on_block_ids(make_executor: MakeExecutor, executor: Executor) -> None:
    whole = scores_of(make_executor(CAPACITY), N_PROMPT)
    assert_same(scores_of(executor, 4, 7, blocks=OTHER_BLOCKS), whole)


def test_scores_may_begin_at_any_row(make_executor: MakeExecutor, executor: Executor) -> None:
    whole = scores_of(make_executor(CAPACITY), N_PROMPT)
    run(executor, chunk_of(PROMPT[:4]))
    score = Score(first_row=3, target_ids=PROMPT[8:10], n_top=3)
    (scored,) = run(executor, chunk_of(PROMPT, start=4, score=score)).scored
    assert_same(list(scored.logprobs), whole[7:9])


def test_a_score_is_what_a_draw_of_that_token_says(executor: Executor) -> None:
    if isinstance(executor, ScriptedExecutor):
        pytest.skip("its rows within a prompt are not those of its replies")
    draw = draw_of(executor, replace(GREEDY, logprobs=3))
    score = Score(first_row=N_PROMPT - 1, target_ids=draw.token_ids[:1], n_top=3)
    (scored,) = run(executor, chunk_of((*PROMPT, draw.token_ids[0]), score=score)).scored
    assert_same(list(scored.logprobs), [draw.logprobs[0]])


def test_scores_and_draws_come_in_the_plan_s_order_and_only_for_chunks_that_ask(executor: Executor) -> None:
    score = Score(first_row=0, target_ids=PROMPT[1:3], n_top=0)
    result = run(
        executor,
        chunk_of(PROMPT[:3], blocks=(0,), sequence_id=30, sample=sample_at(0), score=score),
        chunk_of(PROMPT[:3], blocks=(1,), sequence_id=20, score=score),
        chunk_of(PROMPT[:4], blocks=(2,), sequence_id=10),
        chunk_of(OTHER_PROMPT[:2], blocks=(4,), sequence_id=5, sample=sample_at(0)),
    )
    assert [each.sequence_id for each in result.sampled] == [30, 5]
    assert [(each.sequence_id, len(each.logprobs)) for each in result.scored] == [(30, 2), (20, 2)]
    assert_same(list(result.scored[0].logprobs), list(result.scored[1].logprobs))


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_nothing_but_allowed_tokens_and_stop_ids_is_drawn(executor: Executor, params: SamplingParams) -> None:
    allowed = replace(params, allowed_token_ids=(5, 40), stop_token_ids=(41,))
    sample = sample_at(0, allowed, seeds=tuple(range(20)))
    assert set(drawn(executor, chunk_of(PROMPT, sample=sample))) <= {5, 40, 41}


def test_a_stop_id_may_be_drawn_though_it_is_not_among_the_allowed(
    make_executor: MakeExecutor, executor: Executor
) -> None:
    best = cold(make_executor, PROMPT)
    other = (best + 1) % 60
    allowed = replace(GREEDY, allowed_token_ids=(other,), stop_token_ids=(best,))
    assert drawn(executor, chunk_of(PROMPT, sample=sample_at(0, allowed))) == (best,)
    held_back = replace(allowed, min_tokens=1)
    assert drawn(executor, chunk_of(PROMPT, sample=sample_at(0, held_back))) == (other,)


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_a_bias_of_100_forces_a_token_and_one_of_minus_100_bans_it(
    make_executor: MakeExecutor, executor: Executor, params: SamplingParams
) -> None:
    best = cold(make_executor, PROMPT)
    seeds = tuple(range(20))
    forced = sample_at(0, replace(params, logit_bias=((45, 100.0),)), seeds)
    assert set(drawn(executor, chunk_of(PROMPT, sample=forced))) == {45}
    banned = sample_at(0, replace(params, logit_bias=((best, -100.0),)), seeds)
    assert best not in drawn(executor, chunk_of(PROMPT, sample=banned))


def test_a_bad_word_is_not_completed_and_nothing_else_is_banned(executor: Executor) -> None:
    last = PROMPT[-1]  # the output so far
    (best,) = drawn(executor, chunk_of(PROMPT, sample=sample_at(1)))
    for word, is_banned in (((best,), True), ((last, best), True), ((last + 1, best), False), ((best, 1), False)):
        params = replace(GREEDY, bad_words_ids=(word,))
        found = drawn(executor, chunk_of(PROMPT, sample=sample_at(1, params, output_ids=(last,))))
        assert (found != (best,)) == is_banned, word


def test_where_no_token_may_follow_the_draw_fails_and_its_neighbour_does_not(
    make_executor: MakeExecutor, executor: Executor
) -> None:
    stuck = replace(GREEDY, allowed_token_ids=(5,), bad_words_ids=((5,),))
    result = run(
        executor,
        chunk_of(OTHER_PROMPT, blocks=OTHER_BLOCKS, sample=sample_at(0, stuck)),
        chunk_of(PROMPT, sequence_id=1, sample=sample_at(0)),
    )
    failed, neighbour = (sampled.draws[0] for sampled in result.sampled)
    assert (failed.token_ids, failed.logprobs, failed.is_complete) == ((), (), False)
    assert failed.failure
    assert neighbour.token_ids[0] == cold(make_executor, PROMPT)


def test_several_tokens_of_a_draw_are_those_that_come_one_by_one(executor: Executor) -> None:
    params = replace(SEEDED, logprobs=2, bad_words_ids=((58, 59),))
    draw = draw_of(executor, params)
    output: tuple[int, ...] = ()
    for token_id, logprob in zip(draw.token_ids, draw.logprobs, strict=True):
        sample = sample_at(len(output), params, output_ids=output)
        one = run(executor, chunk_of((*PROMPT, *output), sample=sample)).sampled[0].draws[0]
        assert one.token_ids[0] == token_id
        assert_same([logprob], [one.logprobs[0]])
        output += (token_id,)


def test_no_token_of_a_draw_is_a_stop_id_before_min_tokens(executor: Executor) -> None:
    free = draw_of(executor, GREEDY).token_ids
    params = replace(GREEDY, stop_token_ids=free, min_tokens=len(free))
    assert not set(draw_of(executor, params).token_ids) & set(free)


def test_each_choice_of_a_fork_draws_what_it_draws_alone(executor: Executor) -> None:
    seeds = (5, 6, 7)
    together = run(executor, chunk_of(PROMPT, sample=sample_at(0, SEEDED, seeds))).sampled[0].draws
    for choice, seed in enumerate(seeds):
        sample = sample_at(0, SEEDED, (seed,), choice=choice)
        (alone,) = run(executor, chunk_of(PROMPT, sample=sample)).sampled[0].draws
        assert alone == together[choice]


def test_a_prompt_without_output_is_scored_and_nothing_drawn(executor: Executor) -> None:
    result = run(executor, chunk_of(PROMPT, score=ALL_BUT_THE_FIRST))
    assert result.sampled == ()
    assert len(result.scored[0].logprobs) == N_PROMPT - 1


def test_plain_parameters_need_no_preparation_and_may_be_prepared_twice(executor: Executor) -> None:
    executor.prepare(GREEDY)
    executor.prepare(SEEDED)
    executor.prepare(SEEDED)
    assert len(drawn(executor, chunk_of(PROMPT, sample=sample_at(0, SEEDED)))) == 1
