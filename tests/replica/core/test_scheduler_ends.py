"""How requests end other than by their own output, what is refused, and that nothing else changes."""

from dataclasses import replace

import pytest
from bakehouse_replica.core.ends import REMEMBERED_IDS
from bakehouse_replica.core.errors import InvalidRequest, Overloaded
from bakehouse_replica.core.scheduler import Scheduler
from bakehouse_replica.core.types import Capacity, Draw, FailureKind, FinishReason, Sampled, StepResult
from driving import POLICY, make_driver, make_fake_drawing, make_request, naive_generate


def test_c45_an_abort_before_the_add_ends_the_request_at_once() -> None:
    driver = make_driver()
    driver.abort("a")
    driver.abort("a")
    driver.add(make_request("a", range(5), n=2))
    assert not driver.scheduler.has_work
    for choice in range(2):
        outcome = driver.outcome("a", choice)
        assert (outcome.finish, outcome.token_ids) == (FinishReason.CANCELLED, [])
    driver.add(make_request("a", range(5)))
    driver.run()
    assert driver.outcome("a").finish is FinishReason.LENGTH, "an abort ends one request, not its successors"


def test_an_abort_that_comes_after_the_end_cancels_no_later_request_of_that_id() -> None:
    driver = make_driver()
    driver.add(make_request("a", range(5)))
    driver.step()
    driver.abort("a")
    driver.abort("a")
    driver.add(make_request("a", range(5)))
    driver.run()
    assert driver.outcome("a").finish is FinishReason.LENGTH
    driver.abort("a")
    driver.add(make_request("a", range(5)))
    assert driver.scheduler.has_work


def test_early_aborts_are_forgotten_in_the_end() -> None:
    driver = make_driver()
    driver.scheduler.abort("first")
    for index in range(REMEMBERED_IDS):
        driver.scheduler.abort(f"other{index}")
    driver.add(make_request("first", range(5)))
    driver.run()
    assert driver.outcome("first").finish is FinishReason.LENGTH


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("n_steps", [0, 1, 2, 3, 6])
@pytest.mark.parametrize(
    ("n", "tokens_per_step", "prompt_logprobs", "max_tokens"),
    [(1, 1, None, 5), (3, 1, None, 5), (3, 4, 1, 20), (1, 2, 0, 9)],
)
def test_c46_an_abort_in_any_state_frees_everything(
    n: int, tokens_per_step: int, prompt_logprobs: int | None, max_tokens: int, n_steps: int, in_flight: bool
) -> None:
    driver = make_driver(  # three steps of prefill, then decode
        n_blocks=16, block_size=4, max_step_tokens=4, make_executor=make_fake_drawing(tokens_per_step)
    )
    driver.add(
        make_request("a", range(11), n=n, temperature=1.0, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
    )
    for _ in range(n_steps):
        driver.step()
    if in_flight:
        driver.step(during=lambda: driver.abort("a"))
    else:
        driver.abort("a")
    driver.abort("a")
    assert not driver.scheduler.has_work
    assert driver.n_held == 0
    assert {driver.outcome("a", choice).finish for choice in range(n)} == {FinishReason.CANCELLED}
    driver.add(make_request("b", range(11), max_tokens=5))
    driver.run()
    assert (
        driver.outcome("b").token_ids
        == naive_generate(make_request("b", range(11), max_tokens=5), 50)[0].token_ids
    )


def test_c46_an_abort_of_a_preempted_sequence_frees_everything() -> None:
    driver = make_driver(max_sequences=1)
    driver.add(make_request("victim", range(20)))
    driver.step()
    driver.add(make_request("urgent", range(5), priority=-1))
    driver.step()
    assert driver.scheduler.load().n_waiting == 1
    driver.abort("victim")
    driver.run()
    assert driver.outcome("victim").finish is FinishReason.CANCELLED
    usage = driver.outcome("victim").usage
    assert usage is not None
    assert usage.completion_tokens == 1


def test_c46_an_abort_of_forked_choices_of_which_some_are_preempted_frees_everything() -> None:
    driver = make_driver(n_blocks=9, block_size=4)
    driver.add(make_request("a", range(6), n=4, temperature=1.0, max_tokens=20))
    driver.step()
    while driver.scheduler.load().n_waiting == 0:
        driver.step()
    assert driver.scheduler.load().n_running > 0
    driver.abort("a")
    assert (driver.scheduler.has_work, driver.n_held) == (False, 0)
    assert {driver.outcome("a", choice).finish for choice in range(4)} == {FinishReason.CANCELLED}


def test_c46_an_abort_while_a_chunk_is_scored_frees_everything() -> None:
    driver = make_driver(max_step_tokens=8)
    driver.add(make_request("a", range(20), max_tokens=0, prompt_logprobs=1))
    driver.step()
    driver.step(during=lambda: driver.abort("a"))
    assert (driver.scheduler.has_work, driver.n_held) == (False, 0)
    outcome = driver.outcome("a")
    assert (outcome.finish, outcome.prompt_logprobs) == (FinishReason.CANCELLED, ())


def test_c47_a_result_for_an_aborted_sequence_is_ignored_and_registers_nothing() -> None:
    driver = make_driver()
    driver.add(make_request("a", range(32)))
    driver.step(during=lambda: driver.abort("a"))
    load = driver.scheduler.load()
    assert (load.n_free_blocks, load.n_cached_blocks, load.n_held_blocks, load.resident) == (64, 0, 0, ())


def test_a_request_whose_time_is_up_fails_while_waiting_and_while_running() -> None:
    driver = make_driver(max_sequences=1)
    driver.add(make_request("running", range(5), max_tokens=100, timeout_s=3.0))
    driver.add(make_request("waiting", range(5), max_tokens=100, timeout_s=2.0))
    driver.add(make_request("patient", range(5), max_tokens=3, timeout_s=50.0))
    driver.run()
    assert len(driver.outcome("running").token_ids) == 3
    assert driver.outcome("waiting").token_ids == []
    for request_id, limit in (("running", "3.0 s"), ("waiting", "2.0 s")):
        outcome = driver.outcome(request_id)
        assert outcome.finish is FinishReason.ERROR
        assert outcome.failure is not None
        assert outcome.failure.kind is FailureKind.DEADLINE
        assert limit in outcome.failure.message
    assert driver.outcome("patient").finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("stop", "n_prior", "finish"), [((7,), 3, FinishReason.STOP), ((), 8, FinishReason.LENGTH)]
)
def test_a_request_that_arrives_complete_ends_without_a_step(
    stop: tuple[int, ...], n_prior: int, finish: FinishReason
) -> None:
    driver = make_driver()
    driver.add(make_request("a", range(5), prior_output=(7,) * n_prior, stop=stop, max_tokens=8))
    assert not driver.scheduler.has_work
    outcome = driver.outcome("a")
    assert (outcome.finish, len(outcome.token_ids)) == (finish, n_prior)
    assert outcome.usage is not None
    assert outcome.usage.completion_tokens == n_prior


