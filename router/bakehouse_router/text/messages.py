"""A conversation in plain values: what a chat template is given and what a model's answer is read into."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call that the assistant made in an earlier turn; `arguments` is a JSON object as text."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn; its content is plain text.

    `name`: of a participant or tool. `tool_calls` stand in assistant turns, `tool_call_id` in those of tools.
    """

    role: Role
    content: str = ""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)
