"""Stop strings: what is released, what is held back, and where the text is cut."""

from itertools import pairwise

import pytest
from bakehouse_router.text.stops import StopMatcher
from hypothesis import given
from hypothesis import strategies as st

stop_sets = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4, unique=True).map(tuple)


def _cut_by_definition(text: str, stops: tuple[str, ...]) -> str | None:
    """The text before the stop that completes first, the longest of those; None where none completes."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)]
    return None


def _pieces(text: str, cuts: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[begin:end] for begin, end in pairwise(bounds)]


@given(st.text("abcd", max_size=40), stop_sets, st.lists(st.integers(0, 40), max_size=8))
def test_text_ends_before_the_stop_that_completes_first_however_it_is_cut(
    text: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    matcher = StopMatcher(stops)
    released = ""
    for piece in _pieces(text, cuts):
        released += matcher.feed(piece)
        if matcher.is_stopped:
            break
    expected = _cut_by_definition(text, stops)
    assert matcher.is_stopped == (expected is not None)
    assert released + matcher.flush() == (text if expected is None else expected)


@given(st.text("abcd", max_size=30), stop_sets)
def test_held_back_is_exactly_the_longest_tail_that_may_still_become_a_stop(
    text: str, stops: tuple[str, ...]
) -> None:
    matcher = StopMatcher(stops)
    released = ""
    for end, character in enumerate(text, start=1):
        released += matcher.feed(character)
        if matcher.is_stopped:
            return
        tails = [length for stop in stops for length in range(1, len(stop)) if text[:end].endswith(stop[:length])]
        assert released == text[: end - max(tails, default=0)]


def test_a_short_stop_inside_a_longer_one_wins_because_it_completes_first() -> None:
    matcher = StopMatcher(("abcd", "bc"))
    assert matcher.feed("xabcd") == "xa"
    assert matcher.is_stopped


def test_a_stop_that_may_not_stop_yet_is_text_like_any_other() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.feed("aEND", may_stop=False) + matcher.feed("b") == "aENDb"
    assert matcher.feed("END") == ""
    assert matcher.is_stopped


def test_text_after_the_stop_is_refused() -> None:
    matcher = StopMatcher(("x",))
    matcher.feed("x")
    with pytest.raises(AssertionError, match="after the stop"):
        matcher.feed("y")


@given(st.text("abcd", max_size=40), stop_sets)
def test_a_kept_stop_is_the_end_of_the_text_and_nothing_is_held_back(text: str, stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops, keeps_stop=True)
    for end, character in enumerate(text, start=1):
        assert matcher.feed(character) == character
        assert matcher.is_stopped == (_cut_by_definition(text[:end], stops) is not None)
        if matcher.is_stopped:
            return
    assert matcher.flush() == ""
