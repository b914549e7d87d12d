"""Text from token ids: the same for every way of cutting, right at characters, spaces and stops."""

import time
from collections.abc import Callable, Sequence

import pytest
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.vocabulary import vocabulary_of
from bakehouse_router.text.stream import TextStream
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import (
    BYTE_LEVEL,
    SENTENCEPIECE,
    TOKENIZERS,
    VOCABULARIES,
    any_ids,
    byte_ids,
    ids,
    sentencepiece,
)
from tokenizers import decoders


def _run(stream: TextStream, chunks: Sequence[Sequence[int]]) -> list[str]:
    pieces = []
    for chunk in chunks:
        if not stream.is_stopped:
            pieces.append(stream.feed(chunk))
    return [*pieces, stream.finish()]


def _one_by_one(token_ids: Sequence[int]) -> list[list[int]]:
    return [[token_id] for token_id in token_ids]


def _cut(token_ids: Sequence[int], size: int) -> list[Sequence[int]]:
    return [token_ids[begin : begin + size] for begin in range(0, len(token_ids), size)]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_joined_pieces_are_the_same_for_every_cutting(name: str) -> None:
    @given(any_ids(name), st.lists(st.integers(1, 7), max_size=40), st.booleans())
    def check(token_ids: list[int], sizes: list[int], has_stops: bool) -> None:
        stops = ("END", "the", "<|im_end|>", "é", "\ufffd\ufffd") if has_stops else ()
        chunks, rest = [], token_ids
        for size in sizes:
            chunks.append(rest[:size])
            rest = rest[size:]
        whole, cut = (TextStream(VOCABULARIES[name], stops=stops) for _ in range(2))
        assert "".join(_run(cut, [*chunks, rest])) == "".join(_run(whole, [token_ids]))
        assert (cut.is_stopped, cut.n_tokens) == (whole.is_stopped, whole.n_tokens)

    check()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_is_what_the_tokenizer_decodes_wherever_the_bytes_are_text(name: str) -> None:
    bytes_of = VOCABULARIES[name].bytes_of

    @given(any_ids(name))
    def check(token_ids: list[int]) -> None:
        try:
            b"".join(map(bytes_of, token_ids)).decode()
        except UnicodeDecodeError:
            return
        expected = TOKENIZERS[name].decode(token_ids, skip_special_tokens=True)
        assert "".join(_run(TextStream(VOCABULARIES[name]), _one_by_one(token_ids))) == expected

    check()


@given(st.binary(max_size=30))
def test_ill_formed_bytes_become_the_replacements_that_the_byte_level_decoder_gives(text: bytes) -> None:
    alphabet = {BYTE_LEVEL.bytes_of(index): index for index in range(1, 257)}
    token_ids = [alphabet[bytes([byte])] for byte in text]
    expected = TOKENIZERS["byte_level"].decode(token_ids)
    assert "".join(_run(TextStream(BYTE_LEVEL), _one_by_one(token_ids))) == expected


def test_c01_an_end_marker_made_of_ordinary_tokens_never_leaks() -> None:
    stream = TextStream(SENTENCEPIECE, stops=("<|im_end|>",))
    assert _run(stream, _one_by_one(ids("a", "<", "|im", "_end|>"))) == ["a", "", "", "", ""]
    assert stream.is_stopped


def test_c02_only_a_tail_that_may_become_a_stop_is_held_back() -> None:
    stream = TextStream(SENTENCEPIECE, stops=("END",))
    assert _run(stream, _one_by_one(ids("a", "b", "a", "E", "a"))) == ["a", "b", "a", "", "Ea", ""]


def test_c03_held_text_is_flushed_at_an_end_by_length() -> None:
    stream = TextStream(SENTENCEPIECE, stops=("ENDEND",))
    assert "".join(_run(stream, _one_by_one(ids("a", "E", "ND")))) == "aEND"
    assert (stream.is_stopped, stream.n_tokens) == (False, 3)


def test_c04_tokens_after_the_one_that_completes_the_stop_do_not_count() -> None:
    stream = TextStream(SENTENCEPIECE, stops=("END",))
    assert stream.feed(ids("a", "END", "b", "b")) == "a"
    assert (stream.is_stopped, stream.n_tokens) == (True, 2)


def test_c05_ten_thousand_half_characters_cost_linear_time() -> None:
    def elapsed_s(n_tokens: int) -> float:
        stream, begun = TextStream(SENTENCEPIECE, stops=("END",)), time.process_time()
        text = "".join(_run(stream, _one_by_one(byte_ids(b"\xf0") * n_tokens)))
        assert text == "\ufffd" * n_tokens
        return time.process_time() - begun

    elapsed_s(100)
    assert elapsed_s(10_000) < 2.0  # measured: 0.02 s; quadratic would be minutes


def test_c06_a_character_split_over_tokens_is_one_character() -> None:
    pieces = _run(TextStream(SENTENCEPIECE), _one_by_one([*byte_ids("ď".encode()), *ids("a", "b", "é")]))
    assert pieces == ["", "ď", "a", "b", "é", ""]


def test_c06_a_character_cut_off_by_the_end_is_one_replacement() -> None:
    assert _run(TextStream(SENTENCEPIECE), _one_by_one(byte_ids(b"\xf0\x9f\x98")))[-1] == "\ufffd"


