"""Draws of several tokens, draws that complete or fail their choice, and what a sampler is told."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from bakehouse_replica.core.types import (
    Draw,
    FailureKind,
    FinishReason,
    StepResult,
    TokenLogprob,
)
from driving import POLICY, Driver, make_driver, make_fake_drawing, make_request, naive_generate

LOGPROB = TokenLogprob(logprob=-1.0, rank=1)


def drawing(*draws: Draw) -> Callable[[StepResult], StepResult]:
    """Puts these draws in the place of those of the step's only sampled sequence."""

    def tamper(result: StepResult) -> StepResult:
        return replace(result, sampled=(replace(result.sampled[0], draws=draws),))

    return tamper


def whole(*token_ids: int) -> Draw:
    return Draw(token_ids=token_ids)


@pytest.mark.parametrize(
    ("draw", "kept", "finish"),
    [
        pytest.param(whole(1, 2, 3), (1, 2, 3), None, id="all of it"),
        pytest.param(whole(1, 9, 3, 4), (1, 9), FinishReason.STOP, id="behind a stop id"),
        pytest.param(whole(1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 4, 5), FinishReason.LENGTH, id="behind the limit"),
        pytest.param(whole(1, 2, 3, 4, 9, 6), (1, 2, 3, 4, 9), FinishReason.STOP, id="a stop id at the limit"),
        pytest.param(Draw(token_ids=(1, 2), is_complete=True), (1, 2), FinishReason.STOP, id="complete"),
        pytest.param(Draw(token_ids=(), is_complete=True), (), FinishReason.STOP, id="complete as it stands"),
        pytest.param(
            Draw(token_ids=(1, 2, 3, 4, 5), is_complete=True),
            (1, 2, 3, 4, 5),
            FinishReason.STOP,
            id="complete at the limit",
        ),
        pytest.param(
            Draw(token_ids=(1, 2, 3, 4, 5, 6), is_complete=True),
            (1, 2, 3, 4, 5),
            FinishReason.LENGTH,
            id="complete behind the limit",
        ),
        pytest.param(Draw(token_ids=(1, 2), failure="broken"), (1, 2), FinishReason.ERROR, id="failed"),
        pytest.param(Draw(token_ids=(), failure="broken"), (), FinishReason.ERROR, id="failed at once"),
        pytest.param(
            Draw(token_ids=(1, 9), failure="broken"), (1, 9), FinishReason.STOP, id="failed behind its end"
        ),
    ],
)
def test_c04_a_draw_is_cut_behind_the_token_that_ends_the_choice(
    draw: Draw, kept: tuple[int, ...], finish: FinishReason | None
) -> None:
    driver = make_driver()
    driver.add(make_request("a", range(5), max_tokens=5, stop=(9,), logprobs=0))
    logprobs = tuple(TokenLogprob(logprob=-float(id_), rank=1) for id_ in draw.token_ids)
    driver.step(tamper=drawing(replace(draw, logprobs=logprobs)))
    outcome = driver.outcome("a")
    assert (tuple(outcome.token_ids), outcome.finish) == (kept, finish)
    assert tuple(outcome.logprobs) == logprobs[: len(kept)]
    assert outcome.usage is not None
    assert outcome.usage.completion_tokens == len(kept)
    assert driver.scheduler.has_work == (finish is None)
    assert (driver.n_held == 0) == (finish is not None)


def test_a_choice_that_fails_ends_alone() -> None:
    driver = make_driver()
    request = make_request("a", range(17), n=3, temperature=1.0)
    neighbour = make_request("b", range(20, 30))
    driver.add(request)
    driver.step(tamper=drawing(*(whole(each.token_ids[0]) for each in naive_generate(request, 100))))
    driver.add(neighbour)

    def break_second(result: StepResult) -> StepResult:
        broken = replace(result.sampled[1], draws=(Draw(token_ids=(), failure="broken"),))
        return replace(result, sampled=(result.sampled[0], broken, *result.sampled[2:]))

    driver.step(tamper=break_second)
    driver.run()
    failed = driver.outcome("a", 1)
    assert (failed.finish, len(failed.token_ids)) == (FinishReason.ERROR, 1)
    assert failed.failure is not None
    assert (failed.failure.kind, failed.failure.message) == (FailureKind.DRAW, "broken")
    expected = naive_generate(request, 100)
    for choice in (0, 2):
        assert driver.outcome("a", choice).token_ids == expected[choice].token_ids
    assert driver.outcome("b").token_ids == naive_generate(neighbour, 100)[0].token_ids


def test_choices_may_end_with_the_draw_that_makes_them() -> None:
    driver = make_driver()
    driver.add(make_request("a", range(5), n=3, temperature=1.0))
    driver.step(
        tamper=drawing(Draw(token_ids=(1,), is_complete=True), Draw(token_ids=(), failure="broken"), whole(2, 3))
    )
    assert [driver.outcome("a", choice).finish for choice in range(3)] == [
        FinishReason.STOP,
        FinishReason.ERROR,
        None,
    ]
    driver.run()
    assert driver.outcome("a", 2).finish is FinishReason.LENGTH


