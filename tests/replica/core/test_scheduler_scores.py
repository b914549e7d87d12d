"""Log-probabilities of the prompt, requests without output, and what usage says of both."""

from dataclasses import replace

import pytest
from bakehouse_replica.core.errors import ContextTooLong, InvalidRequest
from bakehouse_replica.core.executor import execute
from bakehouse_replica.core.types import FinishReason, StepPlan, StepResult, TokenDelta
from driving import POLICY, make_driver, make_fake_drawing, make_request, naive_generate


def asked_of(plan: StepPlan | None) -> list[tuple[int, int, tuple[int, ...]]]:
    """Of each chunk that is scored: where it starts, its first row, the tokens to score."""
    assert plan is not None
    return [
        (chunk.start, chunk.score.first_row, chunk.score.target_ids)
        for chunk in plan.chunks
        if chunk.score is not None
    ]


def test_each_row_of_a_prompt_but_the_last_scores_the_token_behind_it() -> None:
    driver = make_driver(max_step_tokens=4)
    driver.add(make_request("a", range(10, 20), prompt_logprobs=2))
    assert [asked_of(driver.step()) for _ in range(4)] == [
        [(0, 0, (11, 12, 13, 14))],
        [(4, 0, (15, 16, 17, 18))],
        [(8, 0, (19,))],
        [],
    ]
    assert driver.plans[2].chunks[0].sample is not None
    expected = naive_generate(make_request("a", range(10, 20), prompt_logprobs=2), 100)[0]
    assert driver.outcome("a").prompt_logprobs == expected.prompt_logprobs
    assert len(expected.prompt_logprobs) == 9
    driver.run()
    assert driver.outcome("a").token_ids == expected.token_ids


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    driver = make_driver()
    driver.add(make_request("a", [5], prompt_logprobs=2))
    driver.add(make_request("b", [6], prompt_logprobs=2, max_tokens=0))
    assert driver.outcome("b").finish is FinishReason.LENGTH
    assert asked_of(driver.step()) == []
    driver.run()
    assert driver.outcome("a").prompt_logprobs == ()


@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_scores_come_once_with_the_first_delta_of_choice_0(tokens_per_step: int) -> None:
    driver = make_driver(max_step_tokens=8, make_executor=make_fake_drawing(tokens_per_step))
    deltas: list[TokenDelta] = []

    driver.add(make_request("a", range(20), n=3, temperature=1.0, prompt_logprobs=1))
    while driver.scheduler.has_work:
        plan = driver.scheduler.plan(0.0)
        assert plan is not None
        deltas += driver.scheduler.apply(execute(driver.executor, plan), 0.0)
    carriers = [(delta.choice, delta.start) for delta in deltas if delta.prompt_logprobs]
    assert carriers == [(0, 0)]
    assert len(deltas[0].prompt_logprobs) == 19


def test_c15_the_same_prompt_with_other_counts_gets_its_own_scores_and_no_cached_ones() -> None:
    driver = make_driver()
    driver.add(make_request("warm", range(40)))
    driver.run()
    for n_top in (3, 1, 0):
        request = make_request(f"top {n_top}", range(40), prompt_logprobs=n_top)
        driver.add(request)
        driver.run()
        outcome = driver.outcome(request.request_id)
        assert [len(each.top) for each in outcome.prompt_logprobs] == [n_top] * 39
        assert outcome.prompt_logprobs == naive_generate(request, 100)[0].prompt_logprobs
        assert outcome.usage is not None
        assert outcome.usage.cached_tokens == 0
    driver.add(make_request("after", range(40)))
    driver.run()
    usage = driver.outcome("after").usage
    assert usage is not None
    assert usage.cached_tokens == 32


def test_a_scored_prompt_s_blocks_serve_others() -> None:
    driver = make_driver()
    driver.add(make_request("scored", range(40), prompt_logprobs=0))
    driver.run()
    driver.add(make_request("next", range(40)))
    driver.run()
    usage = driver.outcome("next").usage
    assert usage is not None
    assert usage.cached_tokens == 32


