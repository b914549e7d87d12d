"""Where a JSON value ends, and what a JSON string stands for."""

import json

import pytest
from bakehouse_router.text.tools.json_scanner import ValueScanner, unescape
from hypothesis import given
from hypothesis import strategies as st

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    max_leaves=8,
)


def _n_scanned(pieces: list[str]) -> int:
    scanner = ValueScanner()
    n_scanned = 0
    for piece in pieces:
        n_scanned += scanner.scan(piece, 0)
    assert scanner.is_complete
    return n_scanned


@given(value=JSON_VALUES, after=st.sampled_from([",", "}", "]", " ", "\n"]), is_ascii=st.booleans())
def test_a_value_ends_where_it_ends_however_it_is_cut(value: object, after: str, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    assert _n_scanned([text + after]) == len(text)
    assert _n_scanned(list(text + after)) == len(text)


@given(text=st.text(), is_ascii=st.booleans())
def test_unescaping_reverses_escaping(text: str, is_ascii: bool) -> None:
    assert unescape(json.dumps(text, ensure_ascii=is_ascii)[1:-1]) == text


@given(text=st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"])), n=st.integers(0, 100))
def test_a_body_that_is_cut_off_stands_for_a_prefix(text: str, n: int) -> None:
    assert text.startswith(unescape(json.dumps(text)[1:-1][:n]))


@pytest.mark.parametrize(
    ("body", "text"),
    [(r"\ud83d", "�"), (r"\ude00\ud83d", "��"), (r"a\x", r"a\x"), (r"\q and \n", r"\q and \n"), ("a\nb", "a\nb")],
)
def test_bodies_that_json_does_not_have_stand_for_something_printable(body: str, text: str) -> None:
    assert unescape(body) == text