@pytest.mark.parametrize("tokens_per_step", [2, 3, 7])
def test_the_tokens_of_a_draw_are_computed_together_in_the_next_step(tokens_per_step: int) -> None:
    driver = make_driver(make_executor=make_fake_drawing(tokens_per_step))
    request = make_request("a", range(5), max_tokens=22)
    driver.add(request)
    driver.run()
    sizes = [len(plan.chunks[0].token_ids) for plan in driver.plans]
    assert sizes == [5, *[tokens_per_step] * (len(sizes) - 1)]
    assert len(sizes) == -(-22 // tokens_per_step)
    assert driver.outcome("a").token_ids == naive_generate(request, 100)[0].token_ids


def test_tokens_drawn_ahead_are_decoding_and_not_a_prefill() -> None:
    driver = make_driver(
        policy=replace(POLICY, max_prefill_tokens=4, long_prefill_tokens=2), make_executor=make_fake_drawing(3)
    )
    for index in range(4):
        driver.add(make_request(f"r{index}", [index], max_tokens=30))
    driver.step()
    driver.step()
    plan = driver.step()
    assert plan is not None
    assert [len(chunk.token_ids) for chunk in plan.chunks] == [3] * 4, "max_prefill_tokens does not bind them"
    assert driver.scheduler.load().waiting_tokens == 0


def test_no_sequence_starves_where_draws_are_larger_than_a_step() -> None:
    driver = make_driver(max_step_tokens=4, max_sequences=4, make_executor=make_fake_drawing(8))
    for index in range(4):
        driver.add(make_request(f"r{index}", range(index, index + 3), max_tokens=40))
    longest_wait = [0] * 4
    waits = [0] * 4
    while driver.scheduler.has_work:
        plan = driver.step()
        assert plan is not None
        served = {chunk.sequence_id for chunk in plan.chunks}
        running = driver.scheduler.load().n_running
        for index in range(4):
            waits[index] = 0 if index in served or running < 4 else waits[index] + 1
            longest_wait[index] = max(longest_wait[index], waits[index])
    assert max(longest_wait) == 0, "everybody who runs computes a token in each step"


def test_c41_preemption_at_any_step_changes_no_id_of_draws_of_several_tokens() -> None:
    victim = make_request(
        "victim", range(20), max_tokens=30, temperature=1.0, presence_penalty=1.0, n=2, logprobs=1
    )
    expected = naive_generate(victim, 100)
    for step in range(14):
        driver = make_driver(max_sequences=2, max_step_tokens=8, make_executor=make_fake_drawing(3))
        driver.add(victim)
        for _ in range(step):
            driver.step()
        driver.add(make_request("urgent", [1, 2, 3], n=2, max_tokens=2, priority=-1))
        driver.run()
        for choice in range(2):
            outcome = driver.outcome("victim", choice)
            assert (outcome.token_ids, outcome.logprobs) == (
                expected[choice].token_ids,
                expected[choice].logprobs,
            )


def test_the_sampler_learns_choice_and_output_where_parameters_need_them() -> None:
    driver = make_driver()
    driver.add(make_request("plain", range(5), n=2, temperature=1.0))
    driver.add(make_request("bad words", range(5, 9), bad_words=((1, 2),)))
    driver.step()
    plan = driver.step()
    assert plan is not None
    samples = [chunk.sample for chunk in plan.chunks if chunk.sample is not None]
    assert [(sample.choice, len(sample.output_ids), sample.prompt_ids) for sample in samples] == [
        (0, 0, ()),
        (1, 0, ()),
        (0, 1, ()),
    ]


def test_a_fork_begins_with_choice_0_and_children_keep_their_own() -> None:
    driver = make_driver(n_blocks=12, block_size=4, max_sequences=4)
    driver.add(make_request("a", range(9), n=4, temperature=1.0, max_tokens=30))
    driver.add(make_request("urgent", range(20, 40), priority=-1, max_tokens=20))
    driver.run()
    choices: dict[int, set[int]] = {}
    for plan in driver.plans:
        for chunk in plan.chunks:
            if chunk.sample is not None:
                choices.setdefault(chunk.sequence_id, set()).add(chunk.sample.choice)
    assert all(len(seen) == 1 for seen in choices.values()), "a sequence's choice never changes"
    assert sorted(choice for seen in choices.values() for choice in seen) == [0, 0, 1, 2, 3]


@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(Draw(token_ids=()), id="nothing, without a cause"),
        pytest.param(Draw(token_ids=(1, 2), logprobs=(LOGPROB,)), id="a log-probability too few"),
        pytest.param(Draw(token_ids=(1,)), id="no log-probability"),
        pytest.param(Draw(token_ids=(), logprobs=(LOGPROB,), is_complete=True), id="one too many"),
    ],
)
def test_a_draw_that_is_not_whole_is_our_bug_and_changes_nothing(draw: Draw) -> None:
    driver = make_driver()
    driver.add(make_request("a", range(5), logprobs=0))

    def refuse(result: StepResult) -> StepResult:
        before = driver.scheduler.load()
        wrong = replace(result, sampled=(replace(result.sampled[0], draws=(draw,)),))
        with pytest.raises(AssertionError, match="is not whole"):
            driver.scheduler.apply(wrong, driver.now)
        assert driver.scheduler.load() == before
        return result

    driver.step(tamper=refuse)
    driver.run()
    assert len(driver.outcome("a").token_ids) == 8


def test_log_probabilities_that_nobody_asked_for_are_our_bug() -> None:
    driver = make_driver()
    driver.add(make_request("a", range(5)))
    with pytest.raises(AssertionError, match="is not whole"):
        driver.step(tamper=drawing(Draw(token_ids=(1,), logprobs=(LOGPROB,))))


def test_c18_choices_of_different_lengths_end_once_each_and_the_same_again() -> None:
    request = make_request("a", range(5), n=3, temperature=1.0, seed=6, max_tokens=30, stop=(3, 11, 19))

    def run() -> Driver:
        driver = make_driver(make_executor=make_fake_drawing(2))
        driver.add(request)
        driver.run()
        return driver

    first, second = run(), run()
    lengths = [len(first.outcome("a", choice).token_ids) for choice in range(3)]
    assert len(set(lengths)) == 3, "the seed is chosen so"
    assert all(first.outcome("a", choice).finish is FinishReason.STOP for choice in range(3))
    assert first.outcomes == second.outcomes