def test_a_full_queue_refuses_and_takes_again_once_there_is_room() -> None:
    driver = make_driver(max_sequences=1, policy=replace(POLICY, max_waiting_requests=2))
    for request_id in ("a", "b"):
        driver.add(make_request(request_id, range(5)))
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        driver.add(make_request("c", range(5)))
    driver.step()
    driver.add(make_request("c", range(5)))
    driver.run()


def test_another_policy_holds_for_who_comes_next_and_who_waits_stays() -> None:
    driver = make_driver(max_sequences=1, policy=replace(POLICY, max_waiting_requests=2))
    for request_id in ("a", "b"):
        driver.add(make_request(request_id, range(5)))
    driver.scheduler.adopt(replace(POLICY, max_waiting_requests=1))
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        driver.add(make_request("c", range(5)))
    driver.scheduler.adopt(replace(POLICY, max_waiting_requests=3))
    driver.add(make_request("c", range(5)))
    driver.run()
    assert {driver.outcome(request_id).finish for request_id in "abc"} == {FinishReason.LENGTH}


def test_the_longest_context_is_no_matter_of_policy() -> None:
    driver = make_driver()
    with pytest.raises(AssertionError):
        driver.scheduler.adopt(replace(POLICY, max_model_len=POLICY.max_model_len + 1))


def test_the_load_counts_what_is_there() -> None:
    driver = make_driver(max_sequences=1)
    driver.add(make_request("a", range(100)))
    driver.add(make_request("b", range(30)))
    assert driver.scheduler.load().waiting_tokens == 130
    first = driver.scheduler.load()
    driver.step()
    load = driver.scheduler.load()
    assert load.version > first.version
    assert (load.n_running, load.n_waiting, load.waiting_tokens) == (1, 1, 36 + 30)
    assert (load.n_free_blocks, load.n_cached_blocks, load.n_held_blocks) == (60, 0, 4)
    assert load.step_time_s == 1.0


def test_illegal_calls_raise_and_change_nothing() -> None:
    disturbed, undisturbed = make_driver(), make_driver()
    for driver in (disturbed, undisturbed):
        driver.add(make_request("a", range(40), n=2, temperature=1.0))
    scheduler = disturbed.scheduler

    before = scheduler.load()
    with pytest.raises(AssertionError, match="no step is"):
        scheduler.apply(StepResult(step=0, sampled=(), elapsed_s=0.0), 0.0)
    with pytest.raises(InvalidRequest, match="already being served"):
        scheduler.add(make_request("a", range(5)), 0.0)
    with pytest.raises(InvalidRequest, match="limit is 1000"):
        scheduler.add(make_request("b", range(500), max_tokens=501), 0.0)
    assert scheduler.load() == before

    def disturb() -> None:
        before = scheduler.load()
        with pytest.raises(AssertionError, match="is in flight"):
            scheduler.plan(0.0)
        right = Sampled(sequence_id=0, draws=(Draw(token_ids=(1,)), Draw(token_ids=(2,))))
        for step, sampled in (
            (7, (right,)),
            (0, ()),
            (0, (replace(right, draws=right.draws[:1]),)),
            (0, (replace(right, sequence_id=5),)),
            (0, (right, right)),
        ):
            with pytest.raises(AssertionError, match="wants tokens"):
                scheduler.apply(StepResult(step=step, sampled=sampled, elapsed_s=0.0), 0.0)
        assert scheduler.load() == before
        scheduler.check()

    assert disturbed.step(during=disturb) == undisturbed.step()
    while undisturbed.scheduler.has_work:
        assert disturbed.step() == undisturbed.step()
    assert disturbed.outcomes == undisturbed.outcomes


def test_the_same_calls_lead_to_the_same_plans() -> None:
    drivers = [make_driver(n_blocks=9, block_size=4, max_step_tokens=7) for _ in range(2)]
    for driver in drivers:
        for index in range(6):
            driver.add(make_request(f"r{index}", range(index, index + 9), n=1 + index % 3, temperature=1.0))
            driver.step()
        driver.run()
    assert drivers[0].plans == drivers[1].plans


def test_a_constructed_scheduler_is_idle() -> None:
    scheduler = Scheduler(
        capacity=Capacity(n_blocks=64, block_size=16, max_step_tokens=64, max_sequences=8),
        policy=POLICY,
        model_digest="model",
        hash_key=b"",
    )
    assert not scheduler.has_work
    assert scheduler.take_deltas() == []
    assert scheduler.load().n_free_blocks == 64
