"""Checks the fields of a body and says in one sentence what is wrong with the first that is."""

import json
from collections.abc import Iterator, Mapping
from typing import TypeVar

from bakehouse_replica.core.errors import InvalidRequest
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bakehouse_router.api.fields import Strict

Body = TypeVar("Body", bound=Strict)

_N_CHARS_SHOWN = 60
_N_PARAM_CHARS = 200
# Each error of a body costs about 1 kB once it is told; one with more is none that anyone wrote by hand.
_MAX_ERRORS_TOLD = 1000
# In JSON's words instead of pydantic's.
_PLAIN_TYPES = {"model_type": "an object", "dict_type": "an object", "list_type": "a list"}


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    path = "".join(parts).removeprefix(".")
    return path if len(path) <= _N_PARAM_CHARS else path[:_N_PARAM_CHARS] + "…"


def _shown(value: object) -> str:
    if isinstance(value, bool | None):
        return json.dumps(value)
    if not isinstance(value, str | int | float):
        return f"a {'list' if isinstance(value, list) else 'JSON object'}"
    try:
        text = repr(value[: _N_CHARS_SHOWN + 1] if isinstance(value, str) else value)
    except ValueError:  # an integer of more digits than Python prints
        return "a very large integer"
    return text if len(text) <= _N_CHARS_SHOWN else text[:_N_CHARS_SHOWN] + "…"


def _complaint(error: ErrorDetails) -> InvalidRequest:
    kind, param, message = error["type"], _path(error["loc"]), error["msg"]
    if kind == "extra_forbidden":
        return InvalidRequest(f"unsupported field: {param}", param)
    if kind == "missing":
        return InvalidRequest(f"{param} is required", param)
    if kind == "misplaced":
        field = _path((*error["loc"], error["ctx"]["field"]))
        return InvalidRequest(f"{field} is {error['ctx']['given']}; {message}", field)
    if kind == "too_long":
        limit = error["ctx"]["max_length"]
        return InvalidRequest(f"{param} has too many items; there may be at most {limit}", param)
    if kind == "string_pattern_mismatch":
        message = f"Input should be a text of the pattern {error['ctx']['pattern']}"
    if kind == "too_short":
        return InvalidRequest(f"{param} is empty; it must have at least {error['ctx']['min_length']} item", param)
    if kind in _PLAIN_TYPES:
        message = f"Input should be {_PLAIN_TYPES[kind]}"
    said = message.removeprefix("Input should be ")
    right = message if said == message else f"it must be {said}"
    return InvalidRequest(f"{param} is {_shown(error['input'])}; {right}", param)


def _refusal(error: ValidationError) -> InvalidRequest:
    if error.error_count() > _MAX_ERRORS_TOLD:
        return InvalidRequest(f"the body is wrong in {error.error_count()} places")
    return _complaint(error.errors(include_url=False)[0])


def parse_body(model: type[Body], fields: Mapping[str, object]) -> Body:
    """`fields` as `model`. Raises `InvalidRequest` naming the first field that is wrong or unknown."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error) from None


def parse_tolerantly(model: type[Body], fields: Mapping[str, object]) -> tuple[Body, tuple[str, ...]]:
    """`fields` as `model`, and the paths of those that it does not know."""
    try:
        body = model.model_validate(fields, extra="ignore")
    except ValidationError as error:
        raise _refusal(error) from None
    return body, tuple(map(_path, _unknown(body, fields)))


def _unknown(body: BaseModel, fields: object) -> Iterator[tuple[int | str, ...]]:
    if not isinstance(fields, dict):
        return
    known = {field.alias or name: name for name, field in type(body).model_fields.items()}
    for name, value in fields.items():
        if name not in known:
            yield (name,)
            continue
        parsed = getattr(body, known[name])
        if isinstance(parsed, BaseModel):
            yield from ((name, *path) for path in _unknown(parsed, value))
        elif isinstance(parsed, list) and isinstance(value, list):
            for index, (part, raw) in enumerate(zip(parsed, value, strict=True)):
                if isinstance(part, BaseModel):
                    yield from ((name, index, *path) for path in _unknown(part, raw))
