"""The allocators that PagedAttention was compared with, as `cluster/benchmarks/papers` plays them."""

import pytest
from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Draw, FinishReason, Request, Sampled, StepPlan, StepResult
from benchmarks.papers.reserving import (
    BuddyAllocator,
    ReservingScheduler,
    reserve_max,
    reserve_oracle,
    reserve_pow2,
)
from hypothesis import given
from hypothesis import strategies as st


def request_of(n_prompt: int, n_output: int | None, request_id: str = "r", n: int = 1) -> Request:
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=n_output, n=n)
    return Request(request_id=request_id, prompt_ids=(1,) * n_prompt, params=params)


def result_of(plan: StepPlan) -> StepResult:
    draw = Draw(token_ids=(7,))
    sampled = tuple(Sampled(sequence_id=chunk.sequence_id, draws=(draw,)) for chunk in plan.chunks)
    return StepResult(step=plan.step, sampled=sampled, elapsed_s=0.0)


@given(st.integers(1, 300), st.lists(st.tuples(st.integers(1, 80), st.integers(0, 9)), max_size=40))
def test_ranges_are_disjoint_long_enough_and_join_again(n_slots: int, asked: list[tuple[int, int]]) -> None:
    allocator, held = BuddyAllocator(n_slots), list[tuple[int, int]]()
    for n_wanted, which in asked:
        place = allocator.allocate(n_wanted)
        if place is not None:
            assert n_wanted <= place[1] < 2 * n_wanted
            held.append(place)
        elif held:
            allocator.release(*held.pop(which % len(held)))
        taken = [slot for begin, size in held for slot in range(begin, begin + size)]
        assert len(set(taken)) == len(taken)
        assert not taken or max(taken) < n_slots
    for place in held:
        allocator.release(*place)
    whole = 1 << (n_slots.bit_length() - 1)
    assert allocator.allocate(whole) == (0, whole)


@pytest.mark.parametrize(
    ("n_prompt", "n_output", "expected"),
    [(7, 3, (2048, 11, 10)), (100, 25, (2048, 132, 125)), (100, 32, (2048, 132, 132)), (1, 1, (2048, 2, 2))],
)
def test_reservations(n_prompt: int, n_output: int, expected: tuple[int, int, int]) -> None:
    """25 tokens of output are given 32, as in section 6.1 of the paper."""
    reserves = (reserve_max, reserve_pow2, reserve_oracle)
    assert tuple(reserve(n_prompt, n_output) for reserve in reserves) == expected


def test_requests_wait_for_a_range_in_order_and_leave_when_they_are_complete() -> None:
    scheduler = ReservingScheduler(n_slots=64, reserve=reserve_oracle, max_step_tokens=50, max_sequences=4)
    for request_id, n_prompt, n_output in (("a", 30, 2), ("b", 10, 3), ("c", 30, 1), ("d", 1, 1)):
        scheduler.add(request_of(n_prompt, n_output, request_id), 0.0)
    ends = []
    for step in range(6):
        plan = scheduler.plan(0.0)
        assert plan is not None
        deltas = scheduler.apply(result_of(plan), 0.0)
        ends += [(step, delta.request_id) for delta in deltas if delta.finish is FinishReason.LENGTH]
        if not scheduler.has_work:
            break
    # c waits for the range of a, and d, for which there is room, waits behind c.
    assert ends == [(1, "a"), (2, "b"), (2, "c"), (2, "d")]
    assert scheduler.plan(0.0) is None


@pytest.mark.parametrize(
    "request_",
    [request_of(40, 30), request_of(51, 1), request_of(5, None), request_of(5, 0), request_of(5, 2, n=2)],
)
def test_what_can_never_be_placed_is_refused(request_: Request) -> None:
    scheduler = ReservingScheduler(n_slots=64, reserve=reserve_oracle, max_step_tokens=50, max_sequences=4)
    with pytest.raises(InvalidRequest):
        scheduler.add(request_, 0.0)
    assert not scheduler.has_work
