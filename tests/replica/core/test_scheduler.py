"""Batching and prefix sharing by example, driven step by step with the audit on."""

from dataclasses import replace

import pytest
from bakehouse_replica.core.hashing import HashScope, block_hashes
from bakehouse_replica.core.types import FinishReason
from driving import POLICY, make_driver, make_request, naive_generate


def test_a_newcomer_joins_the_running_batch_at_the_next_step() -> None:
    driver = make_driver()
    driver.add(make_request("a", range(5)))
    driver.step()
    driver.add(make_request("b", range(10, 15)))
    plan = driver.step()
    assert plan is not None
    assert [len(chunk.token_ids) for chunk in plan.chunks] == [1, 5]


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_sequences() -> None:
    driver = make_driver(policy=replace(POLICY, max_prefill_tokens=20))
    driver.add(make_request("a", range(5), max_tokens=20))
    driver.step()
    driver.add(make_request("b", range(100, 150)))
    sizes = []
    for _ in range(4):
        plan = driver.step()
        assert plan is not None
        sizes.append([len(chunk.token_ids) for chunk in plan.chunks])
    assert sizes == [[1, 20], [1, 20], [1, 10], [1, 1]]
    assert [chunk.sample is not None for plan in driver.plans[1:4] for chunk in plan.chunks[1:]] == [
        False,
        False,
        True,
    ]


def test_no_plan_and_no_work_without_requests() -> None:
    driver = make_driver()
    assert not driver.scheduler.has_work
    assert driver.step() is None


def test_penalties_see_the_ids_they_count_and_nobody_else_sends_them() -> None:
    driver = make_driver()
    driver.add(make_request("a", range(5), presence_penalty=1.0))
    driver.add(make_request("b", range(5, 9)))
    driver.step()
    plan = driver.step()
    assert plan is not None
    penalised, plain = plan.chunks[0].sample, plan.chunks[1].sample
    assert penalised is not None
    assert plain is not None
    assert (penalised.prompt_ids, len(penalised.output_ids), penalised.output_index) == (tuple(range(5)), 1, 1)
    assert (plain.prompt_ids, plain.output_ids, plain.output_index) == ((), (), 1)


def test_a_stop_id_belongs_to_the_output_and_is_not_drawn_before_min_tokens() -> None:
    request = make_request("a", range(5), max_tokens=30)
    natural = naive_generate(request, 100)[0].token_ids
    stop = natural[4]
    driver = make_driver()
    driver.add(make_request("a", range(5), max_tokens=30, stop=(stop,)))
    driver.run()
    outcome = driver.outcome("a")
    assert (outcome.finish, outcome.token_ids) == (FinishReason.STOP, natural[: natural.index(stop) + 1])
    driver.add(make_request("b", range(5), max_tokens=30, stop=(stop,), min_tokens=30))
    driver.run()
    assert driver.outcome("b").finish is FinishReason.LENGTH
    assert stop not in driver.outcome("b").token_ids


def test_without_max_tokens_the_context_length_is_the_limit() -> None:
    driver = make_driver(policy=replace(POLICY, max_model_len=20))
    driver.add(make_request("a", range(5), max_tokens=None))
    driver.run()
    assert (len(driver.outcome("a").token_ids), driver.outcome("a").finish) == (15, FinishReason.LENGTH)


def test_a_running_sequence_s_prefix_is_shared_as_soon_as_its_step_is_applied() -> None:
    driver = make_driver()
    driver.add(make_request("a", range(40), max_tokens=20))
    driver.step()
    driver.add(make_request("b", range(40)))
    plan = driver.step()
    assert plan is not None
    first, second = plan.chunks
    assert (second.start, second.block_ids[:2]) == (32, first.block_ids[:2])
    assert driver.n_held == 4


def test_a_finished_request_s_blocks_serve_the_next_and_one_token_is_left_to_compute() -> None:
    driver = make_driver()
    driver.add(make_request("a", range(48)))
    driver.run()
    driver.add(make_request("b", range(48)))
    plan = driver.step()
    assert plan is not None
    assert (plan.chunks[0].start, len(plan.chunks[0].token_ids)) == (32, 16)
    driver.run()
    usage = driver.outcome("b").usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (48, 32, 8)
    assert driver.outcome("a").token_ids == driver.outcome("b").token_ids


def test_c19_cached_tokens_are_the_request_s_whatever_n() -> None:
    driver = make_driver()
    driver.add(make_request("warm", range(64)))
    driver.run()
    driver.add(make_request("a", range(64), n=4, temperature=1.0))
    driver.run()
    usages = [driver.outcome("a", choice).usage for choice in range(4)]
    assert [(usage.prompt_tokens, usage.cached_tokens) for usage in usages if usage] == [(64, 48)] * 4


def test_c37_a_tenant_with_another_salt_finds_nothing() -> None:
    driver = make_driver(max_step_tokens=512)
    for request_id, salt in (("a", "A"), ("b", "B"), ("again", "A")):
        driver.add(make_request(request_id, range(512), salt=salt))
        driver.run()
    usages = [driver.outcome(request_id).usage for request_id in ("a", "b", "again")]
    assert [usage.cached_tokens for usage in usages if usage] == [0, 0, 496]


def test_resident_hashes_are_those_a_router_computes() -> None:
    driver = make_driver()
    driver.add(make_request("a", range(40), salt="A"))
    driver.run()
    scope = HashScope(block_size=16, model_digest="model", key=b"key", salt="A")
    expected = {block_hash[:8] for block_hash in block_hashes(range(40), scope)}
    assert expected <= set(driver.scheduler.load().resident)


@pytest.mark.parametrize("budget", [16, 64, 512])
def test_c39_cold_warm_and_any_chunking_give_the_same_ids(budget: int) -> None:
    request = make_request("a", range(100), max_tokens=20)
    expected = naive_generate(request, 200)[0].token_ids
    driver = make_driver(max_step_tokens=budget, policy=replace(POLICY, max_prefill_tokens=budget))
    for request_id in ("cold", "warm"):
        driver.add(replace(request, request_id=request_id))
        driver.run()
        assert driver.outcome(request_id).token_ids == expected


def test_c43_the_ids_are_the_same_alone_and_with_fifteen_others() -> None:
    request = make_request("a", range(30), max_tokens=20)
    driver = make_driver(n_blocks=200, max_sequences=16)
    for index in range(15):
        driver.add(make_request(f"other{index}", range(index, index + 20), max_tokens=5 + index, temperature=1.0))
    driver.add(request)
    driver.run()
    assert driver.outcome("a").token_ids == naive_generate(request, 200)[0].token_ids
