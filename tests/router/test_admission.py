"""The gateway's queue: what it takes, what it refuses, and what it says about coming back."""

import pytest
from bakehouse_replica.core.errors import Overloaded
from bakehouse_router.admission import WaitingQueue


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> WaitingQueue:
    return WaitingQueue(max_requests=4, max_tokens=100, clock=clock)


def test_requests_are_taken_up_to_the_limit_and_refused_with_it(queue: WaitingQueue) -> None:
    queue.enter(4, 10)
    with pytest.raises(Overloaded, match=r"4 requests are waiting here; with 1 more .* limit of 4"):
        queue.enter(1, 1)
    assert (queue.n_requests, queue.n_tokens) == (4, 10)


def test_prompt_tokens_are_taken_up_to_the_limit_and_refused_with_it(queue: WaitingQueue) -> None:
    queue.enter(1, 60)
    queue.enter(1, 40)
    with pytest.raises(Overloaded, match=r"100 prompt tokens are waiting here; with 1 more .* limit of 100"):
        queue.enter(1, 1)


def test_other_limits_hold_for_who_comes_next_and_who_waits_stays(queue: WaitingQueue) -> None:
    queue.enter(4, 10)
    queue.limit(max_requests=2, max_tokens=100)
    with pytest.raises(Overloaded, match=r"4 requests are waiting here; with 1 more .* limit of 2"):
        queue.enter(1, 1)
    queue.limit(max_requests=5, max_tokens=11)
    queue.enter(1, 1)
    with pytest.raises(Overloaded, match="limit of 5"):
        queue.enter(1, 1)
    assert (queue.n_requests, queue.n_tokens) == (5, 11)


def test_an_empty_queue_takes_a_call_of_any_size(queue: WaitingQueue) -> None:
    place = queue.enter(64, 5000)
    place.leave()
    assert (queue.n_requests, queue.n_tokens) == (0, 0)


def test_leaving_makes_room_once(queue: WaitingQueue) -> None:
    place = queue.enter(3, 90)
    queue.enter(1, 10)
    place.leave()
    place.leave()
    assert (queue.n_requests, queue.n_tokens) == (1, 10)
    queue.enter(3, 90)


@pytest.mark.parametrize(("n_left_in_10_s", "expected_s"), [(1, 30.0), (10, 3.0), (100, 1.0)])
def test_retry_after_is_the_time_the_queue_needs_at_its_pace(
    clock: Clock, n_left_in_10_s: int, expected_s: float
) -> None:
    queue = WaitingQueue(max_requests=1000, max_tokens=1000, clock=clock)
    for _ in range(n_left_in_10_s):
        queue.enter(1, 1).leave()
    clock.now_s += 10
    for _ in range(3):
        queue.enter(1, 1)
    assert queue.retry_after_s() == expected_s


def test_retry_after_is_short_at_first_and_long_where_nothing_has_moved(clock: Clock, queue: WaitingQueue) -> None:
    assert queue.retry_after_s() == 1.0
    queue.enter(1, 1).leave()
    clock.now_s += 100
    queue.enter(1, 1)
    assert queue.retry_after_s() == 60.0
