"""Prompts to ids: bounds before encoding, words that must not be said, where an echo's tokens begin."""

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from bakehouse_replica.core.errors import ContextTooLong, InvalidRequest
from bakehouse_replica.vocabulary import vocabulary_of
from bakehouse_router.calls import Call
from bakehouse_router.prompts import EncodedCall, PromptEncoder, decoded, token_offsets
from bakehouse_router.text.model_text import ModelText
from gateways import END_ID, chat, completion, ids_of, tiny_card
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

CARD = tiny_card(max_model_len=1000)


def _encoded(text: ModelText, call: Call) -> EncodedCall:
    return asyncio.run(PromptEncoder(text).encode(call, CARD))


class _NeverEncodes:
    """Refuses to work: what is too long must be known before."""

    def __init__(self, text: ModelText) -> None:
        self.vocabulary = text.tokenizer.vocabulary
        self.min_tokens = text.tokenizer.min_tokens

    def encode_raw(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        raise AssertionError("this was to be refused by its length")

    encode_rendered = encode_raw


TOO_LONG: list[tuple[Call, str]] = [
    (completion(prompts=("a" * 8_000_000,)), "prompt has 8000000 characters, which are at least"),
    (completion(prompts=("ok", "é" * 10_000)), "prompt has 10000 characters"),
    (completion(prompts=((5,) * 3_000_000,)), "the prompt has 3000000 tokens"),
    (chat("a" * 100_000), "messages has 100000 characters"),
    (chat(*"a" * 100_000), "messages has 100000 messages"),
    (chat(*["word " * 10] * 900), "messages has 44100 characters"),
]


@pytest.mark.parametrize(("call", "complaint"), TOO_LONG, ids=[complaint for _, complaint in TOO_LONG])
def test_what_cannot_fit_is_refused_without_encoding_it(text: ModelText, call: Call, complaint: str) -> None:
    tokenizer = _NeverEncodes(text)
    with pytest.raises(ContextTooLong, match=complaint) as refused:
        _encoded(replace(text, tokenizer=tokenizer), call)  # type: ignore[arg-type]
    assert "context" in refused.value.message
    assert "1000 tokens" in refused.value.message


def test_half_of_a_surrogate_pair_is_no_text(text: ModelText) -> None:
    for call in (completion(prompts=("a\ud800",)), chat("a\ud800")):
        with pytest.raises(InvalidRequest, match="surrogate"):
            _encoded(text, call)


def test_bad_words_are_encoded_as_they_begin_a_text_and_as_they_follow_a_space(text: ModelText) -> None:
    encoded = _encoded(text, completion(bad_words=("hi", " hi", "you")))
    assert encoded.bad_words == (ids_of("hi"), ids_of(" hi"), ids_of("you"), ids_of(" you"))


def test_many_messages_are_encoded_like_few(text: ModelText) -> None:
    contents = ["a"] * 300
    card = tiny_card(max_model_len=10_000)
    (prompt,) = asyncio.run(PromptEncoder(text).encode(chat(*contents), card)).prompts
    assert prompt == text.chat_template.encode(chat(*contents).messages)


async def test_the_event_loop_goes_on_while_a_long_prompt_is_encoded(text: ModelText) -> None:
    """By the times that both threads had on a processor, whoever else wants those."""
    loop_thread = threading.get_ident()
    of_loop = time.pthread_getcpuclockid(loop_thread)
    loop_s = encoding_s = 0.0

    class Timed(_NeverEncodes):
        def encode_raw(self, prompt: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
            nonlocal loop_s, encoding_s
            assert threading.get_ident() != loop_thread
            loop_begun_s, begun_s = time.clock_gettime(of_loop), time.thread_time()
            token_ids = text.tokenizer.encode_raw(prompt, add_special_tokens=add_special_tokens)
            loop_s += time.clock_gettime(of_loop) - loop_begun_s
            encoding_s += time.thread_time() - begun_s
            return token_ids

    timed = PromptEncoder(replace(text, tokenizer=Timed(text)))  # type: ignore[arg-type]
    call = completion(prompts=("word " * 240_000,))
    encoding = asyncio.create_task(timed.encode(call, tiny_card(max_model_len=2_000_000)))
    while not encoding.done():
        await asyncio.sleep(0)
    await encoding
    # Measured: 1.0 of it, and 0.14 beside work in C that keeps the GIL.
    assert loop_s > 0.3 * encoding_s > 0.0


# --- offsets -------------------------------------------------------------------------------------------------


def _sentencepiece() -> Tokenizer:
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "é", "b"]
    merges = [("▁", "a")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    return tokenizer


SENTENCEPIECE = _sentencepiece()
VOCABULARY = vocabulary_of(SENTENCEPIECE)


def _offsets_by_definition(token_ids: Sequence[int], text: str) -> tuple[int, ...]:
    """Complete characters of the text that stand before each token; the text has one space more for the model."""
    shown = (" " + text).encode()
    offsets, begin = [], 0
    for token_id in token_ids:
        n_complete = len(shown[:begin].decode("utf-8", "ignore"))
        offsets.append(max(n_complete - 1, 0))
        begin += len(VOCABULARY.bytes_of(token_id))
    return tuple(offsets)


@given(st.text("ab é漢\U0001f600", min_size=1, max_size=12))
def test_prompt_tokens_begin_after_the_characters_before_them(text: str) -> None:
    token_ids = SENTENCEPIECE.encode(text).ids
    assert token_offsets(token_ids, text, VOCABULARY) == _offsets_by_definition(token_ids, text)


@pytest.mark.parametrize("n_tokens", [3, 3000])
def test_an_echo_shows_the_prompt_and_where_its_tokens_begin(text: ModelText, n_tokens: int) -> None:
    call = completion(prompts=(ids_of("a") * n_tokens, "b" * n_tokens), echoes=True, reports_tokens=True)
    card = tiny_card(max_model_len=10_000)
    by_ids, by_text = asyncio.run(PromptEncoder(text).encode(call, card)).echoes
    assert (by_ids.text, by_ids.offsets) == ("a" * n_tokens, tuple(range(n_tokens)))
    assert (by_text.text, by_text.offsets) == ("b" * n_tokens, (0, *range(n_tokens)))


def test_nothing_is_echoed_that_nobody_asked_for(text: ModelText) -> None:
    assert _encoded(text, completion(prompts=("a",), reports_tokens=True)).echoes == ()
    (echo,) = _encoded(text, completion(prompts=("a",), echoes=True)).echoes
    assert (echo.text, echo.offsets) == ("a", ())


def test_special_tokens_stand_where_the_text_spells_them(text: ModelText) -> None:
    vocabulary = text.tokenizer.vocabulary
    prompt = "a<|end|>b"
    token_ids = text.tokenizer.encode_raw(prompt)
    assert token_ids == (0, *ids_of("a"), END_ID, *ids_of("b"))
    assert token_offsets(token_ids, prompt, vocabulary) == (0, 0, 1, 8)


def test_ids_read_as_an_answer_of_them_would() -> None:
    assert decoded(SENTENCEPIECE.encode("a é漢").ids, VOCABULARY) == "a é漢"
    assert decoded([*SENTENCEPIECE.encode("a").ids, 2 + 0xF0], VOCABULARY) == "a\ufffd"
