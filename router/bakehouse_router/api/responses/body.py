"""The body of `/v1/responses`: what is accepted has an effect, all else is refused by name.

The fields of `RefusedHere` are OpenAI's; what they ask for does not exist here.
"""

from typing import Annotated, Literal, cast

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic.config import JsonDict

from bakehouse_router.api.conversation import FUNCTION_NAME_PATTERN, FunctionBody, ToolChoice, misplaced
from bakehouse_router.api.fields import Count, JsonObject, OneOrMore, Only, Strict, wrong
from bakehouse_router.api.responses.input_items import InputItems
from bakehouse_router.api.schema import AnswerFields
from bakehouse_router.api.variants import describe_by_variants, variant
from bakehouse_router.text.messages import Tool

LOGPROBS = "message.output_text.logprobs"
_MAX_PAIRS, _MAX_KEY_CHARS, _MAX_VALUE_CHARS = 16, 64, 512  # OpenAI's own limits
_NOT_STORED = "answers are not stored here"


def _tool_type(value: object) -> object:
    if value != "function":
        raise wrong("it must be 'function': there are no built-in tools here")
    return value


def _tool_choice(value: object) -> ToolChoice:
    match value:
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "name": str(name), **more} if not more:
            return ToolChoice("named", name)
    raise wrong('it must be "none", "auto", "required" or {"type": "function", "name": string}')


_NAMED_SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "name": {"type": "string", "pattern": FUNCTION_NAME_PATTERN}},
    "required": ["type", "name"],
    "additionalProperties": False,
}
ToolChoiceField = Annotated[
    ToolChoice,
    PlainValidator(_tool_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED_SCHEMA]}),
]
Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=_MAX_KEY_CHARS)],
        Annotated[str, Field(max_length=_MAX_VALUE_CHARS)],
    ],
    Field(max_length=_MAX_PAIRS, fail_fast=True),
]


class _FunctionType(Strict):
    type: Annotated[Literal["function"], BeforeValidator(_tool_type)]


class FunctionToolBody(FunctionBody, _FunctionType):
    """A function that the model may call, in this face's flat form."""

    def tool(self) -> Tool:
        """As the chat template is given it."""
        return Tool(name=self.name, description=self.description or "", parameters=self.parameters or {})


def _by_format(schema: JsonDict) -> None:
    """Describes a format by what its type asks for, as `TextFormatBody` checks it."""
    fields = cast("JsonDict", schema.pop("properties"))
    by_schema = fields | {
        "type": {"const": "json_schema"},
        "name": {"type": "string", "pattern": FUNCTION_NAME_PATTERN},
        "schema": {"type": "object"},
    }
    unnamed = variant({"type": {"enum": ["text", "json_object"]}}, ["type"])
    describe_by_variants(schema, [unnamed, variant(by_schema, ["type", "name", "schema"])])


class TextFormatBody(Strict):
    """What the answer's text is: anything, a JSON object, or JSON by a schema, which holds `strict` or not."""

    model_config = ConfigDict(json_schema_extra=_by_format)

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern=FUNCTION_NAME_PATTERN)] | None = None
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _fits_its_type(self) -> "TextFormatBody":
        described = {"name": self.name, "schema": self.schema_}
        is_schema = self.type == "json_schema"
        for name, value in (described | {"description": self.description, "strict": self.strict}).items():
            if value is not None and not is_schema:
                raise misplaced(name, "given", f"left out where the type is {self.type}")
            if value is None and is_schema and name in described:
                raise misplaced(name, "not given", "given where the type is json_schema")
        return self


class TextBody(Strict):
    """How the answer's text is written."""

    format: TextFormatBody | None = None
    verbosity: Annotated[None, Only("medium", because='it must be "medium": nothing else is known here')] = None


class ResponseStreamOptions(Strict):
    """What a stream carries besides its text."""

    include_obfuscation: Annotated[
        None, Only(False, because="it must be false: events are not padded to hide how long their text is")
    ] = None


class RefusedHere(Strict):
    """Fields that are accepted with the value that has no effect, and refused with any other."""

    store: Annotated[None, Only(False, because=f"it must be false: {_NOT_STORED}")] = None
    previous_response_id: Annotated[
        None, Only(because=f"it must be null: {_NOT_STORED}; send the earlier items as input")
    ] = None
    conversation: Annotated[
        None, Only(because="it must be null: conversations are not stored here; send the earlier items as input")
    ] = None
    prompt: Annotated[None, Only(because="it must be null: prompts are not stored here")] = None
    background: Annotated[None, Only(False, because=f"it must be false: {_NOT_STORED}")] = None
    reasoning: Annotated[
        None, Only(because="it must be null; a template that knows it is given it by chat_template_kwargs")
    ] = None
    truncation: Annotated[
        None, Only("disabled", because='it must be "disabled": what is too long is refused, never cut')
    ] = None
    context_management: Annotated[None, Only(because="it must be null: nothing is cut or summed up here")] = None
    moderation: Annotated[None, Only(because="it must be null: nothing is moderated here")] = None
    max_tool_calls: Annotated[None, Only(because="it must be null: there are no built-in tools here")] = None
    service_tier: Annotated[
        None, Only("auto", "default", because='it must be "auto" or "default": there is one tier')
    ] = None
    prompt_cache_key: Annotated[
        None, Only(because="it must be null: what begins alike shares a cache; cache_salt keeps it apart")
    ] = None
    prompt_cache_retention: Annotated[
        None, Only(because="it must be null: blocks stay cached until their room is needed")
    ] = None
    safety_identifier: Annotated[None, Only(because="it must be null; use user")] = None


class ResponseBody(RefusedHere, AnswerFields):
    """The body of `/v1/responses`."""

    input: InputItems
    instructions: str | None = None
    max_output_tokens: OneOrMore | None = None
    text: TextBody | None = None
    tools: Annotated[list[FunctionToolBody], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[Literal["message.output_text.logprobs"]], Field(fail_fast=True)] | None = None
    top_logprobs: Count | None = None
    metadata: Metadata | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: JsonObject | None = None
