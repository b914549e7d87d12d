"""What happens when slots, tokens or blocks do not suffice: preemption, priorities, refusal."""

import pytest
from bakehouse_replica.core.types import FailureKind, FinishReason, SchedulingPolicy
from driving import make_driver, make_request, naive_generate


def test_the_last_in_order_is_preempted_and_keeps_its_place() -> None:
    driver = make_driver(n_blocks=5, block_size=4)
    for request_id, start in (("a", 0), ("b", 100)):
        driver.add(make_request(request_id, range(start, start + 6), max_tokens=10))
    driver.step()
    while driver.scheduler.load().n_waiting == 0:
        driver.step()
    driver.add(make_request("c", range(200, 204), max_tokens=1))
    assert driver.scheduler.load().n_running == 1
    n_plans = len(driver.plans)
    driver.run()
    served = list(dict.fromkeys(chunk.sequence_id for plan in driver.plans[n_plans:] for chunk in plan.chunks))
    assert served == [0, 1, 2], "the victim, though it came back, was served before the later arrival"
    for request_id, start in (("a", 0), ("b", 100)):
        expected = naive_generate(make_request("r", range(start, start + 6), max_tokens=10), 100)[0]
        assert driver.outcome(request_id).token_ids == expected.token_ids


def test_c40_recomputed_tokens_are_not_counted_as_cached() -> None:
    driver = make_driver(n_blocks=9, block_size=4)
    for index in range(4):
        driver.add(make_request(f"r{index}", range(100 * index, 100 * index + 8), max_tokens=12))
    driver.run()
    n_computed = sum(len(chunk.token_ids) for plan in driver.plans for chunk in plan.chunks)
    assert n_computed > 4 * 19, "some were preempted and computed again"
    assert {outcome.usage.cached_tokens for outcome in driver.outcomes.values() if outcome.usage} == {0}


def test_c40_a_request_tells_how_long_it_waited_before_its_first_admission_and_no_other() -> None:
    driver = make_driver(max_sequences=1)
    driver.add(make_request("victim", range(20), max_tokens=8))
    added_at = driver.now
    driver.step()
    driver.add(make_request("waits", range(100, 120), max_tokens=8))
    driver.add(make_request("urgent", [1, 2, 3], max_tokens=2, priority=-1))
    driver.run()
    waited_s = {}
    for request_id in ("victim", "urgent", "waits"):
        usage = driver.outcome(request_id).usage
        assert usage is not None
        waited_s[request_id] = usage.queue_s
    assert waited_s["victim"] == 0.0, "it came first, and was preempted later"
    assert waited_s["urgent"] is not None
    assert waited_s["waits"] is not None
    assert waited_s["waits"] > waited_s["urgent"]
    assert waited_s["waits"] < driver.now - added_at


def test_one_that_was_never_admitted_has_not_waited_for_any_length_of_time() -> None:
    driver = make_driver()
    driver.add(make_request("gone", range(20)))
    driver.scheduler.abort("gone")
    (delta,) = driver.scheduler.take_deltas()
    assert delta.usage is not None
    assert delta.usage.queue_s is None


@pytest.mark.parametrize("victim_n", [1, 2])
def test_c41_preemption_at_any_step_changes_no_id(victim_n: int) -> None:
    victim = make_request("victim", range(20), max_tokens=30, temperature=1.0, presence_penalty=1.0, n=victim_n)
    expected = naive_generate(victim, 100)
    for step in range(34):
        driver = make_driver(max_sequences=victim_n, max_step_tokens=8)
        driver.add(victim)
        for _ in range(step):
            driver.step()
        driver.add(make_request("urgent", [1, 2, 3], n=victim_n, max_tokens=2, priority=-1))
        driver.run()
        for choice in range(victim_n):
            outcome = driver.outcome("victim", choice)
            assert (outcome.token_ids, outcome.finish) == (expected[choice].token_ids, expected[choice].finish), (
                step
            )
            assert outcome.usage is not None
            assert outcome.usage.cached_tokens == 0


def test_c42_a_request_that_outgrows_the_pool_ends_alone() -> None:
    driver = make_driver(n_blocks=10, block_size=4)
    driver.add(make_request("grows", range(20), max_tokens=None))
    driver.add(make_request("next", range(100, 120), max_tokens=21))
    driver.run()
    outcome = driver.outcome("grows")
    assert (outcome.finish, len(outcome.token_ids)) == (FinishReason.ERROR, 21)
    assert outcome.failure is not None
    assert outcome.failure.kind is FailureKind.NO_ROOM
    assert "41 tokens of prompt and output need 11 KV blocks of 4; this replica has 10" in outcome.failure.message
    assert driver.outcome("next").finish is FinishReason.LENGTH