@pytest.mark.parametrize("max_tokens", [0, 6])
@pytest.mark.parametrize("n", [1, 2])
def test_preemption_at_any_step_neither_loses_nor_doubles_a_score(n: int, max_tokens: int) -> None:
    victim = make_request(
        "victim", range(30), prompt_logprobs=2, logprobs=1, n=n, temperature=1.0, max_tokens=max_tokens
    )
    expected = naive_generate(victim, 100)
    for step in range(10):
        driver = make_driver(block_size=4, max_sequences=2, max_step_tokens=8)
        driver.add(victim)
        for _ in range(step):
            driver.step()
        driver.add(make_request("urgent", [1, 2, 3], n=2, max_tokens=2, priority=-1))
        driver.run()
        for choice in range(n):
            outcome = driver.outcome("victim", choice)
            assert outcome.token_ids == expected[choice].token_ids
            assert outcome.logprobs == expected[choice].logprobs
            assert outcome.prompt_logprobs == expected[choice].prompt_logprobs
        assert driver.scored_positions()[0] == list(range(1, 30)), f"preempted after step {step}"


def test_a_preempted_prefill_starts_again_behind_the_blocks_whose_scores_it_has() -> None:
    driver = make_driver(block_size=4, max_sequences=1, max_step_tokens=10)
    driver.add(make_request("victim", range(30), prompt_logprobs=0))
    driver.step()
    driver.add(make_request("urgent", [1, 2, 3], max_tokens=1, priority=-1))
    driver.step()
    plan = driver.step()
    assert asked_of(plan) == [(8, 2, tuple(range(11, 19)))], "ten are scored; two full blocks are taken from cache"
    driver.run()
    usage = driver.outcome("victim").usage
    assert usage is not None
    assert usage.cached_tokens == 0


def test_an_abort_between_the_chunks_of_a_scored_prompt_delivers_no_half_of_it() -> None:
    driver = make_driver(max_step_tokens=8)
    driver.add(make_request("a", range(20), n=2, temperature=1.0, prompt_logprobs=0))
    driver.step()
    driver.abort("a")
    for choice in range(2):
        assert driver.outcome("a", choice).finish is FinishReason.CANCELLED
        assert driver.outcome("a", choice).prompt_logprobs == ()
    assert driver.n_held == 0


def test_neighbours_keep_their_own_scores_and_draws_where_one_is_aborted_while_its_step_runs() -> None:
    driver = make_driver()
    requests = [make_request(f"r{k}", range(k, 6 + 2 * k), prompt_logprobs=1, logprobs=0) for k in range(3)]
    for request in requests:
        driver.add(request)
    driver.step(during=lambda: driver.abort("r1"))
    driver.run()
    assert driver.outcome("r1").finish is FinishReason.CANCELLED
    for request in (requests[0], requests[2]):
        assert replace(driver.outcome(request.request_id), usage=None) == naive_generate(request, 100)[0]


def test_a_resumed_request_may_ask_for_scores_again() -> None:
    request = make_request("a", range(20), prompt_logprobs=1, max_tokens=6)
    expected = naive_generate(request, 100)[0]
    for n_prior in range(7):
        driver = make_driver(max_step_tokens=8)
        driver.add(replace(request, prior_output=tuple(expected.token_ids[:n_prior])))
        driver.run()
        outcome = driver.outcome("a")
        assert (outcome.token_ids, outcome.finish) == (expected.token_ids, FinishReason.LENGTH)
        assert outcome.prompt_logprobs == expected.prompt_logprobs


@pytest.mark.parametrize("max_flights", [1, 2])
@pytest.mark.parametrize("stop", [False, True])
def test_output_that_came_complete_takes_no_room_beside_the_prompt_whose_scores_are_wanted(
    max_flights: int, stop: bool
) -> None:
    """The last token of an output is never computed; where it would need a block more, there may be none."""
    request = make_request("a", range(3), prompt_logprobs=1, max_tokens=10)
    output = tuple(naive_generate(request, 100)[0].token_ids)
    request = replace(
        request, params=replace(request.params, stop_token_ids=output[-1:] if stop else ()), prior_output=output
    )
    expected = naive_generate(request, 100)[0]
    driver = make_driver(n_blocks=6, block_size=2, max_step_tokens=2, max_flights=max_flights)
    driver.add(request)
    driver.run()
    assert replace(driver.outcome("a"), usage=None) == expected
    assert [chunk.token_ids for plan in driver.plans for chunk in plan.chunks] == [(0, 1)]


def test_c25_without_output_and_scores_a_request_ends_without_a_step() -> None:
    driver = make_driver()
    driver.add(make_request("a", range(3), n=2, max_tokens=0))
    assert not driver.scheduler.has_work
    for choice in range(2):
        outcome = driver.outcome("a", choice)
        assert (outcome.finish, outcome.token_ids) == (FinishReason.LENGTH, [])
        assert outcome.usage is not None
        assert (outcome.usage.prompt_tokens, outcome.usage.completion_tokens) == (3, 0)


