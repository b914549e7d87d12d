"""How few tokens a text can have: a bound known without encoding it, so that absurd prompts cost nothing."""

import json
from collections.abc import Iterator
from typing import cast

from bakehouse_replica.vocabulary import Vocabulary
from tokenizers import Tokenizer

# Composition shortens UTF-8 at most threefold (three jamo of 9 bytes: one syllable of 3), compatibility fourfold
# (a mathematical A of 4 bytes: A).
_SHRINKING = {"NFC": 3, "NFD": 3, "NFKC": 4, "NFKD": 4}
_KEEPS_BYTES = {"Prepend", "ByteLevel"}
_KEEPS_TEXT = {"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation"}

_Step = dict[str, object]


class TokenBound:
    """`max_token_bytes`: of a text's bytes one token stands for no more, None where no limit is known.

    `silent_bytes` may vanish without any token.
    """

    def __init__(self, max_token_bytes: int | None, silent_bytes: bytes = b"") -> None:
        self._max_token_bytes = max_token_bytes
        self._silent_bytes = silent_bytes

    def min_tokens(self, text: str) -> int:
        """At least so many tokens `text` has; 0 where nothing is known. Takes 2 ms for a megabyte."""
        if self._max_token_bytes is None:
            return 0
        spelled = text.encode("utf-8", "replace").translate(None, self._silent_bytes)
        return -(-len(spelled) // self._max_token_bytes)


def token_bound(backend: Tokenizer, vocabulary: Vocabulary) -> TokenBound:
    """The bound of a tokenizer whose every byte has a token of its own, or none at all.

    Then nothing unknown is lumped together. Where a step before the model may drop text, nothing is known;
    additions (a beginning of sequence, a prefix space) only make more tokens.
    """
    added = backend.get_added_tokens_decoder().values()
    spelled = {vocabulary.bytes_of(token_id) for token_id in range(backend.get_vocab_size())}
    silent = bytes(byte for byte in range(256) if bytes([byte]) not in spelled)
    factor = _shrinking(backend)
    is_known = (
        type(backend.model).__name__ == "BPE"
        and (not silent or (backend.model.unk_token is None and factor == 1))
        and factor is not None
        and not any(token.lstrip or token.rstrip for token in added)  # these swallow any number of spaces
    )
    if not is_known or factor is None:
        return TokenBound(None)
    # Added tokens stand for their text as the client writes it, the special ones too, which put out none.
    return TokenBound(factor * max(map(len, (*spelled, *(token.content.encode() for token in added)))), silent)


def _shrinking(backend: Tokenizer) -> int | None:
    """By how much a text may shrink before the model sees it; None where that is not known."""
    factor = 1
    for step in _steps(backend.normalizer):
        kind = cast("str", step["type"])
        if kind not in _SHRINKING and kind not in _KEEPS_BYTES and not _lengthens(step):
            return None
        factor *= _SHRINKING.get(kind, 1)
    for step in _steps(backend.pre_tokenizer):
        if step["type"] not in _KEEPS_TEXT or step.get("behavior") == "Removed":
            return None
    return factor


def _lengthens(step: _Step) -> bool:
    pattern = step.get("pattern")
    if step["type"] != "Replace" or not isinstance(pattern, dict) or "String" not in pattern:
        return False
    return len(cast("str", step["content"]).encode()) >= len(cast("str", pattern["String"]).encode())


def _steps(part: object | None) -> Iterator[_Step]:
    """The steps of a normaliser or pre-tokenizer, which describes itself when it is pickled."""
    if part is not None:
        yield from _flattened(json.loads(cast("bytes", part.__getstate__())))


def _flattened(step: _Step) -> Iterator[_Step]:
    if step["type"] != "Sequence":
        yield step
    for nested in cast("list[_Step]", step.get("normalizers") or step.get("pretokenizers") or []):
        yield from _flattened(nested)
