"""What a reply consists of, whichever route it answers: a head, the chunks of its choices, and token counts.

A reply that is not streamed is the merge of the chunks that would have been, so the two cannot differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bakehouse_router.api.token_json import Json
from bakehouse_router.generation import CallUsage
from bakehouse_router.prompt_run import PromptReport, TextPiece


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHead:
    """What all chunks of a reply have in common. `shows_usage`: the stream ends with a chunk of token counts;
    `counts_along`: and each chunk before it has the counts so far.
    """

    reply_id: str
    created: int
    model: str
    shows_usage: bool = False
    counts_along: bool = False

    def reply(self, kind: str, choices: Sequence[Json]) -> Json:
        """The object `kind` with these choices."""
        return {
            "id": self.reply_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def usage_json(usage: CallUsage) -> Json:
    """Token counts as OpenAI gives them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceChunk:
    """News of one choice: `choice` is what stands in `choices`, `beside` what stands beside them."""

    choice: Json
    beside: Json


class ChoiceWriter(Protocol):
    """Turns the pieces of one choice, in their order, into its chunks."""

    def write(self, piece: TextPiece) -> list[ChoiceChunk]:
        """The chunks of one piece."""
        ...


class ChoiceMerger(Protocol):
    """Adds up the chunks of one choice, so that none of them has to be kept."""

    def add(self, chunk: ChoiceChunk) -> None:
        """The next chunk."""
        ...

    def whole(self) -> ChoiceChunk:
        """The choice of a whole reply that the chunks so far, one at least, amount to."""
        ...


class ReplyShape(Protocol):
    """How one route says what happened to its choices."""

    chunk_kind: str
    whole_kind: str

    def writer(self, choice: int, prompt: PromptReport) -> ChoiceWriter:
        """For one choice of one reply, which continues `prompt`."""
        ...

    def merger(self) -> ChoiceMerger:
        """For one choice of one reply that is not streamed."""
        ...