@pytest.mark.parametrize("interval", [1, 2, 8])
def test_c07_spaces_survive_any_flush_interval(interval: int) -> None:
    token_ids = ids("▁logs", "▁and") * 10
    text = "".join(_run(TextStream(SENTENCEPIECE), _cut(token_ids, interval)))
    assert text == TOKENIZERS["sentencepiece"].decode(token_ids)
    assert text.startswith("logs and logs")


def test_c08_one_leading_space_stays() -> None:
    assert "".join(_run(TextStream(SENTENCEPIECE), _one_by_one(ids("▁", "▁leading", "▁x")))) == " leading x"


def test_c08_output_that_continues_a_text_keeps_its_first_space() -> None:
    stream = TextStream(SENTENCEPIECE, continues_text=True)
    assert "".join(_run(stream, _one_by_one(ids("▁leading", "▁x")))) == " leading x"


def test_c09_text_is_cut_at_the_first_occurrence() -> None:
    stream = TextStream(SENTENCEPIECE, stops=("END",))
    assert "".join(_run(stream, [ids("a", "▁", "END", "b", "END")])) == "a "


def test_a_stop_before_the_least_number_of_tokens_is_text() -> None:
    stream = TextStream(SENTENCEPIECE, stops=("END",), min_tokens=3)
    assert "".join(_run(stream, _one_by_one(ids("a", "END", "b", "END", "a")))) == "aENDb"
    assert stream.n_tokens == 4


def test_special_tokens_and_unknown_ids_have_no_text() -> None:
    stream = TextStream(SENTENCEPIECE)
    assert "".join(_run(stream, [[*ids("<s>", "a", "</s>"), 10**6]])) == "a"


@pytest.mark.parametrize(
    "decoder",
    [None, decoders.WordPiece, decoders.BPEDecoder, lambda: decoders.Sequence([decoders.Strip(" ", 1, 0)])],
)
def test_a_decoder_that_cannot_work_token_by_token_is_refused(
    decoder: Callable[[], decoders.Decoder] | None,
) -> None:
    tokenizer = sentencepiece()
    tokenizer.decoder = None if decoder is None else decoder()
    with pytest.raises(StartupError, match="decoder"):
        vocabulary_of(tokenizer)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_the_metaspace_decoder_is_followed(scheme: str) -> None:
    tokenizer = sentencepiece()
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    token_ids = ids("▁logs", "▁and", "a")
    text = "".join(_run(TextStream(vocabulary_of(tokenizer)), _one_by_one(token_ids)))
    assert text == tokenizer.decode(token_ids)


# --- stop ids and stops that are kept ------------------------------------------------------------------------


@pytest.mark.parametrize("reports_tokens", [False, True])
@pytest.mark.parametrize(("keeps_stop", "expected"), [(False, "ab"), (True, "abé")])
def test_a_stop_id_ends_the_text_wherever_it_stands(keeps_stop: bool, expected: str, reports_tokens: bool) -> None:
    stream = TextStream(
        SENTENCEPIECE, stop_token_ids=tuple(ids("é")), keeps_stop=keeps_stop, reports_tokens=reports_tokens
    )
    assert stream.feed(ids("a", "b", "é", "b")) + stream.finish() == expected
    assert (stream.is_stopped, stream.n_tokens) == (True, 3)


def test_a_special_stop_id_has_no_text_even_where_stops_are_kept() -> None:
    stream = TextStream(SENTENCEPIECE, stop_token_ids=tuple(ids("</s>")), keeps_stop=True)
    assert stream.feed(ids("a", "</s>")) + stream.finish() == "a"


def test_text_held_for_a_stop_string_is_flushed_before_a_stop_id() -> None:
    stream = TextStream(SENTENCEPIECE, stops=("ENDEND",), stop_token_ids=tuple(ids("é")))
    assert stream.feed(ids("a", "END", "é")) == "a"
    assert stream.finish() == "END"


def test_a_kept_stop_holds_nothing_back() -> None:
    stream = TextStream(SENTENCEPIECE, stops=("END",), keeps_stop=True)
    assert _run(stream, _one_by_one(ids("a", "E", "b", "E", "ND"))) == ["a", "E", "b", "E", "ND", ""]
    assert stream.is_stopped


@pytest.mark.parametrize("reports_tokens", [False, True])
def test_a_text_that_is_enough_ends_at_its_token(reports_tokens: bool) -> None:
    seen: list[str] = []

    def is_over(text: str) -> bool:
        seen.append(text)
        return "}" in "".join(seen)

    token_ids = byte_ids(b"a}b")
    stream = TextStream(SENTENCEPIECE, reports_tokens=reports_tokens, is_over=is_over)
    assert _run(stream, [token_ids]) == ["a}", ""]
    assert (stream.is_stopped, stream.n_tokens, seen) == (True, 2, ["a", "}"])


def test_text_held_back_to_the_end_may_be_enough() -> None:
    stream = TextStream(SENTENCEPIECE, stops=("}X",), is_over=lambda text: text == "}")
    assert stream.feed(byte_ids(b"a}")) == "a"
    assert not stream.is_stopped
    assert stream.finish() == "}"
    assert stream.is_stopped
