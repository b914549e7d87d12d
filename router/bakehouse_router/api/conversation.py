"""The messages and tools of a chat body, as OpenAI writes them."""

from typing import Annotated, Literal, NamedTuple, cast

from bakehouse_replica.core.errors import InvalidRequest
from pydantic import AfterValidator, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic.config import JsonDict, JsonValue
from pydantic_core import PydanticCustomError

from bakehouse_router.api.fields import MAX_PARTS, JsonObject, Name, Only, Strict, text_or_parts, wrong
from bakehouse_router.api.json_body import parse_object
from bakehouse_router.api.variants import describe_by_variants, not_null, variant
from bakehouse_router.text.messages import ChatMessage, Role, Tool, ToolCall

FUNCTION_NAME_PATTERN = r"^[a-zA-Z0-9_-]{1,64}$"
_NOT_KEPT = "a message of another server's is accepted only where it has none"

FunctionName = Annotated[str, Field(pattern=FUNCTION_NAME_PATTERN)]


def _arguments(text: str) -> str:
    if not text.strip():  # how some clients write a call without arguments
        return "{}"
    try:
        parse_object(text.encode())
    except InvalidRequest:
        raise wrong("it must be a JSON object as text") from None
    return text


ArgumentsText = Annotated[str, AfterValidator(_arguments)]


class TextPartBody(Strict):
    """A part of a message's content; parts are joined."""

    type: Literal["text"]
    text: str


Parts = Annotated[list[TextPartBody], Field(max_length=MAX_PARTS, fail_fast=True), text_or_parts(TextPartBody)]


class CalledFunctionBody(Strict):
    """What the assistant called."""

    name: FunctionName
    arguments: ArgumentsText


class ToolCallBody(Strict):
    """A call that the assistant made in an earlier turn."""

    id: Name
    type: Literal["function"]
    function: CalledFunctionBody


def _by_role(schema: JsonDict) -> None:
    """Describes a message by what its role asks for, as `ChatMessageBody` checks it."""
    fields = cast("dict[str, JsonDict]", schema.pop("properties"))
    absent = {"tool_calls", "tool_call_id"}
    variants = [
        _variant(fields, ["system", "developer", "user"], ["content"], absent),
        _variant(fields, ["assistant"], ["content"], {"tool_call_id"}),
        _variant(fields, ["assistant"], ["tool_calls"], {"tool_call_id"}),
        _variant(fields, ["tool"], ["content", "tool_call_id"], {"tool_calls"}),
    ]
    describe_by_variants(schema, variants)


def _variant(fields: dict[str, JsonDict], roles: list[str], required: list[str], absent: set[str]) -> JsonDict:
    properties: JsonDict = {name: field for name, field in fields.items() if name not in absent}
    properties["role"] = {"enum": list[JsonValue](roles)}
    properties |= {name: not_null(fields[name]) for name in required}
    return variant(properties, ["role", *required])


class ChatMessageBody(Strict):
    """One message."""

    model_config = ConfigDict(json_schema_extra=_by_role)

    role: Role
    content: Parts | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCallBody], Field(min_length=1, fail_fast=True)] | None = None
    tool_call_id: Name | None = None
    refusal: Annotated[None, Only(because=_NOT_KEPT)] = None
    annotations: Annotated[None, Only([], because=_NOT_KEPT)] = None
    audio: Annotated[None, Only(because=_NOT_KEPT)] = None
    function_call: Annotated[None, Only(because="this older form is not supported; use tool_calls")] = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> "ChatMessageBody":
        if self.tool_calls and self.role != "assistant":
            raise misplaced("tool_calls", "given", "left out where the role is not assistant")
        if self.tool_call_id is not None and self.role != "tool":
            raise misplaced("tool_call_id", "given", "left out where the role is not tool")
        if self.tool_call_id is None and self.role == "tool":
            raise misplaced("tool_call_id", "not given", "given where the role is tool")
        if self.content is None and not self.tool_calls:
            raise misplaced("content", "null", "a string or a list of text parts")
        return self

    def message(self) -> ChatMessage:
        """As the chat template is given it."""
        calls = tuple(
            ToolCall(call_id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in self.tool_calls or ()
        )
        return ChatMessage(
            role=self.role,
            content="".join(part.text for part in self.content or ()),
            name=self.name,
            tool_calls=calls,
            tool_call_id=self.tool_call_id,
        )


def misplaced(field: str, given: str, right: str) -> PydanticCustomError:
    """An error of the whole message that is told as one of its `field`."""
    message = f"it must be {right}"
    return PydanticCustomError("misplaced", "{message}", {"message": message, "field": field, "given": given})


class FunctionBody(Strict):
    """A function that the model may call. Where a call is forced, its arguments follow `parameters` in any case,
    so that `strict` may be anything.
    """

    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ToolBody(Strict):
    """A tool; there are functions only."""

    type: Literal["function"]
    function: FunctionBody

    def tool(self) -> Tool:
        """As the chat template is given it."""
        function = self.function
        return Tool(
            name=function.name, description=function.description or "", parameters=function.parameters or {}
        )


class ToolChoice(NamedTuple):
    """Which calls the answer may or must contain; `name` where `kind` is `named`."""

    kind: Literal["none", "auto", "required", "named"]
    name: str | None = None


def _tool_choice(value: object) -> ToolChoice:
    match value:
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name), **more_inside}, **more} if (
            not more_inside | more
        ):
            return ToolChoice("named", name)
    raise wrong('it must be "none", "auto", "required" or {"type": "function", "function": {"name": string}}')


_NAMED_SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "function"],
    "additionalProperties": False,
}
ToolChoiceField = Annotated[
    ToolChoice,
    PlainValidator(_tool_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED_SCHEMA]}),
]
