"""Stories: who waits has one reason in each plan, the right one, and the sums are the time for which it waited."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from bakehouse_replica.core.ends import REMEMBERED_STORIES
from bakehouse_replica.core.story import (
    FIRST_ENTRIES,
    LAST_ENTRIES,
    Admitted,
    Entry,
    Preempted,
    PreemptionRule,
    Story,
    StoryLog,
    Waited,
    WaitReason,
)
from bakehouse_replica.core.types import Capacity, FinishReason, SchedulingPolicy
from driving import POLICY, make_driver, make_request
from eventful import make_eventful
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from watching import WatchedDriver
from workloads import CAPACITIES, MAX_MODEL_LEN, POLICIES, WORKLOADS, Visit, run_workload


def waits(story: Story) -> list[Waited]:
    return [entry for entry in story.entries if isinstance(entry, Waited)]


def told(story: Story) -> list[tuple[WaitReason, bool, int, float]]:
    """Its waits: reason, whether it was another's, plans, seconds."""
    return [(wait.reason, wait.is_behind, wait.n_plans, wait.seconds) for wait in waits(story)]


def assert_stories_are_true(driver: WatchedDriver) -> None:
    """What each story says is what was seen from outside."""
    for request_id, story in driver.stories.items():
        choices = sorted(name for name in {*driver.waited_s, *driver.n_plans} if name[0] == request_id)
        waited_s = sum(driver.waited_s[name] for name in choices)
        assert sum(total.seconds for total in story.waited) == pytest.approx(waited_s)
        assert sum(total.n_plans for total in story.waited) == sum(driver.n_plans[name] for name in choices)
        assert story.n_preemptions == driver.n_preempted[request_id]
        assert len({(total.reason, total.is_behind) for total in story.waited}) == len(story.waited)
        assert len(story.entries) <= FIRST_ENTRIES + LAST_ENTRIES
        if not story.n_left_out:
            assert_whole_story_is_true(driver, request_id, story, choices)


def assert_whole_story_is_true(
    driver: WatchedDriver, request_id: str, story: Story, choices: list[tuple[str, int]]
) -> None:
    for name in choices:
        own = [wait for wait in waits(story) if wait.choice == name[1]]
        assert sum(wait.seconds for wait in own) == pytest.approx(driver.waited_s[name])
        assert sum(wait.n_plans for wait in own) == driver.n_plans[name]
    usage = driver.outcome(request_id).usage
    first = next((k for k, entry in enumerate(story.entries) if isinstance(entry, Admitted)), None)
    if first is not None and usage is not None:
        queue_s = sum(entry.seconds for entry in story.entries[:first] if isinstance(entry, Waited))
        assert queue_s == pytest.approx(usage.queue_s)
        assert story.entries[first].at_s == pytest.approx(usage.queue_s)
    assert sum(isinstance(entry, Preempted) for entry in story.entries) == story.n_preemptions


@pytest.mark.parametrize("tokens_per_step", [1, 3])
@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(CAPACITIES, POLICIES, WORKLOADS, st.integers(1, 3))
def test_in_each_plan_who_waits_has_one_reason_and_the_sums_are_the_time_it_waited(
    tokens_per_step: int,
    capacity: Capacity,
    policy: SchedulingPolicy,
    workload: tuple[Visit, ...],
    max_flights: int,
) -> None:
    flights = 1 if tokens_per_step > 1 else max_flights
    driver = WatchedDriver(
        replace(capacity, max_flights=flights), policy, make_executor=make_eventful(tokens_per_step)
    )
    refused = run_workload(driver, workload)
    known = {visit.request.request_id for visit in workload} - refused
    assert known == set(driver.stories), "each request that was taken has its story"
    assert_stories_are_true(driver)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(CAPACITIES, POLICIES, WORKLOADS, st.integers(1, 2))
def test_a_story_that_is_read_while_it_goes_on_is_true_and_changes_nothing(
    capacity: Capacity, policy: SchedulingPolicy, workload: tuple[Visit, ...], max_flights: int
) -> None:
    class Curious(WatchedDriver):
        def _after_event(self) -> None:
            super()._after_event()
            for request_id, call in self.scheduler._roster.calls.items():
                story = self.scheduler.explain(request_id, self._clock)
                assert story is not None
                names = [(request_id, choice) for choice in range(call.request.params.n)]
                assert story.ended_at_s is None
                assert sum(total.n_plans for total in story.waited) == sum(self.n_plans[one] for one in names)
                waited_s = sum(self.waited_s[one] for one in names)
                assert sum(total.seconds for total in story.waited) == pytest.approx(waited_s)

    wide = replace(capacity, max_flights=max_flights)
    asked, left_alone = Curious(wide, policy), WatchedDriver(wide, policy)
    assert run_workload(asked, workload) == run_workload(left_alone, workload)
    assert asked.plans == left_alone.plans
    for request_id, story in left_alone.stories.items():
        assert asked.stories[request_id].entries == story.entries


