"""The least number of tokens of a text: never more than it has, and known for the usual tokenizers."""

from collections.abc import Callable

import pytest
from bakehouse_replica.vocabulary import vocabulary_of
from bakehouse_router.text.token_bound import TokenBound, token_bound
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def _byte_level(missing: str = "") -> Tokenizer:
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(missing))
    vocab = {token: index for index, token in enumerate([*alphabet, "aa", "aaaa"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("a", "a"), ("aa", "aa")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def _sentencepiece(byte_tokens: list[str] = BYTE_TOKENS) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(["<unk>", *byte_tokens, "▁", "a", "▁a"])}
    tokenizer = Tokenizer(
        models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=bool(byte_tokens), fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _with(tokenizer: Tokenizer, **parts: object) -> Tokenizer:
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def _bound(tokenizer: Tokenizer) -> TokenBound:
    return token_bound(tokenizer, vocabulary_of(tokenizer))


USUAL = {
    "byte_level": _byte_level(),
    "byte_level_without_a_byte": _byte_level(missing="Ă"),  # which stands for 0x02
    "composing": _with(_byte_level(), normalizer=normalizers.NFC()),
    "sentencepiece": _sentencepiece(),
}


@pytest.mark.parametrize("name", USUAL)
def test_a_text_never_has_fewer_tokens(name: str) -> None:
    tokenizer, bound = USUAL[name], _bound(USUAL[name])

    @given(st.text(st.sampled_from("a \x02é漢\u1112\u1161\u11ab e\u0301"), max_size=60))
    def check(text: str) -> None:
        text = text.replace("e", "<|end|>") if "é" in text else text
        assert bound.min_tokens(text) <= len(tokenizer.encode(text).ids)

    check()


@pytest.mark.parametrize("name", USUAL)
def test_for_usual_tokenizers_a_bound_is_known(name: str) -> None:
    assert _bound(USUAL[name]).min_tokens("a" * 10_000) >= 10_000 // 4 // 12


UNUSUAL: dict[str, Callable[[], Tokenizer]] = {
    "unknown characters are one token": lambda: _sentencepiece(byte_tokens=[]),
    "a normaliser drops text": lambda: _with(_byte_level(), normalizer=normalizers.Strip()),
    "a pattern is replaced": lambda: _with(_byte_level(), normalizer=normalizers.Replace("aa", "a")),
    "spaces are dropped": lambda: _with(_byte_level(), pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
    "a split drops": lambda: _with(_byte_level(), pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_where_a_token_may_stand_for_any_text_nothing_is_known(name: str) -> None:
    assert _bound(UNUSUAL[name]()).min_tokens("a" * 10_000) == 0


def test_a_token_that_swallows_spaces_makes_the_bound_unknown() -> None:
    tokenizer = _byte_level()
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    assert _bound(tokenizer).min_tokens("a" * 10_000) == 0
