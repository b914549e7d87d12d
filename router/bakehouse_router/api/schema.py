"""What a client may send: the OpenAI request bodies, strictly typed; every field here has an effect.

No coercion ("5" and true are no numbers), no unknown fields. `null` for an optional field means that it is not
given. Ranges that belong to sampling are checked by `SamplingParams`, which every entry shares.
"""

from typing import Annotated, Literal, TypeVar

from bakehouse_replica.core.errors import InvalidRequest
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

Role = Literal["system", "developer", "user", "assistant"]

_N_CHARS_SHOWN = 60
# Beyond any context or vocabulary; JSON integers of thousands of digits must not reach arithmetic or messages.
_COUNT_LIMIT = 2**63
_PART_FIELDS = {"type", "text"}


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{message}", {"message": message})


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _one_prompt(value: object) -> str | tuple[int, ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(map(_is_id, value)):
        return tuple(value)
    if value in ("", []):
        raise _wrong("it must not be empty")
    raise _wrong("it must be a string, a list of token ids, or a list of either")


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, list) and value and not all(map(_is_id, value)):
        return tuple(map(_one_prompt, value))
    return (_one_prompt(value),)


def _text_part(part: object) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise _wrong('a part must be {"type": "text", "text": string}; other types are not supported')
    for unsupported in part.keys() - _PART_FIELDS:
        raise _wrong(f"a text part has the unsupported field {unsupported!r}")
    return str(part["text"])


def _content(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        return "".join(map(_text_part, value))
    raise _wrong("it must be a string or a list of text parts")


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _wrong("it must be a string or a list of strings")
    if "" in stops:
        raise _wrong("a stop string must not be empty")
    return tuple(dict.fromkeys(stops))


Prompts = Annotated[tuple[str | tuple[int, ...], ...], PlainValidator(_prompts)]
Content = Annotated[str, PlainValidator(_content)]
Stops = Annotated[tuple[str, ...], PlainValidator(_stops)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """What a stream carries besides its text."""

    include_usage: bool | None = None


class GenerationBody(_Strict):
    """The fields that both routes share."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1, lt=_COUNT_LIMIT)
    min_tokens: int | None = Field(default=None, ge=0, lt=_COUNT_LIMIT)
    n: int | None = Field(default=None, ge=1, lt=_COUNT_LIMIT)
    temperature: float | None = None
    top_k: int | None = Field(default=None, ge=0)
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Stops | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, max_length=256)
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(default=None, max_length=256)


class ChatMessageBody(_Strict):
    """One message; text parts are joined."""

    role: Role
    content: Content


class ChatBody(GenerationBody):
    """The body of `/v1/chat/completions`."""

    messages: list[ChatMessageBody] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=_COUNT_LIMIT)


class CompletionBody(GenerationBody):
    """The body of `/v1/completions`."""

    prompt: Prompts


Body = TypeVar("Body", bound=GenerationBody)


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).removeprefix(".")


def _shown(value: object) -> str:
    if not isinstance(value, str | int | float | bool | None):
        return f"a {'list' if isinstance(value, list) else 'JSON object'}"
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a very large integer"
    return text if len(text) <= _N_CHARS_SHOWN else text[:_N_CHARS_SHOWN] + "…"


def _complaint(kind: str, param: str, message: str, value: object) -> str:
    if kind == "extra_forbidden":
        return f"unsupported field: {param}"
    if kind == "missing":
        return f"{param} is required"
    said = message.removeprefix("Input should be ")
    return f"{param} is {_shown(value)}; " + (message if said == message else f"it must be {said}")


def parse_body(model: type[Body], fields: dict[str, object]) -> Body:
    """`fields` as `model`. Raises `InvalidRequest` naming the first field that is wrong."""
    try:
        body = model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = _path(first["loc"])
        raise InvalidRequest(_complaint(first["type"], param, first["msg"], first["input"]), param) from None
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is given; it is allowed only where stream is true", "stream_options")
    return body