def test_under_pressure_every_reason_and_both_rules_come_up() -> None:
    reasons, rules = Counter[WaitReason](), Counter[PreemptionRule]()
    for seed in range(40):
        random = Random(seed)
        capacity = Capacity(
            n_blocks=random.randint(8, 14),
            block_size=2,
            max_step_tokens=9,
            max_sequences=5,
            max_flights=1 + seed % 2,
        )
        policy = SchedulingPolicy(max_model_len=MAX_MODEL_LEN, max_prefill_tokens=6, long_prefill_tokens=4)
        driver = WatchedDriver(capacity, policy)
        for index in range(12):
            prompt = (*range(30, 30 + random.randint(0, 9)), index % 3)
            n, priority = random.choice((1, 1, 3)), random.choice((0, 0, -1))
            driver.add(make_request(f"r{index}", prompt, n=n, priority=priority, max_tokens=random.randint(1, 7)))
            for _ in range(random.randint(0, 2)):
                driver.step()
        driver.run()
        assert_stories_are_true(driver)
        for story in driver.stories.values():
            reasons += Counter(total.reason for total in story.waited)
            rules += Counter(entry.rule for entry in story.entries if isinstance(entry, Preempted))
    assert set(reasons) == set(WaitReason) - {WaitReason.NEXT_PLAN}, "requests come at the moments of plans here"
    assert set(rules) == set(PreemptionRule)


# --- One case for each reason ------------------------------------------------------------------------------------


def watched(policy: SchedulingPolicy = POLICY, **capacity: int) -> WatchedDriver:
    """A driver with room for whatever a test does not want to be scarce."""
    given_ = {"n_blocks": 64, "block_size": 4, "max_step_tokens": 64, "max_sequences": 8, **capacity}
    return WatchedDriver(Capacity(**given_), policy)


def story_of(driver: WatchedDriver, request_id: str) -> Story:
    driver.run()
    assert_stories_are_true(driver)
    return driver.stories[request_id]


def test_next_plan_is_the_time_from_its_arrival_while_a_step_runs() -> None:
    driver = watched()
    driver.add(make_request("first", range(4)))
    driver.step(during=lambda: driver.scheduler.add(make_request("late", range(9, 13)), driver.now - 0.25))
    driver._requests["late"] = make_request("late", range(9, 13))
    assert told(story_of(driver, "late")) == [(WaitReason.NEXT_PLAN, False, 0, 0.25)]


def test_who_is_admitted_at_once_has_nothing_but_its_admission() -> None:
    driver = watched()
    driver.add(make_request("only", range(6), max_tokens=1))
    story = story_of(driver, "only")
    assert story.entries == (Admitted(choice=0, at_s=0.0, step=0, n_cached_tokens=0, n_blocks=2),)
    assert (story.waited, story.n_preemptions, story.n_chunks, story.n_copies) == ((), 0, 1, 0)
    assert story.ended_at_s == 1.0


def test_no_slot_and_who_is_behind_one_without() -> None:
    driver = watched(max_sequences=2)
    driver.add(make_request("runs", range(3), max_tokens=4))
    driver.add(make_request("pair", range(10, 13), n=2, max_tokens=1))
    driver.add(make_request("single", range(20, 23), max_tokens=1))
    driver.run()
    assert told(driver.stories["pair"]) == [(WaitReason.NO_SLOT, False, 4, 4.0)]
    # While the pair waits for two slots, the one that is free is not given to who stands behind it.
    assert told(story_of(driver, "single")) == [
        (WaitReason.NO_SLOT, True, 4, 4.0),
        (WaitReason.NO_SLOT, False, 1, 1.0),
    ]


def test_no_tokens_are_left_in_the_step() -> None:
    driver = watched(SchedulingPolicy(max_model_len=100, max_prefill_tokens=4), max_step_tokens=8)
    for request_id in ("first", "second", "third"):
        driver.add(make_request(request_id, [len(request_id)] * 8, max_tokens=1))
    driver.step()
    assert driver.live("second").entries == (
        Waited(choice=0, at_s=0.0, reason=WaitReason.NO_TOKENS, is_behind=False, n_plans=1, seconds=1.0),
    )
    assert driver.live("third").entries == driver.live("second").entries, "nobody is to blame"
    story_of(driver, "third")


