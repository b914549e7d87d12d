"""The text side of a scripted model: a tokenizer of its pieces, and a chat template.

A prompt is encoded by longest match over the pieces, then byte by byte. In a chat, special pieces that the
template wrote are tokens, and the same characters inside a message are plain text, as with any other model.
"""

import re
from collections.abc import Sequence

from bakehouse_replica.script import Script

from bakehouse_router.text.token_bound import TokenBound
from bakehouse_router.text.tokenizer import Disguises

# Shows a prompt's every part, so that a script's `when` can match on it. Calls are written as Hermes models do.
DEFAULT_TEMPLATE = """\
{%- if tools %}{{ 'tools: ' + tools | tojson + '\n' }}{% endif %}
{%- for message in messages %}
{{- message.role + ': ' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson + '</tool_call>' }}
{%- endfor %}
{{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


class ScriptedTokenizer:
    """Encodes prompts in a script's pieces; `vocabulary` decodes output."""

    def __init__(self, script: Script) -> None:
        spelled = script.token_bytes()
        self.vocabulary = script.vocabulary()
        self._first_byte_id = len(script.pieces)
        self._ids = {content: token_id for token_id, content in enumerate(spelled[: self._first_byte_id])}
        self._bound = TokenBound(max(map(len, spelled)))
        self._any_piece = _longest_match(list(self._ids))
        self._plain_piece = _longest_match([piece.content for piece in script.pieces if not piece.is_special])
        specials = [piece.content.decode(errors="ignore") for piece in script.pieces if piece.is_special]
        markers = sorted((text for text in specials if text.encode() in self._ids), key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, markers)) or r"(?!)")

    def encode_raw(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The ids of a raw prompt; there are no special tokens to add."""
        return self._encode(text, self._any_piece)

    def encode_rendered(self, text: str, disguises: Disguises) -> tuple[int, ...]:
        """The ids of a rendered chat whose messages went through `disguises`."""
        token_ids: list[int] = []
        end = 0
        for marker in self._marker.finditer(text):
            token_ids += self._encode(disguises.remove(text[end : marker.start()]), self._plain_piece)
            token_ids.append(self._ids[marker[0].encode()])
            end = marker.end()
        token_ids += self._encode(disguises.remove(text[end:]), self._plain_piece)
        return tuple(token_ids)

    def min_tokens(self, text: str) -> int:
        """At least so many ids a prompt with this text has; cheap."""
        return self._bound.min_tokens(text)

    def disguises(self) -> Disguises:
        """For one chat."""
        return Disguises(self._marker)

    def _encode(self, text: str, piece: re.Pattern[bytes]) -> tuple[int, ...]:
        return tuple(
            self._first_byte_id + match[0][0] if match.lastgroup == "byte" else self._ids[match[0]]
            for match in piece.finditer(text.encode())
        )


def _longest_match(pieces: Sequence[bytes]) -> re.Pattern[bytes]:
    """Matches the longest of `pieces` that stands at a place, else one byte, as the group `byte`."""
    by_length = sorted(pieces, key=len, reverse=True)
    return re.compile(b"|".join([*map(re.escape, by_length), rb"(?P<byte>.)"]), re.DOTALL)