def test_a_preempted_sequence_that_fits_no_longer_ends_when_its_turn_comes() -> None:
    driver = make_driver(n_blocks=4, block_size=4, max_sequences=2)
    driver.add(make_request("first", range(8), max_tokens=9))
    driver.add(make_request("grows", range(100, 104), max_tokens=None, timeout_s=1000.0))
    driver.run()
    assert driver.outcome("first").finish is FinishReason.LENGTH
    failure = driver.outcome("grows").failure
    assert failure is not None
    assert failure.kind is FailureKind.NO_ROOM


def test_c44_an_urgent_request_preempts_and_the_victim_resumes_before_later_arrivals() -> None:
    driver = make_driver(n_blocks=8, block_size=4)
    for request_id, start in (("a", 0), ("b", 100)):
        driver.add(make_request(request_id, range(start, start + 8), max_tokens=9))
        driver.step()
    driver.add(make_request("later", range(200, 208), max_tokens=9))
    driver.add(make_request("urgent", range(300, 308), max_tokens=9, priority=-1))
    driver.step()
    finished = []
    while driver.scheduler.has_work:
        driver.step()
        finished += [key[0] for key, each in driver.outcomes.items() if each.finish and key[0] not in finished]
    assert driver.plans[2].chunks[-1].sequence_id == 3, "the urgent one runs in the very next step"
    assert finished.index("urgent") < finished.index("b") < finished.index("later")
    assert set(driver.outcomes) == {(request_id, 0) for request_id in ("a", "b", "later", "urgent")}


def test_an_urgent_request_preempts_nobody_where_that_would_not_help() -> None:
    driver = make_driver(n_blocks=8, block_size=4, max_sequences=2)
    driver.add(make_request("equal", range(16), max_tokens=9, priority=-1))
    driver.add(make_request("lower", range(100, 104), max_tokens=9))
    driver.step()
    driver.add(make_request("urgent", range(200, 220), max_tokens=9, priority=-1))
    driver.step()
    assert (driver.scheduler.load().n_running, driver.scheduler.load().n_waiting) == (2, 1)
    driver.run()


def test_a_refused_admission_leaves_nothing_changed() -> None:
    driver = make_driver(n_blocks=5, block_size=4)
    driver.add(make_request("a", range(12), max_tokens=9))
    driver.step()
    driver.add(make_request("big", [*range(12), 50, 51, 52, 53], max_tokens=4))
    before = driver.scheduler.load()
    plan = driver.scheduler.plan(driver.now)
    assert plan is not None
    assert len(plan.chunks) == 1
    after = driver.scheduler.load()
    assert (after.n_waiting, after.resident) == (1, before.resident)
    assert after.n_held_blocks == before.n_held_blocks + 1, "the running sequence's own new block"


@pytest.mark.parametrize("n_long", [600, 1000, 2000, 2100])
def test_c62_short_prompts_do_not_wait_for_one_of_a_few_steps(n_long: int) -> None:
    driver = make_driver(n_blocks=500, max_step_tokens=512, policy=SchedulingPolicy(max_model_len=4096))
    driver.add(make_request("long", [index % 50 for index in range(n_long)], max_tokens=1))
    for index in range(4):
        driver.add(make_request(f"short{index}", [index, 1, 2]))
    for _ in range(2):  # the first step is the long prompt's alone
        driver.step()
    assert [len(driver.outcome(f"short{index}").token_ids) for index in range(4)] == [1] * 4
    driver.run()


def test_c62_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    policy = SchedulingPolicy(max_model_len=200_000)
    driver = make_driver(n_blocks=9_000, max_step_tokens=512, policy=policy)
    driver.add(make_request("long", [index % 50 for index in range(131_072)], max_tokens=1))
    for _ in range(3):
        driver.step()
    driver.add(make_request("short", range(10)))
    driver.step()
    assert len(driver.outcome("short").token_ids) == 1
    assert driver.plans[-1].chunks[0].token_ids != driver.plans[-2].chunks[0].token_ids, "the long one goes on"
    driver.add(make_request("long too", [index % 49 for index in range(131_072)], max_tokens=1))
    driver.add(make_request("short too", range(20, 30)))
    driver.step()
    assert driver.scheduler.load().n_waiting == 1, "the second long prompt waits and lets the short one pass"
    assert len(driver.outcome("short too").token_ids) == 1
    for request_id in ("long", "long too", "short", "short too"):
        driver.abort(request_id)