def test_no_blocks_beside_the_claims_of_others_and_who_is_behind() -> None:
    driver = watched(n_blocks=6)
    driver.add(make_request("runs", range(10), max_tokens=5))  # holds 3 blocks, then 4
    driver.step()
    driver.add(make_request("large", range(20, 35), max_tokens=1))  # 4, and one to grow into
    driver.add(make_request("small", range(40, 42), max_tokens=1))
    driver.run()
    assert told(driver.stories["large"])[-1] == (WaitReason.NO_BLOCKS, False, 4, 4.0)
    assert told(driver.stories["small"])[0] == (WaitReason.NO_BLOCKS, True, 4, 4.0)
    assert_stories_are_true(driver)


def test_a_long_prompt_waits_for_another_and_a_short_one_passes_it() -> None:
    driver = watched(
        SchedulingPolicy(max_model_len=200, max_prefill_tokens=8, long_prefill_tokens=10), max_step_tokens=8
    )
    driver.add(make_request("long", range(26), max_tokens=1))
    driver.step()
    driver.add(make_request("too", range(100, 126), max_tokens=1))
    driver.add(make_request("short", range(40, 42), max_tokens=1))
    driver.run()
    assert {wait.reason for wait in waits(driver.stories["too"])} == {WaitReason.LONG_PREFILLS}
    assert waits(driver.stories["short"]) == []
    assert_stories_are_true(driver)


def test_who_waits_a_step_for_a_prefix_that_another_computes() -> None:
    driver = watched()
    for request_id in ("first", "twin"):
        driver.add(make_request(request_id, (*range(24), len(request_id))))
    driver.run()
    story = driver.stories["twin"]
    assert told(story) == [(WaitReason.PREFIX_COMING, False, 1, 1.0)]
    assert story.entries[1] == Admitted(choice=0, at_s=1.0, step=1, n_cached_tokens=24, n_blocks=7)
    assert_stories_are_true(driver)


def test_who_is_outranked_makes_way_for_the_more_urgent_one_and_waits_for_its_slot() -> None:
    driver = watched(max_sequences=1)
    driver.add(make_request("patient", range(6), max_tokens=4))
    driver.step()
    driver.add(make_request("urgent", range(20, 23), max_tokens=2, priority=-3))
    driver.run()
    story = driver.stories["patient"]
    kinds = [type(entry) for entry in story.entries]
    assert kinds == [Admitted, Preempted, Waited, Admitted]
    made_way = story.entries[1]
    assert made_way == Preempted(
        choice=0, at_s=1.0, step=1, rule=PreemptionRule.OUTRANKED, for_priority=-3, n_freed=2
    )
    assert told(story) == [(WaitReason.NO_SLOT, False, 2, 2.0)]
    assert (story.n_preemptions, story.n_chunks) == (1, 2)
    assert_stories_are_true(driver)


def test_for_want_of_blocks_the_last_in_order_makes_way_and_the_step_admits_nobody() -> None:
    driver = watched(n_blocks=6, block_size=2)
    driver.add(make_request("elder", range(3), max_tokens=5))
    driver.add(make_request("younger", range(10, 13), max_tokens=6))
    for _ in range(4):
        driver.step()
    driver.add(make_request("new", range(20, 21), max_tokens=1))
    driver.run()
    story = driver.stories["younger"]
    (made_way,) = [entry for entry in story.entries if isinstance(entry, Preempted)]
    assert (made_way.rule, made_way.for_priority) == (PreemptionRule.BLOCKS, None)
    assert (made_way.n_short, made_way.n_freed) == (2, 3)
    after = story.entries[story.entries.index(made_way) + 1]
    assert isinstance(after, Waited)
    assert (after.reason, after.is_behind, after.n_plans) == (WaitReason.PREEMPTING, False, 1)
    assert (WaitReason.PREEMPTING, False, 1, 1.0) in told(driver.stories["new"])
    assert_stories_are_true(driver)


def test_steps_ahead_wait_for_a_draw_that_the_host_must_know() -> None:
    driver = watched(max_flights=2)
    driver.add(make_request("penalised", range(4), presence_penalty=1.0, max_tokens=4))
    driver.step()
    driver.add(make_request("new", range(20, 24), max_tokens=1))
    assert driver.step() is None
    assert told(driver.live("new")) == [(WaitReason.DRAW_IN_FLIGHT, False, 1, 1.0)]
    story_of(driver, "new")


def test_steps_ahead_preempt_nobody() -> None:
    driver = watched(max_flights=2, max_sequences=1)
    driver.add(make_request("patient", range(4), max_tokens=4))
    driver.step()
    driver.add(make_request("urgent", range(20, 24), max_tokens=1, priority=-1))
    assert driver.step() is None
    assert told(driver.live("urgent")) == [(WaitReason.PREEMPTION_AHEAD, False, 1, 1.0)]
    assert [entry for entry in story_of(driver, "patient").entries if isinstance(entry, Preempted)]


