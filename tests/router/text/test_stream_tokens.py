"""Tokens beside their text: released together at token borders, counted and placed for every way of cutting."""

import codecs
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from bakehouse_replica.core.types import TokenLogprob
from bakehouse_replica.vocabulary import Vocabulary
from bakehouse_router.text.stream import TextStream
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import (
    BYTE_LEVEL,
    IDS_BY_PIECE,
    SENTENCEPIECE,
    TOKENIZERS,
    VOCABULARIES,
    any_ids,
    byte_ids,
    ids,
)


def _one_by_one(token_ids: Sequence[int]) -> list[list[int]]:
    return [[token_id] for token_id in token_ids]


Told = tuple[str, list[int]]


def _tell(stream: TextStream, chunks: Sequence[Sequence[int]]) -> list[Told]:
    """What each chunk, and then the end, releases: text and the ids of the tokens."""
    told = [(stream.feed(chunk), [token.token_id for token in stream.take_tokens()]) for chunk in chunks]
    return [*told, (stream.finish(), [token.token_id for token in stream.take_tokens()])]


def _released_ids(told: Sequence[Told]) -> list[int]:
    return [token_id for _, token_ids in told for token_id in token_ids]


def test_text_is_released_at_token_borders_where_tokens_are_reported() -> None:
    stream = TextStream(BYTE_LEVEL, stops=("thex",), reports_tokens=True)
    the, a = IDS_BY_PIECE["byte_level"]["Ġthe"], IDS_BY_PIECE["byte_level"]["a"]
    assert _tell(stream, [[a], [the], [a]]) == [("a", [a]), ("", []), (" thea", [the, a]), ("", [])]


def test_an_unfinished_character_waits_for_the_token_that_finishes_it() -> None:
    first, second = byte_ids("é".encode())
    (a,) = ids("a")
    stream = TextStream(SENTENCEPIECE, reports_tokens=True)
    assert _tell(stream, [[a, first], [second]]) == [("a", [a]), ("é", [first, second]), ("", [])]


def test_a_token_between_two_characters_that_are_not_whole_waits_with_all_of_its_text() -> None:
    half, letter_and_half, rest = b"\xf0", b"d\xc3", b"\xa9"
    stream = TextStream(Vocabulary({0: half, 1: letter_and_half, 2: rest}, {}), reports_tokens=True)
    assert _tell(stream, [[0], [1], [2]]) == [("", []), ("\ufffd", [0]), ("d\u00e9", [1, 2]), ("", [])]


def test_half_a_surrogate_pair_is_released_with_both_of_its_replacements() -> None:
    stream = TextStream(Vocabulary({0: b"\xed", 1: b"\xbc", 2: b"\xc2", 3: b"\xa9"}, {}), reports_tokens=True)
    told = _tell(stream, [[0], [1], [2], [3]])
    assert told == [("", []), ("", []), ("\ufffd\ufffd", [0, 1]), ("\u00a9", [2, 3]), ("", [])]


def test_tokens_that_share_characters_are_released_together() -> None:
    text = "\u00e9\u00fc".encode()
    stream = TextStream(Vocabulary({0: text[:1], 1: text[1:3], 2: text[3:]}, {}), reports_tokens=True)
    assert _tell(stream, [[0], [1], [2]]) == [("", []), ("", []), (text.decode(), [0, 1, 2]), ("", [])]


def test_each_half_character_of_many_is_released_once_it_is_known_to_be_none() -> None:
    half = byte_ids(b"\xf0")
    told = _tell(TextStream(SENTENCEPIECE, reports_tokens=True), [half] * 4)
    assert told == [("", []), *[("\ufffd", half)] * 4]


@pytest.mark.parametrize(
    ("keeps_stop", "text", "offsets"), [(False, "ab", [5, 6, 7, 7]), (True, "abEND", [5, 6, 7, 8])]
)
def test_the_token_that_completes_a_stop_is_told_at_the_end_of_the_text(
    keeps_stop: bool, text: str, offsets: list[int]
) -> None:
    stream = TextStream(SENTENCEPIECE, stops=("END",), keeps_stop=keeps_stop, reports_tokens=True, first_offset=5)
    released = stream.feed(ids("a", "b")) + stream.feed(ids("E", "ND", "b")) + stream.finish()
    tokens = stream.take_tokens()
    assert released == text
    assert [token.token_id for token in tokens] == ids("a", "b", "E", "ND")
    assert [token.text_offset for token in tokens] == offsets


def test_tokens_carry_their_log_probabilities() -> None:
    logprobs = [TokenLogprob(logprob=-float(index), rank=1) for index in range(3)]
    stream = TextStream(SENTENCEPIECE, stops=("END",), reports_tokens=True)
    stream.feed(ids("a", "END", "b"), logprobs)
    assert [token.logprob for token in stream.take_tokens()] == logprobs[:2]


