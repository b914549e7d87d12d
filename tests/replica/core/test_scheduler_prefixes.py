"""Requests that begin alike and arrive together: one computes the beginning, the others wait for its blocks."""

from dataclasses import replace

import pytest
from bakehouse_replica.core.types import FinishReason
from driving import POLICY, Driver, make_driver, make_request, naive_generate
from hypothesis import given, settings
from hypothesis import strategies as st

COMMON = tuple(range(24))  # six blocks of 4


def n_computed(driver: Driver) -> int:
    return sum(len(chunk.token_ids) for plan in driver.plans for chunk in plan.chunks)


def n_computed_by(driver: Driver, step: int) -> list[int]:
    return [len(chunk.token_ids) for chunk in driver.plans[step].chunks]


@pytest.mark.parametrize("budget", [8, 30, 40, 500])
def test_a_common_beginning_is_computed_once_however_many_arrive_with_it(budget: int) -> None:
    driver = make_driver(n_blocks=200, block_size=4, max_step_tokens=budget)
    for index in range(6):
        driver.add(make_request(f"r{index}", (*COMMON, 40 + index, 1), max_tokens=1))
    driver.run()
    assert n_computed(driver) == len(COMMON) + 6 * 2
    for index in range(6):
        request = make_request("r", (*COMMON, 40 + index, 1), max_tokens=1)
        assert driver.outcome(f"r{index}").token_ids == naive_generate(request, 100)[0].token_ids


def test_who_waits_for_blocks_goes_on_in_the_next_step() -> None:
    driver = make_driver(n_blocks=200, block_size=4, max_step_tokens=500)
    for request_id in ("first", "second"):
        driver.add(make_request(request_id, (*COMMON, len(request_id))))
    driver.step()
    driver.step()
    assert (n_computed_by(driver, 0), n_computed_by(driver, 1)) == ([25], [1, 1])


def test_nobody_waits_for_the_smaller_part_of_a_prefill() -> None:
    driver = make_driver(n_blocks=200, block_size=4, max_step_tokens=500)
    driver.add(make_request("first", (*COMMON[:12], *range(30, 50))))
    driver.add(make_request("second", (*COMMON[:12], *range(60, 80))))
    driver.step()
    assert n_computed_by(driver, 0) == [32, 32]


def test_nobody_waits_for_another_tenant_s_blocks() -> None:
    driver = make_driver(n_blocks=200, block_size=4, max_step_tokens=500)
    for salt in ("A", "B"):
        driver.add(make_request(salt, COMMON, salt=salt))
    driver.step()
    assert n_computed_by(driver, 0) == [24, 24]


def test_who_waits_for_blocks_keeps_its_place() -> None:
    driver = make_driver(n_blocks=200, block_size=4, max_step_tokens=500, max_sequences=2)
    for request_id, prompt in (("first", COMMON), ("twin", COMMON), ("later", range(60, 70))):
        driver.add(make_request(request_id, prompt))
    driver.step()
    assert len(driver.plans[0].chunks) == 1, "the second slot is the twin's"
    driver.step()
    assert [chunk.sequence_id for chunk in driver.plans[1].chunks] == [0, 1]
    driver.run()


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("n_steps", [1, 2, 3])
def test_when_the_one_that_computes_leaves_the_others_compute(n_steps: int, in_flight: bool) -> None:
    driver = make_driver(n_blocks=200, block_size=4, max_step_tokens=8)
    for request_id in ("leaver", "b", "c"):
        driver.add(make_request(request_id, (*COMMON, len(request_id))))
    for _ in range(n_steps - in_flight):
        driver.step()
    if in_flight:
        driver.step(during=lambda: driver.abort("leaver"))
    else:
        driver.abort("leaver")
    driver.run()
    expected = naive_generate(make_request("r", (*COMMON, 1)), 100)[0]
    assert [driver.outcome(request_id).token_ids for request_id in ("b", "c")] == [expected.token_ids] * 2


def test_when_the_one_that_computes_is_preempted_the_urgent_one_computes() -> None:
    driver = make_driver(n_blocks=200, block_size=4, max_step_tokens=8, max_sequences=1)
    driver.add(make_request("victim", COMMON))
    driver.step()
    driver.add(make_request("urgent", COMMON, priority=-1))
    driver.step()
    assert driver.plans[1].chunks[0].sequence_id == 1
    driver.run()
    assert driver.outcome("victim").token_ids == driver.outcome("urgent").token_ids


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 24), st.integers(0, 8), st.booleans()), min_size=2, max_size=8),
    st.integers(1, 30),
    st.integers(1, 2),
)
def test_whoever_waits_gets_its_first_token_within_the_steps_of_computing_everything(
    visits: list[tuple[int, int, bool]], budget: int, max_long_prefills: int
) -> None:
    """No wait without progress: no request takes longer than all of their tokens would one after the other."""
    policy = replace(
        POLICY, long_prefill_tokens=12, max_long_prefills=max_long_prefills, max_prefill_tokens=budget
    )
    driver = make_driver(n_blocks=500, block_size=4, max_sequences=8, max_step_tokens=budget + 8, policy=policy)
    requests = [
        make_request(f"r{index}", (*COMMON[:n_common], 40 + index, *range(n_own)), max_tokens=2)
        for index, (n_common, n_own, _) in enumerate(visits)
    ]
    for request in requests:
        driver.add(request)
    leaving = [request.request_id for request, (_, _, leaves) in zip(requests, visits, strict=True) if leaves]
    n_tokens = sum(len(request.prompt_ids) + 2 for request in requests)
    for _ in range(n_tokens):
        driver.step(during=lambda: driver.abort(leaving.pop()) if leaving else None)
        if not driver.scheduler.has_work:
            break
    for request, (_, _, leaves) in zip(requests, visits, strict=True):
        outcome = driver.outcome(request.request_id)
        expected = naive_generate(request, 100)[0].token_ids
        if outcome.finish is FinishReason.CANCELLED:
            assert leaves
            assert outcome.token_ids == expected[: len(outcome.token_ids)]
        else:
            assert (outcome.finish, outcome.token_ids) == (FinishReason.LENGTH, expected)
