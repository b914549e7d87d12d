"""The items of a response's input: messages, and the calls of tools with what these returned."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, cast

from bakehouse_replica.core.errors import InvalidRequest
from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from bakehouse_router.api.conversation import ArgumentsText, FunctionName, misplaced
from bakehouse_router.api.fields import (
    MAX_MESSAGES,
    MAX_PARTS,
    JsonObject,
    Name,
    Only,
    Strict,
    text_or_parts,
    wrong,
)
from bakehouse_router.api.variants import describe_by_variants, not_null, variant
from bakehouse_router.text.messages import ChatMessage, ToolCall

_MESSAGE, _CALL, _OUTPUT = "message", "function_call", "function_call_output"
# What an item of each type consists of, besides its id and status.
_FIELDS = {_MESSAGE: ("role", "content"), _CALL: ("call_id", "name", "arguments"), _OUTPUT: ("call_id", "output")}
_PART_TYPES = ("input_text", "output_text", "text")


def _part_type(value: object) -> object:
    if value not in _PART_TYPES:
        raise wrong("it must be 'input_text', 'output_text' or 'text': only text is read here")
    return value


def _item_type(value: object) -> object:
    if value is not None and value not in tuple(_FIELDS):  # it may be a value that no dictionary can look up
        raise wrong(
            "it must be 'message', 'function_call' or 'function_call_output': nothing is stored that could be "
            "referred to, no built-in tool is run, and reasoning is not kept apart"
        )
    return value


class InputPartBody(Strict):
    """A text. Those of earlier answers come with annotations and log-probabilities, which do not belong to it."""

    type: Annotated[Literal["input_text", "output_text", "text"], BeforeValidator(_part_type)]
    text: str
    annotations: Annotated[list[JsonObject], Field(fail_fast=True)] | None = None
    logprobs: Annotated[list[JsonObject], Field(fail_fast=True)] | None = None


Parts = Annotated[list[InputPartBody], Field(max_length=MAX_PARTS, fail_fast=True), text_or_parts(InputPartBody)]


def _by_type(schema: JsonDict) -> None:
    """Describes an item by what its type asks for, as `InputItemBody` checks it."""
    fields = cast("dict[str, JsonDict]", schema.pop("properties"))
    describe_by_variants(schema, [_variant(fields, kind, required) for kind, required in _FIELDS.items()])


def _variant(fields: dict[str, JsonDict], kind: str, required: Sequence[str]) -> JsonDict:
    properties: JsonDict = {"id": fields["id"], "status": fields["status"], "type": {"const": kind}}
    properties |= {name: not_null(fields[name]) for name in required}
    return variant(properties, required if kind == _MESSAGE else ["type", *required])


class InputItemBody(Strict):
    """One item. Its id and status, which it has where it was part of an earlier answer, say nothing here."""

    model_config = ConfigDict(json_schema_extra=_by_type)

    type: Annotated[
        Literal["message", "function_call", "function_call_output"] | None, BeforeValidator(_item_type)
    ] = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Parts | None = None
    call_id: Name | None = None
    name: FunctionName | None = None
    arguments: ArgumentsText | None = None
    output: Parts | None = None
    id: Name | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Annotated[None, Only(because="it must be null: an answer has one phase")] = None

    @property
    def kind(self) -> str:
        """Its type, which messages may leave out."""
        return self.type or _MESSAGE

    @model_validator(mode="after")
    def _fits_its_type(self) -> "InputItemBody":
        for name in dict.fromkeys(name for names in _FIELDS.values() for name in names):
            belongs, is_given = name in _FIELDS[self.kind], getattr(self, name) is not None
            if belongs and not is_given:
                raise misplaced(name, "not given", f"given where the type is {self.kind}")
            if is_given and not belongs:
                raise misplaced(name, "given", f"left out where the type is {self.kind}")
        return self


def _items(value: object) -> object:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list) and value:
        return value
    raise wrong("it must be a string or a list of items")


InputItems = Annotated[
    list[InputItemBody],
    Field(max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(_items, json_schema_input_type=str | Annotated[list[InputItemBody], Field(min_length=1)]),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A message, and the field of the body where it begins."""

    message: ChatMessage
    source: str


def read_turns(instructions: str | None, items: Sequence[InputItemBody]) -> tuple[Turn, ...]:
    """The conversation. Calls belong to the turn in which the assistant's message before them stands.

    Raises `InvalidRequest` where an output belongs to no call before it.
    """
    turns: list[Turn] = []
    if instructions is not None:
        message = ChatMessage(role="system", content=instructions)
        turns.append(Turn(message=message, source="instructions"))
    called: set[str] = set()
    for index, item in enumerate(items):
        source = f"input[{index}]"
        if item.kind == _CALL:
            call = _call(item)
            called.add(call.call_id)
            turns.append(_with_call(turns, call, source))
            continue
        if item.kind == _OUTPUT and item.call_id not in called:
            raise InvalidRequest(
                f"{source}.call_id is {item.call_id!r}; it must be that of a function_call before it",
                f"{source}.call_id",
            )
        turns.append(Turn(message=_message(item), source=source))
    return tuple(turns)


def _call(item: InputItemBody) -> ToolCall:
    call_id, name, arguments = item.call_id, item.name, item.arguments
    assert call_id is not None, "checked by its type"
    assert name is not None, "checked by its type"
    assert arguments is not None, "checked by its type"
    return ToolCall(call_id=call_id, name=name, arguments=arguments)


def _with_call(turns: list[Turn], call: ToolCall, source: str) -> Turn:
    """The last turn, taken away, with one more call; a new one unless it is the assistant's."""
    if not turns or turns[-1].message.role != "assistant":
        return Turn(message=ChatMessage(role="assistant", tool_calls=(call,)), source=source)
    last = turns.pop()
    return replace(last, message=replace(last.message, tool_calls=(*last.message.tool_calls, call)))


def _message(item: InputItemBody) -> ChatMessage:
    parts = item.output if item.kind == _OUTPUT else item.content
    content = "".join(part.text for part in parts or ())
    if item.kind == _OUTPUT:
        return ChatMessage(role="tool", content=content, tool_call_id=item.call_id)
    assert item.role is not None, "checked by its type"
    return ChatMessage(role=item.role, content=content)
