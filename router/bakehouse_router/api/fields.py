"""The types that fields of request bodies have: no coercion, and a refusal that says what would be right.

`null` for an optional field means that it is not given.
"""

import json
import re
from typing import Annotated

from bakehouse_replica.core.sampling import MAX_BIAS
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

# Beyond any context or vocabulary; JSON integers of thousands of digits must not reach arithmetic or messages.
COUNT_LIMIT = 2**63
MAX_NAME_CHARS = 256
MAX_MESSAGES = 4096
MAX_PARTS = 1024
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,18}")
_SHOWN_CHARS = 60


def wrong(message: str) -> PydanticCustomError:
    """What a validator raises: the sentence that follows the field's name and value."""
    return PydanticCustomError("wrong", "{message}", {"message": message})


class Strict(BaseModel):
    """A part of a body."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def _are_ids(values: list[object]) -> bool:
    """At once for all of them: a prompt may have millions."""
    return set(map(type, values)) <= {int}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _one_prompt(value: object) -> str | tuple[int, ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and _are_ids(value):
        return tuple(value)
    if value in ("", []):
        raise wrong("it must not be empty")
    raise wrong("it must be a string, a list of token ids, or a list of either")


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, list) and value and not _are_ids(value):
        return tuple(map(_one_prompt, value))
    return (_one_prompt(value),)


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise wrong("it must be a string or a list of strings")
    if "" in stops:
        raise wrong("a stop string must not be empty")
    return tuple(dict.fromkeys(stops))


def _bad_words(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) and word for word in value):
        raise wrong("it must be a list of strings that are not empty")
    return tuple(dict.fromkeys(value))


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise wrong("it must be an object from token ids, as strings, to numbers")
    biases = []
    for key, bias in value.items():
        if not _TOKEN_ID.fullmatch(key):
            raise wrong(f"its key {key[:_SHOWN_CHARS]!r} is not a token id")
        if not _is_number(bias) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise wrong(f"the bias of token id {key} must be a number between {-MAX_BIAS:g} and {MAX_BIAS:g}")
        biases.append((int(key), float(bias)))
    return tuple(biases)


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise wrong("it must be a list of token ids")
    if not _are_ids(value):
        index = next(index for index, token_id in enumerate(value) if type(token_id) is not int)
        raise wrong(f"its item {index} is not a token id, which is an integer")
    return tuple(value)


def _some_token_ids(value: object) -> tuple[int, ...]:
    if value == []:
        raise wrong("it must not be empty")
    return _token_ids(value)


class Only:
    """Annotates a field of which only some values are accepted: those that ask for what happens anyway, and null.

    `because` says why there is no other, as the refusal does.
    """

    def __init__(self, *allowed: object, because: str) -> None:
        self._allowed = (*allowed, None)
        self._because = because

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, object]:
        return {"enum": list(self._allowed)}

    def _check(self, value: object) -> None:
        if not any(type(value) is type(one) and value == one for one in self._allowed):
            raise wrong(self._because)


def _finite(value: dict[str, object]) -> dict[str, object]:
    try:
        json.dumps(value, allow_nan=False)
    except RecursionError:
        raise wrong("it is nested too deeply") from None
    except ValueError:  # 1e999 is infinite once it is parsed
        raise wrong("it contains a number that is too large") from None
    return value


def _parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list) and value:
        return value
    raise wrong("it must be a string or a list of text parts")


def text_or_parts(part: type[Strict]) -> BeforeValidator:
    """Reads a string as the one text part that it stands for."""
    return BeforeValidator(_parts, json_schema_input_type=str | Annotated[list[part], Field(min_length=1)])  # type: ignore[valid-type]


_ID_SCHEMA: dict[str, object] = {"type": "integer", "minimum": 0}
_IDS_SCHEMA: dict[str, object] = {"type": "array", "items": _ID_SCHEMA}
_TEXT_SCHEMA: dict[str, object] = {"type": "string", "minLength": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        _TEXT_SCHEMA,
        _IDS_SCHEMA | {"minItems": 1},
        {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1},
        {"type": "array", "items": _IDS_SCHEMA | {"minItems": 1}, "minItems": 1},
    ]
}
_STOP_SCHEMA = {"anyOf": [_TEXT_SCHEMA, {"type": "array", "items": _TEXT_SCHEMA}]}
_BIAS_SCHEMA = {
    "type": "object",
    "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
    "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
}

Prompts = Annotated[tuple[str | tuple[int, ...], ...], PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
Stops = Annotated[tuple[str, ...], PlainValidator(_stops), WithJsonSchema(_STOP_SCHEMA)]
BadWords = Annotated[
    tuple[str, ...], PlainValidator(_bad_words), WithJsonSchema({"type": "array", "items": _TEXT_SCHEMA})
]
LogitBias = Annotated[tuple[tuple[int, float], ...], PlainValidator(_logit_bias), WithJsonSchema(_BIAS_SCHEMA)]
TokenIds = Annotated[tuple[int, ...], PlainValidator(_token_ids), WithJsonSchema(_IDS_SCHEMA)]
SomeTokenIds = Annotated[
    tuple[int, ...], PlainValidator(_some_token_ids), WithJsonSchema(_IDS_SCHEMA | {"minItems": 1})
]
Count = Annotated[int, Field(ge=0, lt=COUNT_LIMIT)]
OneOrMore = Annotated[int, Field(ge=1, lt=COUNT_LIMIT)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
JsonObject = Annotated[dict[str, object], AfterValidator(_finite)]
