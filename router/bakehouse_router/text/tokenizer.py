"""Text to token ids, in the two ways a request can mean it.

*Raw prompts* (completions) are encoded as they stand: the text of a special token means that token, as is usual,
and the tokenizer adds its own beginning of sequence, but never a second one.

*Chat* is encoded as the template wrote it, nothing added. The markers that the template wrote (special tokens, and
other added tokens that stand in it) are tokens; the same characters inside a message are plain text, so that
nobody ends a turn or opens another role by typing a marker. To tell them apart, such places travel through the
template under unguessable names; only a template that makes a marker out of parts of messages defeats that.
(`apply_chat_template(sanitize_control_tokens=True)` does the same in transformers 5.24; earlier releases that we
support take that argument without effect.)
"""

import json
import re
import secrets
from functools import cached_property
from typing import Protocol

from bakehouse_replica.vocabulary import Vocabulary, vocabulary_of
from tokenizers import Tokenizer as Backend

from bakehouse_router.text.token_bound import token_bound

# Private-use characters: no normaliser folds them and no pre-tokenizer splits off an added token.
_PRIVATE_USE = (0x100000, 0x10FFFD)
_N_NAME_CHARS = 8

# Digits survive whatever a template does to a text: upper, trim, tojson, a dict as Python writes it.
_N_DISGUISE_DIGITS = 24


def _unguessable_name() -> str:
    first, last = _PRIVATE_USE
    return "".join(chr(first + secrets.randbelow(last - first + 1)) for _ in range(_N_NAME_CHARS))


def _unguessable_digits() -> str:
    return f"{secrets.randbelow(10**_N_DISGUISE_DIGITS):0{_N_DISGUISE_DIGITS}}"


def _markers(backend: Backend, template: str) -> list[str]:
    added = backend.get_added_tokens_decoder().values()
    return [
        token.content
        for token in added
        if token.content and (token.special or (token.content in template and not token.content.isspace()))
    ]


def _renamed_backend(backend: Backend, names: dict[str, str]) -> Backend:
    """A tokenizer with the same ids in which the markers are spelled by `names`."""
    description = json.loads(backend.to_str())
    for token in description["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = description["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in vocabulary.items()}
    else:  # a unigram model: [token, score] in the order of ids
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return Backend.from_str(json.dumps(description))


def _encode(backend: Backend, text: str, *, add_special_tokens: bool) -> list[int]:
    try:
        # `encode` holds the GIL throughout, 1.4 s a megabyte; this lets other threads run.
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except TypeError:
        text.encode()  # half of a surrogate pair, which is meant, is a UnicodeEncodeError
        raise
    return encoding.ids


class TextEncoder(Protocol):
    """What encodes prompts for one model; `vocabulary` decodes its output."""

    vocabulary: Vocabulary

    def encode_raw(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The ids of a raw prompt; `add_special_tokens`: those that the tokenizer puts around a text."""
        ...

    def min_tokens(self, text: str) -> int:
        """At least so many ids a prompt with this text has; cheap."""
        ...

    def encode_rendered(self, text: str, disguises: "Disguises") -> tuple[int, ...]:
        """The ids of a rendered chat whose messages went through `disguises`."""
        ...

    def disguises(self) -> "Disguises":
        """For one chat."""
        ...


class Tokenizer:
    """Encodes prompts; `vocabulary` decodes output. `template`: the chat template's text, where there is one."""

    def __init__(self, backend: Backend, *, bos_id: int | None, template: str | None) -> None:
        self.vocabulary = vocabulary_of(backend)
        self._backend = backend
        self._bound = token_bound(backend, self.vocabulary)
        self._bos_id = bos_id
        self._names = {text: _unguessable_name() for text in _markers(backend, template or "")}
        # Longest first, as the tokenizer itself prefers the longer of two markers that begin alike.
        by_length = sorted(self._names, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")

    def encode_raw(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The ids of a raw prompt; `add_special_tokens`: those that the tokenizer puts around a text."""
        token_ids = _encode(self._backend, text, add_special_tokens=add_special_tokens)
        if self._bos_id is not None and token_ids[:2] == [self._bos_id, self._bos_id]:
            token_ids = token_ids[1:]
        return tuple(token_ids)

    def encode_rendered(self, text: str, disguises: "Disguises") -> tuple[int, ...]:
        """The ids of a rendered chat whose messages went through `disguises`."""
        backend = self._backend
        if disguises.is_used:
            backend = self._disguised_backend
            text = self._marker.sub(lambda match: self._names[match[0]], text)
            text = disguises.remove(text)
        return tuple(_encode(backend, text, add_special_tokens=False))

    def min_tokens(self, text: str) -> int:
        """At least so many ids a prompt with this text has; cheap."""
        return self._bound.min_tokens(text)

    def disguises(self) -> "Disguises":
        """For one chat."""
        return Disguises(self._marker)

    @cached_property
    def _disguised_backend(self) -> Backend:
        return _renamed_backend(self._backend, self._names)


class Disguises:
    """Replaces markers inside messages by unguessable names, one for each kind, and brings them back later."""

    def __init__(self, marker: re.Pattern[str]) -> None:
        self._marker = marker
        self._names_by_text: dict[str, str] = {}

    @property
    def is_used(self) -> bool:
        """Whether any message contained a marker."""
        return bool(self._names_by_text)

    def apply(self, text: str) -> str:
        """`text` without any marker."""
        return self._marker.sub(self._disguise, text)

    def remove(self, text: str) -> str:
        """The reverse of `apply`, for a text that contains the disguised one."""
        if not self.is_used:
            return text
        texts_by_name = {name: text for text, name in self._names_by_text.items()}
        return re.sub("|".join(texts_by_name), lambda match: texts_by_name[match[0]], text)

    def _disguise(self, match: re.Match[str]) -> str:
        text = match[0]
        if text not in self._names_by_text:
            name = _unguessable_digits()
            is_plain = self._marker.search(name) is None  # else a marker is made of digits itself
            self._names_by_text[text] = name if is_plain else _unguessable_name()
        return self._names_by_text[text]
