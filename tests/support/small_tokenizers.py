"""Two small tokenizers of the usual kinds, with their vocabularies, for tests of text."""

from bakehouse_replica.vocabulary import vocabulary_of
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = [
    "▁",
    "▁▁",
    "▁logs",
    "▁and",
    "▁leading",
    "▁x",
    "a",
    "b",
    "é",
    "漢",
    "END",
    "E",
    "ND",
    "|im",
    "<",
    "_end|>",
    "�",
]


def sentencepiece() -> Tokenizer:
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *BYTE_TOKENS, *WORDS])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<|end|>", *alphabet, "Ġthe", "Ġ<"])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens([AddedToken("<think hard>", special=False), AddedToken("日本", special=False)])
    return tokenizer


TOKENIZERS: dict[str, Tokenizer] = {"sentencepiece": sentencepiece(), "byte_level": byte_level()}
VOCABULARIES = {name: vocabulary_of(tokenizer) for name, tokenizer in TOKENIZERS.items()}
SENTENCEPIECE, BYTE_LEVEL = VOCABULARIES["sentencepiece"], VOCABULARIES["byte_level"]
IDS_BY_PIECE = {name: tokenizer.get_vocab() for name, tokenizer in TOKENIZERS.items()}


def ids(*tokens: str) -> list[int]:
    return [IDS_BY_PIECE["sentencepiece"][token] for token in tokens]


def byte_ids(text: bytes) -> list[int]:
    return ids(*(f"<0x{byte:02X}>" for byte in text))


def any_ids(name: str) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, TOKENIZERS[name].get_vocab_size() + 3), max_size=40)
