"""The items of a response's output while they are written: what they are, and the events that tell of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from bakehouse_router.api.token_json import Json

ItemStatus = Literal["in_progress", "completed", "incomplete"]


@dataclass(slots=True, kw_only=True)
class OpenMessage:
    """A message, whose content is one text."""

    item_id: str
    index: int
    _texts: list[str] = field(default_factory=list)
    _logprobs: list[object] = field(default_factory=list)

    def item(self, status: ItemStatus) -> Json:
        """As part of the output."""
        return {
            "id": self.item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [self._part()],
        }

    def opening(self) -> list[Json]:
        """The events of its beginning."""
        return [
            {
                "type": "response.output_item.added",
                "output_index": self.index,
                "item": self.item("in_progress") | {"content": []},
            },
            self._event("response.content_part.added") | {"part": self._part()},
        ]

    def add(self, text: str, logprobs: Sequence[object]) -> Json:
        """The event of more text."""
        self._texts.append(text)
        self._logprobs += logprobs
        return self._event("response.output_text.delta") | {"delta": text, "logprobs": list(logprobs)}

    def closing(self, status: ItemStatus) -> list[Json]:
        """The events of its end."""
        part = self._part()
        return [
            self._event("response.output_text.done") | {"text": part["text"], "logprobs": part["logprobs"]},
            self._event("response.content_part.done") | {"part": part},
            {"type": "response.output_item.done", "output_index": self.index, "item": self.item(status)},
        ]

    def _part(self) -> Json:
        return {
            "type": "output_text",
            "annotations": [],
            "logprobs": list(self._logprobs),
            "text": "".join(self._texts),
        }

    def _event(self, kind: str) -> Json:
        return {"type": kind, "item_id": self.item_id, "output_index": self.index, "content_index": 0}


@dataclass(slots=True, kw_only=True)
class OpenCall:
    """A call of a function."""

    item_id: str
    index: int
    call_id: str
    name: str
    _arguments: list[str] = field(default_factory=list)

    def item(self, status: ItemStatus) -> Json:
        """As part of the output."""
        return {
            "id": self.item_id,
            "type": "function_call",
            "status": status,
            "arguments": "".join(self._arguments),
            "call_id": self.call_id,
            "name": self.name,
        }

    def opening(self) -> list[Json]:
        """The events of its beginning."""
        return [
            {
                "type": "response.output_item.added",
                "output_index": self.index,
                "item": self.item("in_progress"),
            }
        ]

    def add(self, arguments: str) -> Json:
        """The event of more of its arguments."""
        self._arguments.append(arguments)
        return self._event("response.function_call_arguments.delta") | {"delta": arguments}

    def closing(self, status: ItemStatus) -> list[Json]:
        """The events of its end."""
        item = self.item(status)
        return [
            self._event("response.function_call_arguments.done")
            | {"arguments": item["arguments"], "name": self.name},
            {"type": "response.output_item.done", "output_index": self.index, "item": item},
        ]

    def _event(self, kind: str) -> Json:
        return {"type": kind, "item_id": self.item_id, "output_index": self.index}
