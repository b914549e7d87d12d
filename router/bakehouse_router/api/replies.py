"""OpenAI's reply shapes: the whole answer, and the chunks of a stream, for both routes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bakehouse_replica.core.types import FinishReason

from bakehouse_router.generation import CallUsage

Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHead:
    """What all chunks of a reply have in common. `shows_usage`: the stream ends with a chunk of token counts."""

    reply_id: str
    created: int
    model: str
    shows_usage: bool = False

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


class ReplyShape(Protocol):
    """How one route says what happened to a choice."""

    chunk_kind: str
    whole_kind: str

    def opening(self, choice: int) -> Json | None:
        """What a choice's stream begins with, if anything."""
        ...

    def text(self, choice: int, text: str) -> Json:
        """New text of a choice."""
        ...

    def finish(self, choice: int, reason: FinishReason) -> Json:
        """The end of a choice."""
        ...

    def whole(self, choice: int, text: str, reason: FinishReason) -> Json:
        """A choice of a reply that is not streamed."""
        ...


class ChatShape:
    """`/v1/chat/completions`."""

    chunk_kind = "chat.completion.chunk"
    whole_kind = "chat.completion"

    def opening(self, choice: int) -> Json | None:
        return _delta(choice, {"role": "assistant", "content": ""}, None)

    def text(self, choice: int, text: str) -> Json:
        return _delta(choice, {"content": text}, None)

    def finish(self, choice: int, reason: FinishReason) -> Json:
        return _delta(choice, {}, reason)

    def whole(self, choice: int, text: str, reason: FinishReason) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": choice, "message": message, "logprobs": None, "finish_reason": reason}


class CompletionShape:
    """`/v1/completions`."""

    chunk_kind = whole_kind = "text_completion"

    def opening(self, choice: int) -> Json | None:
        return None

    def text(self, choice: int, text: str) -> Json:
        return {"index": choice, "text": text, "logprobs": None, "finish_reason": None}

    def finish(self, choice: int, reason: FinishReason) -> Json:
        return self.whole(choice, "", reason)

    def whole(self, choice: int, text: str, reason: FinishReason) -> Json:
        return {"index": choice, "text": text, "logprobs": None, "finish_reason": reason}


def _delta(choice: int, delta: Json, reason: FinishReason | None) -> Json:
    return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": reason}