def test_a_fork_s_choices_are_told_apart_and_their_copies_counted() -> None:
    driver = watched()
    driver.add(make_request("fork", range(6), n=3, max_tokens=3, temperature=1.0))
    story = story_of(driver, "fork")
    assert [entry.choice for entry in story.entries] == [0]
    assert story.n_copies == 2, "the last holder of the shared tail writes in place"


def test_a_prompt_in_pieces_counts_them() -> None:
    driver = watched(SchedulingPolicy(max_model_len=100, max_prefill_tokens=8), max_step_tokens=8)
    driver.add(make_request("pieces", range(20), max_tokens=3))
    assert story_of(driver, "pieces").n_chunks == 3


def test_the_time_for_a_grammar_is_told_beside_the_waits() -> None:
    driver = watched()
    driver.scheduler.add(make_request("r", range(3), max_tokens=1), 0.0, 0.75)
    assert driver.live("r").prepared_s == 0.75
    driver.run()


# --- Ends --------------------------------------------------------------------------------------------------------


def test_who_never_ran_has_a_story_of_waits_alone() -> None:
    driver = watched(max_sequences=1)
    driver.add(make_request("runs", range(4), max_tokens=9))
    driver.add(make_request("late", range(9), timeout_s=3.0))
    driver.run()
    assert driver.outcome("late").finish is FinishReason.ERROR
    story = driver.stories["late"]
    assert told(story) == [(WaitReason.NO_SLOT, False, 3, 3.0)]
    assert story.ended_at_s == 3.0


def test_of_a_cancelled_request_the_story_can_be_asked_for_later() -> None:
    driver = watched(max_sequences=1)
    driver.add(make_request("runs", range(4), max_tokens=9))
    driver.add(make_request("leaves", range(9)))
    driver.step()
    driver.abort("leaves")
    assert driver.scheduler.explain("leaves", driver.now) == driver.stories["leaves"]
    driver.run()
    assert driver.scheduler.explain("runs", driver.now) is None, "it was told with the last delta"
    assert driver.scheduler.explain("nobody", driver.now) is None


def test_stories_of_the_cancelled_are_bounded_and_an_id_that_comes_again_begins_anew() -> None:
    driver = watched()
    for index in range(REMEMBERED_STORIES + 10):
        driver.add(make_request(f"r{index}", range(3)))
        driver.abort(f"r{index}")
    assert driver.scheduler.explain("r9", driver.now) is None
    assert driver.scheduler.explain("r10", driver.now) is not None
    driver.stories.clear()
    driver.outcomes.clear()
    driver.add(make_request("r10", range(3)))
    assert driver.live("r10").ended_at_s is None
    driver.run()


def test_nothing_is_kept_of_requests_that_end_while_no_plan_is_made() -> None:
    driver = watched()
    for index in range(100):
        driver.abort(f"r{index}")
        driver.add(make_request(f"r{index}", range(3)))
    stories = driver.scheduler._stories
    assert (len(stories._fresh), len(stories._waits)) == (0, 0)


# --- Bounds ------------------------------------------------------------------------------------------------------


def test_of_a_long_story_the_middle_is_summed_up_and_said_to_be() -> None:
    log, n_entries = StoryLog(), 1000
    entries: list[Entry] = []
    for index in range(n_entries):
        wait = Waited(
            choice=0,
            at_s=float(index),
            reason=(WaitReason.NO_SLOT, WaitReason.NO_BLOCKS)[index % 2],
            is_behind=index % 4 > 1,
            n_plans=2,
            seconds=0.5,
        )
        entries.append(wait)
        log.add(wait)
    story = log.told(ended_at_s=9.0)
    assert story.entries == (*entries[:FIRST_ENTRIES], *entries[-LAST_ENTRIES:])
    assert story.n_left_out == n_entries - FIRST_ENTRIES - LAST_ENTRIES
    assert [(total.n_plans, total.seconds) for total in story.waited] == [(500, 125.0)] * 4


def test_of_an_id_that_came_again_and_was_not_cancelled_no_older_story_is_told() -> None:
    driver = make_driver()
    driver.add(make_request("r", (1, 2), max_tokens=2))
    driver.abort("r")
    assert driver.scheduler.explain("r", driver.now) is not None
    driver.add(make_request("r", (1, 2), max_tokens=2))
    driver.run()
    assert driver.scheduler.explain("r", driver.now) is None
