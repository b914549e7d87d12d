"""Steps that are planned while another is in flight: what they assume and leave alone, how ends come late."""

from dataclasses import replace

import pytest
from bakehouse_replica.core.executor import Pending
from bakehouse_replica.core.types import Draw, FailureKind, FinishReason, SchedulingPolicy, StepPlan
from driving import Driver, make_driver, make_request, naive_generate


def overlapping(
    *, n_blocks: int = 64, max_step_tokens: int = 64, max_sequences: int = 8, block_size: int = 4
) -> Driver:
    return make_driver(
        n_blocks=n_blocks,
        block_size=block_size,
        max_step_tokens=max_step_tokens,
        max_sequences=max_sequences,
        max_flights=2,
    )


class Steps:
    """A driver's scheduler and executor, one call at a time."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def begin(self) -> tuple[StepPlan, Pending]:
        plan = self.plan()
        assert plan is not None
        return plan, self.driver.executor.begin(plan)

    def plan(self) -> StepPlan | None:
        plan = self.driver.scheduler.plan(self.driver.now)
        self.driver.scheduler.check()
        return plan

    def take(self, pending: Pending) -> list[tuple[tuple[int, ...], FinishReason | None]]:
        deltas = self.driver.scheduler.apply(pending.result(), self.driver.now)
        self.driver.scheduler.check()
        return [(delta.token_ids, delta.finish) for delta in deltas]


def test_a_token_is_planned_before_the_one_that_it_follows_is_known() -> None:
    driver = overlapping()
    steps = Steps(driver)
    asked = make_request("a", range(5), max_tokens=3)
    driver.add(asked)
    first, first_pending = steps.begin()
    second, second_pending = steps.begin()
    assert [chunk.follows_draw for chunk in (*first.chunks, *second.chunks)] == [False, True]
    (chunk,) = second.chunks
    assert (chunk.start, chunk.token_ids) == (5, (0,))
    assert chunk.sample is not None
    assert chunk.sample.output_index == 1
    tokens = naive_generate(asked, 100)[0].token_ids
    assert steps.take(first_pending) == [((tokens[0],), None)]
    third, third_pending = steps.begin()
    assert third.chunks[0].follows_draw
    assert steps.take(second_pending) == [((tokens[1],), None)]
    assert steps.take(third_pending) == [((tokens[2],), FinishReason.LENGTH)]


def test_what_the_step_in_flight_is_known_to_end_is_not_planned_again() -> None:
    driver = overlapping()
    steps = Steps(driver)
    driver.add(make_request("short", range(5), max_tokens=1))
    driver.add(make_request("long", range(9), max_tokens=4))
    _, pending = steps.begin()
    second, _ = steps.begin()
    assert [(chunk.sequence_id, chunk.start) for chunk in second.chunks] == [(1, 9)]
    assert [finish for _, finish in steps.take(pending)] == [FinishReason.LENGTH, None]


def test_where_everything_ends_in_flight_nothing_is_planned_until_it_has() -> None:
    driver = overlapping()
    steps = Steps(driver)
    driver.add(make_request("a", range(5), max_tokens=1))
    _, pending = steps.begin()
    assert steps.plan() is None
    assert driver.scheduler.has_work
    steps.take(pending)
    assert not driver.scheduler.has_work


def test_a_stop_seen_one_step_late_ends_there_and_gives_its_blocks_back_at_once() -> None:
    driver = overlapping()
    steps = Steps(driver)
    (first_token, *_) = naive_generate(make_request("a", range(5)), 100)[0].token_ids
    driver.add(make_request("a", range(5), stop=(first_token,)))
    _, pending = steps.begin()
    _, stray = steps.begin()
    assert steps.take(pending) == [((first_token,), FinishReason.STOP)]
    assert driver.n_held == 0
    assert driver.scheduler.has_work  # a step is in flight, though nobody needs it
    assert steps.plan() is None
    assert steps.take(stray) == []
    assert not driver.scheduler.has_work


def test_the_next_owner_of_a_block_is_unharmed_by_the_stray_write_of_the_last_one() -> None:
    driver = overlapping(n_blocks=3)
    steps = Steps(driver)
    (first_token, *_) = naive_generate(make_request("a", range(10)), 100)[0].token_ids
    driver.add(make_request("a", range(10), max_tokens=2, stop=(first_token,)))
    _, pending = steps.begin()
    _, stray = steps.begin()
    steps.take(pending)
    successor = make_request("b", range(20, 30), max_tokens=2)
    driver.add(successor)
    plan, _ = begun = steps.begin()
    assert len(plan.chunks[0].block_ids) == 3  # the whole pool, while the stray step may not have run yet
    assert steps.take(stray) == []
    tokens = naive_generate(successor, 100)[0].token_ids
    assert steps.take(begun[1]) == [((tokens[0],), None)]


@pytest.mark.parametrize("n_begun", [1, 2])
def test_an_abort_while_steps_are_in_flight_ends_the_request_once_with_what_was_delivered(n_begun: int) -> None:
    driver = overlapping()
    steps = Steps(driver)
    driver.add(make_request("a", range(5)))
    begun = [steps.begin()[1] for _ in range(n_begun)]
    driver.abort("a")
    outcome = driver.outcome("a")
    assert (outcome.finish, outcome.token_ids, driver.n_held) == (FinishReason.CANCELLED, [], 0)
    assert outcome.usage is not None
    assert outcome.usage.completion_tokens == 0
    assert [steps.take(pending) for pending in begun] == [[]] * n_begun
    assert not driver.scheduler.has_work


def test_a_deadline_that_passes_with_steps_in_flight_ends_the_request_at_once_and_what_comes_late_is_ignored() -> (
    None
):
    driver = overlapping()
    steps = Steps(driver)
    driver.add(make_request("a", range(5), timeout_s=5.0))
    driver.add(make_request("b", range(20, 26), max_tokens=3))
    _, first = steps.begin()
    driver.now = 5.0
    ahead, second = steps.begin()
    assert [chunk.sequence_id for chunk in ahead.chunks] == [1]
    (delta,) = driver.scheduler.take_deltas()
    assert delta.failure is not None
    assert (delta.failure.kind, delta.token_ids) == (FailureKind.DEADLINE, ())
    tokens = naive_generate(make_request("b", range(20, 26), max_tokens=3), 100)[0].token_ids
    assert steps.take(first) == [((tokens[0],), None)]
    assert steps.take(second) == [((tokens[1],), None)]


@pytest.mark.parametrize(
    ("end", "finish"),
    [
        (Draw(token_ids=(), is_complete=True), FinishReason.STOP),
        (Draw(token_ids=(), failure="no way on"), FinishReason.ERROR),
        (Draw(token_ids=(9,), is_complete=True), FinishReason.STOP),
        (Draw(token_ids=(9,), failure="no way on"), FinishReason.ERROR),
    ],
)
def test_a_draw_that_ends_its_choice_counts_what_it_brought_and_not_what_is_still_awaited(
    end: Draw, finish: FinishReason
) -> None:
    driver = make_driver(max_flights=3)
    steps = Steps(driver)
    driver.add(make_request("a", range(5)))
    driver.add(make_request("b", range(20, 26), max_tokens=4))
    begun = [steps.begin()[1] for _ in range(3)]
    result = begun[0].result()
    sampled = (replace(result.sampled[0], draws=(end,)), *result.sampled[1:])
    ended, other = driver.scheduler.apply(replace(result, sampled=sampled), driver.now)
    driver.scheduler.check()
    assert (ended.start, ended.token_ids, ended.finish) == (0, end.token_ids, finish)
    assert ended.usage is not None
    assert ended.usage.completion_tokens == len(end.token_ids)
    tokens = naive_generate(make_request("b", range(20, 26), max_tokens=4), 100)[0].token_ids
    assert other.token_ids == (tokens[0],)
    assert [steps.take(pending) for pending in begun[1:]] == [[((token,), None)] for token in tokens[1:3]]


def test_an_id_may_be_used_again_while_steps_of_its_last_owner_are_in_flight() -> None:
    driver = overlapping()
    steps = Steps(driver)
    driver.add(make_request("a", range(5)))
    begun = [steps.begin()[1] for _ in range(2)]
    driver.abort("a")
    driver.scheduler.take_deltas()
    successor = make_request("a", range(20, 26), max_tokens=2)
    driver.scheduler.add(successor, driver.now)
    assert [steps.take(pending) for pending in begun] == [[], []]
    tokens = naive_generate(successor, 100)[0].token_ids
    begun = [steps.begin()[1] for _ in range(2)]
    assert [steps.take(pending) for pending in begun] == [
        [((tokens[0],), None)],
        [((tokens[1],), FinishReason.LENGTH)],
    ]


def test_blocks_that_choices_copy_in_flight_may_go_to_the_next_owner_at_once() -> None:
    driver = overlapping(n_blocks=4)
    steps = Steps(driver)
    driver.add(make_request("a", range(6), n=3, temperature=1.0))
    steps.take(steps.begin()[1])
    copying, pending = steps.begin()
    assert len(copying.copies) == 2
    ahead = steps.begin()[1]
    driver.scheduler.abort("a")
    assert [delta.start for delta in driver.scheduler.take_deltas()] == [1, 1, 1]
    successor = make_request("b", range(20, 35), max_tokens=2)
    driver.add(successor)
    assert steps.take(pending) == []
    plan, last = steps.begin()
    assert len(plan.chunks[0].block_ids) == 4  # the whole pool, source and targets of the copies among them
    assert steps.take(ahead) == []
    tokens = naive_generate(successor, 100)[0].token_ids
    assert steps.take(last) == [((tokens[0],), None)]


def test_a_block_that_gives_way_to_its_twin_is_still_read_by_the_step_in_flight() -> None:
    driver = overlapping(n_blocks=12)
    steps = Steps(driver)
    prefix = range(4)
    driver.add(make_request("a", (*prefix, *range(20, 29))))
    driver.add(make_request("b", (*prefix, *range(30, 39))))  # one block of four in common: it does not wait
    first = steps.begin()
    second = steps.begin()
    assert len({chunk.block_ids[0] for chunk in second[0].chunks}) == 2
    steps.take(first[1])
    driver.add(make_request("c", range(40, 45)))  # may get the block that was given up
    third = steps.begin()
    shared = [chunk.block_ids[0] for chunk in third[0].chunks[:2]]
    given_up = second[0].chunks[1].block_ids[0]
    assert shared == [first[0].chunks[0].block_ids[0]] * 2
    assert given_up in third[0].chunks[2].block_ids
    expected = [
        naive_generate(make_request("x", (*prefix, *range(begin, begin + 9))), 100)[0].token_ids
        for begin in (20, 30)
    ]
    assert [token for (token,), _ in steps.take(second[1])] == [tokens[1] for tokens in expected]
    assert [token for (token,), _ in steps.take(third[1])][:2] == [tokens[2] for tokens in expected]


@pytest.mark.parametrize("needs_host", [{"presence_penalty": 0.5}, {"bad_words": ((5, 6),)}, {"n": 2}])
def test_a_draw_that_the_host_needs_first_is_waited_for(needs_host: dict[str, object]) -> None:
    driver = overlapping()
    steps = Steps(driver)
    driver.add(make_request("a", range(70), **needs_host))  # type: ignore[arg-type]
    driver.add(make_request("b", range(3)))
    prefill, pending = steps.begin()
    assert prefill.chunks[0].sample is None
    _, drawing = steps.begin()  # no draw of `a` is in flight yet
    steps.take(pending)
    assert steps.plan() is None
    steps.take(drawing)
    assert steps.plan() is not None


def test_choices_run_ahead_once_they_are_forked() -> None:
    driver = overlapping()
    driver.add(make_request("a", range(5), n=3, temperature=1.0))
    driver.run()
    expected = naive_generate(make_request("a", range(5), n=3, temperature=1.0), 100)
    assert [driver.outcome("a", choice).token_ids for choice in range(3)] == [each.token_ids for each in expected]
    assert driver.n_ahead >= 5


def test_nobody_is_preempted_while_steps_are_in_flight() -> None:
    driver = overlapping(n_blocks=7, max_sequences=2)
    steps = Steps(driver)
    driver.add(make_request("a", range(9), max_tokens=8))
    driver.add(make_request("b", range(20, 29), max_tokens=8))
    begun = [steps.begin()[1]]
    while (plan := steps.plan()) is not None:  # until both need a fourth block
        begun.append(driver.executor.begin(plan))
        steps.take(begun.pop(0))
    assert driver.scheduler.load().n_running == 2
    steps.take(begun.pop())
    assert steps.plan() is not None
    assert (driver.scheduler.load().n_running, driver.scheduler.load().n_waiting) == (1, 1)


def test_a_more_urgent_request_preempts_after_the_step_in_flight() -> None:
    driver = overlapping(max_sequences=1)
    steps = Steps(driver)
    driver.add(make_request("a", range(5)))
    _, pending = steps.begin()
    driver.add(make_request("urgent", range(20, 29), priority=-1))
    assert steps.plan() is None
    steps.take(pending)
    plan, _ = steps.begin()
    assert [len(chunk.token_ids) for chunk in plan.chunks] == [9]


def test_a_sequence_without_room_ends_only_after_its_last_token() -> None:
    driver = overlapping(n_blocks=2)
    asked = make_request("a", range(5), max_tokens=None)
    driver.add(asked)
    driver.run()
    outcome = driver.outcome("a")
    assert outcome.finish is FinishReason.ERROR
    assert outcome.token_ids == naive_generate(make_request("a", range(5), max_tokens=4), 100)[0].token_ids


def test_a_newcomer_waits_for_the_prefix_that_a_step_in_flight_computes() -> None:
    driver = overlapping()
    steps = Steps(driver)
    prefix = range(16)
    driver.add(make_request("a", (*prefix, 40)))
    _, pending = steps.begin()
    driver.add(make_request("b", (*prefix, 41)))
    ahead, _ = steps.begin()
    assert len(ahead.chunks) == 1
    steps.take(pending)
    after, _ = steps.begin()
    assert [chunk.start for chunk in after.chunks] == [18, 16]


def test_prompt_scores_in_flight_are_not_asked_for_again() -> None:
    driver = overlapping(max_step_tokens=4)
    asked = make_request("a", range(14), max_tokens=3, prompt_logprobs=1)
    driver.add(asked)
    driver.add(make_request("b", range(20, 31), max_tokens=0, prompt_logprobs=0))
    driver.run()
    assert driver.outcome("a").prompt_logprobs == naive_generate(asked, 100)[0].prompt_logprobs
    assert len(driver.outcome("b").prompt_logprobs) == 10
    assert all(positions == list(range(1, len(positions) + 1)) for positions in driver.scored_positions().values())
    assert driver.n_ahead > 3


def test_no_more_steps_may_be_in_flight_than_the_executor_allows() -> None:
    driver = overlapping()
    steps = Steps(driver)
    driver.add(make_request("a", range(5)))
    steps.begin()
    steps.begin()
    with pytest.raises(AssertionError, match="step 0 is in flight, 2 in all; apply its result first"):
        driver.scheduler.plan(0.0)
    driver.scheduler.check()


def test_results_are_applied_in_the_order_of_the_plans() -> None:
    driver = overlapping()
    steps = Steps(driver)
    driver.add(make_request("a", range(5)))
    _, first = steps.begin()
    _, second = steps.begin()
    result, later = first.result(), second.result()
    with pytest.raises(AssertionError, match=r"step 0 wants .* the result of step 1"):
        driver.scheduler.apply(later, 0.0)
    driver.scheduler.check()
    driver.scheduler.apply(result, 0.0)
    driver.scheduler.apply(later, 0.0)


def test_the_time_of_a_step_begins_with_the_end_of_the_one_before() -> None:
    driver = make_driver(max_flights=2, policy=SchedulingPolicy(max_model_len=100))
    steps = Steps(driver)
    driver.add(make_request("a", range(5)))
    _, first = steps.begin()
    _, second = steps.begin()
    for pending, driver.now in ((first, 1.0), (second, 2.0)):
        steps.take(pending)
    assert driver.scheduler.load().step_time_s == 1.0
