"""Text to token ids, in the two ways a request can mean it.

*Raw prompts* (completions) are encoded as they stand: the text of a special token means that token, as is usual,
and the tokenizer adds its own beginning of sequence, but never a second one.

*Chat* is encoded as the template wrote it, nothing added. The markers that the template wrote (special tokens, and
other added tokens that stand in it) are tokens; the same characters inside a message are plain text, so that
nobody ends a turn or opens another role by typing a marker. To tell them apart, such places travel through the
template under unguessable names. (`apply_chat_template(sanitize_control_tokens=True)` does the same in
transformers 5.24; earlier releases that we support take that argument without effect.)
"""

import json
import re
import secrets
from functools import cached_property

from tokenizers import Tokenizer as Backend

from bakehouse_router.text.vocabulary import Vocabulary

# Private-use characters: no template rewrites them and no normaliser folds them.
_PRIVATE_USE = (0x100000, 0x10FFFD)
_N_NAME_CHARS = 8


def _unguessable_name() -> str:
    first, last = _PRIVATE_USE
    return "".join(chr(first + secrets.randbelow(last - first + 1)) for _ in range(_N_NAME_CHARS))


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


class Tokenizer:
    """Encodes prompts; `vocabulary` decodes output. `template`: the chat template's text, where there is one."""

    def __init__(self, backend: Backend, *, bos_id: int | None, template: str | None) -> None:
        self.vocabulary = Vocabulary(backend)
        self._backend = backend
        self._bos_id = bos_id
        self._names = {text: _unguessable_name() for text in _markers(backend, template or "")}
        # Longest first, as the tokenizer itself prefers the longer of two markers that begin alike.
        by_length = sorted(self._names, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")

    def encode_raw(self, text: str) -> tuple[int, ...]:
        """The ids of a raw prompt."""
        token_ids = self._backend.encode(text).ids
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
        return tuple(backend.encode(text, add_special_tokens=False).ids)

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
            self._names_by_text[text] = _unguessable_name()
        return self._names_by_text[text]