def test_c05_ten_thousand_half_characters_cost_linear_time_with_tokens_too() -> None:
    begun = time.process_time()
    stream = TextStream(SENTENCEPIECE, stops=("\ufffdEND",), reports_tokens=True)
    told = _tell(stream, _one_by_one(byte_ids(b"\xf0") * 10_000))
    assert "".join(text for text, _ in told) == "\ufffd" * 10_000
    assert len(_released_ids(told)) == 10_000
    assert time.process_time() - begun < 3.0  # measured: 0.05 s; quadratic would be minutes


@dataclass(frozen=True)
class _Case:
    """A stream to be run in any cutting."""

    name: str
    token_ids: list[int]
    options: dict[str, object]

    def stream(self, *, reports_tokens: bool) -> TextStream:
        return TextStream(VOCABULARIES[self.name], reports_tokens=reports_tokens, **self.options)  # type: ignore[arg-type]

    def spelled(self, token_ids: Sequence[int]) -> str:
        text = b"".join(map(VOCABULARIES[self.name].bytes_of, token_ids)).decode("utf-8", "replace")
        strips = VOCABULARIES[self.name].strips_first_space and not self.options["continues_text"]
        return text.removeprefix(" ") if strips else text

    def n_complete(self, token_ids: Sequence[int]) -> int:
        """Complete characters of these ids' text."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(b"".join(map(VOCABULARIES[self.name].bytes_of, token_ids)))
        strips = VOCABULARIES[self.name].strips_first_space and not self.options["continues_text"]
        return len(text.removeprefix(" ") if strips else text)


@st.composite
def _cases(draw: st.DrawFn) -> _Case:
    name = draw(st.sampled_from(sorted(TOKENIZERS)))
    text = draw(st.text("abcEND é漢\U0001f600", max_size=12)).encode() + draw(st.binary(max_size=6))
    by_bytes = {VOCABULARIES[name].bytes_of(index): index for index in range(TOKENIZERS[name].get_vocab_size())}
    spelled = [by_bytes[bytes([byte])] for byte in text]  # characters fall apart into tokens
    token_ids = draw(st.permutations(spelled) if draw(st.booleans()) else st.just(spelled))
    token_ids = [*token_ids, *draw(any_ids(name))] if draw(st.booleans()) else list(token_ids)
    stops = draw(st.lists(st.text("aEND é\ufffd", min_size=1, max_size=3), max_size=3, unique=True))
    options: dict[str, object] = {
        "stops": tuple(stops),
        "stop_token_ids": tuple(draw(st.lists(st.integers(0, 270), max_size=1))),
        "keeps_stop": draw(st.booleans()),
        "min_tokens": draw(st.integers(0, 4)),
        "continues_text": draw(st.booleans()),
        "first_offset": draw(st.sampled_from([0, 3])),
    }
    return _Case(name, token_ids, options)


def _chunks(token_ids: list[int], sizes: list[int]) -> list[list[int]]:
    chunks = []
    for size in sizes:
        chunks.append(token_ids[:size])
        token_ids = token_ids[size:]
    return [*chunks, token_ids]


@settings(max_examples=400)
@given(_cases(), st.lists(st.integers(0, 5), max_size=12))
def test_i1_text_and_count_are_the_same_for_every_cutting_with_and_without_tokens(
    case: _Case, sizes: list[int]
) -> None:
    whole = case.stream(reports_tokens=False)
    text = whole.feed(case.token_ids) + whole.finish()
    for reports_tokens in (False, True):
        cut = case.stream(reports_tokens=reports_tokens)
        told = _tell(cut, _chunks(case.token_ids, sizes))
        assert "".join(piece for piece, _ in told) == text
        assert (cut.n_tokens, cut.is_stopped) == (whole.n_tokens, whole.is_stopped)
        assert _released_ids(told) == (case.token_ids[: cut.n_tokens] if reports_tokens else [])


@settings(max_examples=400)
@given(_cases())
def test_i1_ids_told_so_far_spell_the_text_so_far(case: _Case) -> None:
    stream, text, told = case.stream(reports_tokens=True), "", list[int]()
    for token_id in case.token_ids:
        text += stream.feed([token_id])
        told += [token.token_id for token in stream.take_tokens()]
        if stream.is_stopped:
            return
        assert text == case.spelled(told)
    text += stream.finish()
    told += [token.token_id for token in stream.take_tokens()]
    if not stream.is_stopped:
        assert (text, told) == (case.spelled(told), case.token_ids)


@settings(max_examples=400)
@given(_cases())
def test_a_token_stands_after_the_characters_that_were_complete_before_it(case: _Case) -> None:
    stream = case.stream(reports_tokens=True)
    text = stream.feed(case.token_ids) + stream.finish()
    first_offset = case.options["first_offset"]
    assert isinstance(first_offset, int)
    offsets = [token.text_offset - first_offset for token in stream.take_tokens()]
    begins = [case.n_complete(case.token_ids[:index]) for index in range(stream.n_tokens)]
    assert offsets == [min(begin, len(text)) for begin in begins]
