"""Virtual time goes from event to event."""

import pytest
from bakehouse_cluster.plan.clock import VirtualClock


def test_events_happen_in_order_of_time_and_then_of_asking() -> None:
    clock, seen = VirtualClock(), list[tuple[str, float]]()
    for name, moment in (("c", 2.0), ("a", 1.0), ("b", 1.0)):
        clock.at(moment, lambda name=name: seen.append((name, clock())))  # type: ignore[misc]
    clock.run()
    assert seen == [("a", 1.0), ("b", 1.0), ("c", 2.0)]


def test_an_event_may_ask_for_others_and_the_run_ends_with_the_last() -> None:
    clock, seen = VirtualClock(), list[float]()

    def again() -> None:
        seen.append(clock())
        if clock() < 3:
            clock.at(clock() + 1, again)

    clock.at(0.5, again)
    clock.run()
    assert seen == [0.5, 1.5, 2.5, 3.5]


def test_nothing_is_done_in_the_past() -> None:
    clock = VirtualClock()
    clock.at(1.0, lambda: clock.at(0.5, lambda: None))
    with pytest.raises(AssertionError, match=r"0\.5 has passed"):
        clock.run()
