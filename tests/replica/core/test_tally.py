"""What a scheduler counts of steps and requests, above all what it does not count twice."""

import pytest
from bakehouse_replica.core.counts import Distribution
from bakehouse_replica.core.metric_table import (
    BATCH_FILL,
    COPIED_BLOCKS,
    KV_BLOCKS,
    METRICS,
    PREEMPTIONS,
    PREFIX_HIT_TOKENS,
    PREFIX_QUERIED_TOKENS,
    QUEUE_TIME,
    RUNNING_SEQUENCES,
    STEP_TOKENS,
    WAITING_PROMPT_TOKENS,
    WAITING_SEQUENCES,
)
from bakehouse_replica.core.vllm_table import (
    VLLM_DECODE_TIME,
    VLLM_E2E,
    VLLM_GENERATION_TOKENS,
    VLLM_METRICS,
    VLLM_PREFILL_TIME,
    VLLM_PROMPT_TOKENS,
    VLLM_REQUEST_GENERATION_TOKENS,
    VLLM_SUCCESS,
    VLLM_SWAPPED,
    VLLM_TOKEN_TIME,
    VLLM_TTFT,
)
from driving import Driver, make_driver, make_request


def run(driver: Driver) -> int:
    """Runs to the end; how many went back into the queue. In a step in which somebody does, nobody is admitted."""
    n_preempted = 0
    while driver.scheduler.has_work:
        n_waiting = driver.scheduler.load().n_waiting
        driver.step()
        n_preempted += max(0, driver.scheduler.load().n_waiting - n_waiting)
    return n_preempted


def test_names_are_those_of_one_table_each_once() -> None:
    names = [metric.name for metric in (*METRICS, *VLLM_METRICS)]
    assert len(names) == len(set(names))


def test_c40_random_prompts_hit_nothing_however_often_they_are_preempted() -> None:
    driver = make_driver(n_blocks=9, block_size=4)
    for index in range(4):
        driver.add(make_request(f"r{index}", range(100 * index, 100 * index + 8), max_tokens=12))
    n_preempted = run(driver)
    assert driver.counted(PREEMPTIONS) == n_preempted > 0
    assert driver.counted(PREFIX_QUERIED_TOKENS) == 4 * 8
    assert driver.counted(PREFIX_HIT_TOKENS) == 0


def test_c63_ten_requests_three_preempted_two_aborted_early_give_eight_first_tokens() -> None:
    driver = make_driver(n_blocks=20, block_size=16)
    for index in range(8):
        driver.add(make_request(f"r{index}", range(100 * index, 100 * index + 20), max_tokens=40))
    for index in (8, 9):
        driver.add(make_request(f"r{index}", range(100 * index, 100 * index + 20), priority=9))
        driver.abort(f"r{index}")
    n_preempted = run(driver)
    assert driver.counted(PREEMPTIONS) == n_preempted >= 3
    assert driver.n_samples(QUEUE_TIME) == 8
    for metric in (VLLM_TTFT, VLLM_PREFILL_TIME, VLLM_DECODE_TIME, VLLM_E2E, VLLM_TOKEN_TIME):
        assert driver.n_samples(metric) == 8, metric.name
    assert driver.counted(VLLM_SUCCESS, "length") == 8
    assert driver.counted(VLLM_SUCCESS, "abort") == 2
    assert driver.counted(VLLM_PROMPT_TOKENS) == 8 * 20
    assert driver.counted(VLLM_GENERATION_TOKENS) == 8 * 40
    lengths = driver.counted(VLLM_REQUEST_GENERATION_TOKENS)
    assert isinstance(lengths, Distribution)
    assert (lengths.at_most[-1], lengths.total) == (8, 8 * 40)


def test_a_prompt_that_was_served_before_hits_all_but_what_must_be_computed() -> None:
    driver = make_driver(block_size=4)
    for _ in range(2):
        driver.add(make_request("again", range(10), max_tokens=1))
        driver.run()
    assert (driver.counted(PREFIX_QUERIED_TOKENS), driver.counted(PREFIX_HIT_TOKENS)) == (20, 8)


