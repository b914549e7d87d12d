"""Requests with n > 1: one prefill, shared blocks, copies on the first write."""

from bakehouse_replica.core.types import BlockCopy
from driving import make_driver, make_request, naive_generate


def test_four_choices_share_two_blocks_before_the_first_write_and_hold_five_after() -> None:
    driver = make_driver()
    request = make_request("a", range(17), n=4, temperature=1.0)
    driver.add(request)
    plan = driver.step()
    assert plan is not None
    assert len(plan.chunks) == 1
    assert plan.chunks[0].sample is not None
    assert len(plan.chunks[0].sample.seeds) == 4
    assert driver.n_held == 2
    plan = driver.step()
    assert plan is not None
    tail = driver.plans[0].chunks[0].block_ids[1]
    own_tails = [chunk.block_ids[1] for chunk in plan.chunks]
    assert plan.copies == tuple(BlockCopy(source=tail, target=own) for own in own_tails[:3])
    assert own_tails[3] == tail, "the last writer keeps the original"
    assert driver.n_held == 5
    driver.run()
    expected = naive_generate(request, 100)
    assert [driver.outcome("a", choice).token_ids for choice in range(4)] == [each.token_ids for each in expected]
    assert len({tuple(each.token_ids) for each in expected}) == 4


def test_four_choices_run_in_a_pool_that_just_holds_them() -> None:
    driver = make_driver(n_blocks=5)
    driver.add(make_request("a", range(17), n=4, temperature=1.0))
    driver.run()
    assert len(driver.plans) == 8, "nobody had to be preempted"


def test_greedy_choices_of_one_prompt_end_up_sharing_their_output_blocks() -> None:
    driver = make_driver(block_size=4)
    driver.add(make_request("a", range(6), n=4, max_tokens=20))
    for _ in range(11):
        driver.step()
    assert driver.n_held == 4, "16 tokens are computed, by each of four, and kept once"


def test_a_request_waits_until_it_has_a_slot_for_each_choice() -> None:
    driver = make_driver(max_sequences=4)
    driver.add(make_request("a", range(5), n=2, max_tokens=4))
    driver.add(make_request("b", range(5), n=3, max_tokens=4))
    driver.add(make_request("c", range(5), max_tokens=4))
    driver.step()
    assert (driver.scheduler.load().n_running, driver.scheduler.load().n_waiting) == (2, 2)
    driver.run()
