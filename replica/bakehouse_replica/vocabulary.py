"""What each token id contributes to a text, as bytes.

Decoding by bytes makes incremental decoding exact and linear: the text of any number of ids is the UTF-8 of
their joined bytes, wherever the stream was cut. Where the bytes are valid UTF-8 this equals the tokenizer's own
`decode(ids, skip_special_tokens=True)`; each ill-formed part becomes one replacement character.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import cast

from tokenizers import Tokenizer

from bakehouse_replica.core.errors import StartupError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    shifted = {chr(256 + index): byte for index, byte in enumerate(rest)}
    return {chr(byte): byte for byte in printable} | shifted


def _from_byte_level(tokens: Iterable[str]) -> list[bytes]:
    alphabet = _byte_alphabet()

    def to_bytes(token: str) -> bytes:
        try:
            return bytes([alphabet[character] for character in token])
        except KeyError:  # an added token, spelled as it reads
            return token.encode()

    return [to_bytes(token) for token in tokens]


def _steps(decoder: dict[str, object]) -> list[dict[str, object]]:
    if decoder.get("type") == "Sequence":
        return cast("list[dict[str, object]]", decoder["decoders"])
    return [decoder]


def _replacement(step: dict[str, object]) -> Callable[[str], str]:
    pattern = cast("dict[str, str]", step["pattern"])
    if "String" not in pattern:
        raise StartupError(f"this tokenizer's decoder replaces by the pattern {pattern}, which is not supported")
    return lambda token: token.replace(pattern["String"], cast("str", step["content"]))


def _from_sentencepiece(tokens: Iterable[str], steps: list[dict[str, object]]) -> tuple[list[bytes], bool]:
    """Sentencepiece-like decoders: the bytes per token, and whether a text loses its first space."""
    rewrites: list[Callable[[str], str]] = []
    has_byte_tokens = strips_first_space = is_fused = False
    for step in steps:
        match step:
            case {"type": "Replace"}:
                rewrites.append(_replacement(step))
            case {"type": "ByteFallback"}:
                has_byte_tokens = True
            case {"type": "Fuse"}:
                is_fused = True
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if is_fused:
                strips_first_space = True
            case {"type": "Metaspace", "replacement": str(space), "prepend_scheme": str(scheme)}:
                rewrites.append(lambda token, space=space: token.replace(space, " "))  # type: ignore[misc]
                strips_first_space = scheme != "never"
            case _:
                raise StartupError(f"this tokenizer's decoder has the step {step}, which is not supported")

    def to_bytes(token: str) -> bytes:
        if has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for rewrite in rewrites:
            token = rewrite(token)
        return token.encode()

    return [to_bytes(token) for token in tokens], strips_first_space


class Vocabulary:
    """The bytes of every token id; special tokens (end of sequence and the like) have none, but a name.

    `strips_first_space`: the tokenizer puts a space before every text and takes it away when decoding one.
    """

    def __init__(
        self,
        bytes_by_id: Mapping[int, bytes],
        special_names: Mapping[int, str],
        *,
        strips_first_space: bool = False,
    ) -> None:
        self._bytes_by_id = bytes_by_id
        self._special_names = special_names
        self.strips_first_space = strips_first_space

    @property
    def n_tokens(self) -> int:
        """One more than the largest id; models may have more, as padding."""
        return max({*self._bytes_by_id, *self._special_names}) + 1

    @property
    def special_names(self) -> Mapping[int, str]:
        """How each special token is spelled."""
        return self._special_names

    def bytes_of(self, token_id: int) -> bytes:
        """What the token adds to a text; nothing where the tokenizer lacks the id (padded vocabularies)."""
        return self._bytes_by_id.get(token_id, b"")

    def name_of(self, token_id: int) -> str:
        """How a token that adds nothing to a text is called: as its prompt spells it, else by its id."""
        return self._special_names.get(token_id) or f"<token {token_id}>"

    def special_id(self, name: str) -> int | None:
        """The id of the special token of this name, None where there is none."""
        return next((token_id for token_id, special in self._special_names.items() if special == name), None)

    def showing(self, names: Collection[str]) -> "Vocabulary":
        """The same vocabulary, but the special tokens of these names add them to a text, as ordinary ones do."""
        shown = {token_id: name for token_id, name in self._special_names.items() if name in names}
        if not shown:
            return self
        return Vocabulary(
            {**self._bytes_by_id, **{token_id: name.encode() for token_id, name in shown.items()}},
            {token_id: name for token_id, name in self._special_names.items() if token_id not in shown},
            strips_first_space=self.strips_first_space,
        )


def vocabulary_of(backend: Tokenizer) -> Vocabulary:
    """The vocabulary of a tokenizer.

    Raises `StartupError` where it decodes by a rule that cannot be done token by token.
    """
    decoder = cast("dict[str, object] | None", json.loads(backend.to_str())["decoder"])
    if decoder is None:
        raise StartupError("this tokenizer has no decoder, so its output cannot be turned into text")
    ids_by_token = backend.get_vocab(with_added_tokens=True)
    steps = _steps(decoder)
    strips_first_space = False
    if {step["type"] for step in steps} in ({"ByteLevel"}, {"ByteLevel", "Fuse"}):
        pieces = _from_byte_level(ids_by_token)
    else:
        pieces, strips_first_space = _from_sentencepiece(ids_by_token, steps)
    bytes_by_id = dict(zip(ids_by_token.values(), pieces, strict=True))
    added = backend.get_added_tokens_decoder()
    special_names = {token_id: token.content for token_id, token in added.items() if token.special}
    bytes_by_id |= dict.fromkeys(special_names, b"")
    return Vocabulary(bytes_by_id, special_names, strips_first_space=strips_first_space)