def test_what_comes_from_a_lost_replica_is_no_second_first_token_and_no_prefix_query() -> None:
    driver = make_driver(block_size=4)
    driver.add(make_request("resumed", range(10), prior_output=(1, 2), max_tokens=6))
    driver.run()
    assert driver.counted(PREFIX_QUERIED_TOKENS) == 0
    assert driver.n_samples(VLLM_TTFT) == 0
    assert driver.n_samples(QUEUE_TIME) == 1
    assert driver.counted(VLLM_GENERATION_TOKENS) == 4
    assert driver.counted(VLLM_SUCCESS, "length") == 1


def test_a_choice_that_is_forked_copies_the_block_that_it_shares() -> None:
    driver = make_driver(block_size=4)
    driver.add(make_request("forked", range(6), n=3, temperature=1.0))
    driver.run()
    n_copies = sum(len(plan.copies) for plan in driver.plans)
    assert driver.counted(COPIED_BLOCKS) == n_copies == 2
    assert driver.counted(VLLM_SUCCESS, "length") == 1, "it is one request"


@pytest.mark.parametrize("max_flights", [1, 2])
def test_each_step_tells_once_how_full_it_was(max_flights: int) -> None:
    driver = make_driver(max_sequences=8, max_flights=max_flights)
    for index in range(4):
        driver.add(make_request(f"r{index}", [index, 1, 2]))
    driver.run()
    fill, tokens = driver.counted(BATCH_FILL), driver.counted(STEP_TOKENS)
    assert isinstance(fill, Distribution)
    assert isinstance(tokens, Distribution)
    assert fill.at_most[-1] == tokens.at_most[-1] == len(driver.plans)
    assert fill.total == sum(len(plan.chunks) for plan in driver.plans) / 8
    assert tokens.total == sum(len(chunk.token_ids) for plan in driver.plans for chunk in plan.chunks)


def test_times_are_those_between_the_moments_that_the_driver_tells() -> None:
    driver = make_driver(max_sequences=1)  # a step takes a second
    for request_id in ("first", "second"):
        driver.add(make_request(request_id, [1, 2, 3], max_tokens=4))
    driver.run()
    totals = {}
    for metric in (QUEUE_TIME, VLLM_TTFT, VLLM_PREFILL_TIME, VLLM_DECODE_TIME, VLLM_TOKEN_TIME, VLLM_E2E):
        distribution = driver.counted(metric)
        assert isinstance(distribution, Distribution)
        totals[metric] = distribution.total
    assert totals == {
        QUEUE_TIME: 0 + 4,
        VLLM_TTFT: 1 + 5,
        VLLM_PREFILL_TIME: 1 + 1,
        VLLM_DECODE_TIME: 3 + 3,
        VLLM_TOKEN_TIME: 1 + 1,
        VLLM_E2E: 4 + 8,
    }


def test_gauges_are_those_of_the_load_and_tell_preempted_ones_apart() -> None:
    driver = make_driver(n_blocks=5, block_size=4)
    for request_id, start in (("a", 0), ("b", 100), ("c", 200)):
        driver.add(make_request(request_id, range(start, start + 6), max_tokens=10))
    while driver.counted(PREEMPTIONS) == 0:
        driver.step()
    load = driver.scheduler.load()
    driver.scheduler.note(load, driver.now)
    assert driver.counted(RUNNING_SEQUENCES) == load.n_running == 1
    assert driver.counted(WAITING_SEQUENCES) == load.n_waiting == 2
    assert driver.counted(WAITING_PROMPT_TOKENS) == load.waiting_tokens
    assert driver.counted(VLLM_SWAPPED) == 1
    blocks = [driver.counted(KV_BLOCKS, state) for state in ("free", "cached", "held")]
    assert blocks == [load.n_free_blocks, load.n_cached_blocks, load.n_held_blocks]