@pytest.mark.parametrize("n", [1, 3])
def test_c25_without_output_a_scored_prompt_is_computed_and_nothing_drawn(n: int) -> None:
    driver = make_driver(max_step_tokens=8)
    request = make_request("a", range(20), n=n, temperature=1.0, max_tokens=0, prompt_logprobs=1)
    driver.add(request)
    driver.run()
    assert not any(chunk.sample for plan in driver.plans for chunk in plan.chunks)
    for choice, expected in enumerate(naive_generate(request, 100)):
        outcome = driver.outcome("a", choice)
        assert (outcome.finish, outcome.token_ids) == (FinishReason.LENGTH, [])
        assert outcome.prompt_logprobs == expected.prompt_logprobs
        assert outcome.usage is not None
        assert (outcome.usage.prompt_tokens, outcome.usage.completion_tokens) == (20, 0)


def test_c24_prompt_and_output_may_fill_the_context_and_not_one_token_more() -> None:
    driver = make_driver(n_blocks=5, policy=replace(POLICY, max_model_len=64))
    driver.add(make_request("fits", range(63), max_tokens=1))
    driver.add(make_request("scored", range(64), max_tokens=0, prompt_logprobs=0))
    driver.add(make_request("rest", range(60), max_tokens=None))
    driver.run()
    assert len(driver.outcome("fits").token_ids) == 1
    assert len(driver.outcome("scored").prompt_logprobs) == 63
    assert (len(driver.outcome("rest").token_ids), driver.outcome("rest").finish) == (4, FinishReason.LENGTH)
    with pytest.raises(ContextTooLong, match=r"prompt \(64 tokens\) plus max_tokens \(1\) is 65; the limit is 64"):
        driver.add(make_request("a", range(64), max_tokens=1))
    with pytest.raises(ContextTooLong, match=r"prompt \(65 tokens\) plus max_tokens \(0\) is 65; the limit is 64"):
        driver.add(make_request("a", range(65), max_tokens=0))
    with pytest.raises(InvalidRequest, match="prompt has 64 tokens"):
        driver.add(make_request("a", range(64), max_tokens=None))


def test_c16_usage_counts_the_prompt_once_and_each_choice_its_own_tokens() -> None:
    request = make_request("a", range(5), n=2, temperature=1.0, seed=6, max_tokens=60, stop=(3, 11, 19))
    driver = make_driver(make_executor=make_fake_drawing(4))
    driver.add(request)
    driver.run()
    usages = [driver.outcome("a", choice).usage for choice in range(2)]
    lengths = [len(each.token_ids) for each in naive_generate(request, 100)]
    assert lengths[0] != lengths[1], "the seed is chosen so"
    assert [usage.completion_tokens for usage in usages if usage] == lengths
    assert [usage.prompt_tokens for usage in usages if usage] == [5, 5]


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_c17_the_first_usage_counts_the_whole_prompt_though_it_came_in_chunks(prompt_logprobs: int | None) -> None:
    driver = make_driver(n_blocks=100, max_step_tokens=128, policy=replace(POLICY, max_model_len=1001))
    driver.add(make_request("a", [1] * 1000, max_tokens=1, prompt_logprobs=prompt_logprobs))
    for _ in range(7):
        driver.step()
        assert driver.outcome("a").usage is None
    driver.run()
    usage = driver.outcome("a").usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (1000, 1)


def test_scores_that_do_not_match_the_plan_are_our_bug_and_change_nothing() -> None:
    driver = make_driver(max_step_tokens=8)
    driver.add(make_request("a", range(20), prompt_logprobs=0))

    def refuse(result: StepResult) -> StepResult:
        before = driver.scheduler.load()
        (right,) = result.scored
        for scored in (
            (),
            (right, right),
            (replace(right, logprobs=right.logprobs[1:]),),
            (replace(right, sequence_id=5),),
        ):
            with pytest.raises(AssertionError, match="wants scores"):
                driver.scheduler.apply(replace(result, scored=scored), driver.now)
        assert driver.scheduler.load() == before
        return result

    driver.step(tamper=refuse)
    driver.run()
    assert len(driver.outcome("a").prompt_logprobs) == 19
