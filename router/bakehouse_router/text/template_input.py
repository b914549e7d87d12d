"""A conversation as the plain values that chat templates read, every string of a client's in disguise.

The shapes are those of OpenAI's API, which templates are written for; only a call's arguments are an object rather
than JSON text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from bakehouse_replica.core.errors import InvalidRequest

from bakehouse_router.text.messages import ChatMessage, Tool, ToolCall
from bakehouse_router.text.tokenizer import Disguises

# Deeper values exhaust Python's stack in a template's `tojson`; no tool or argument of any use comes near.
_MAX_DEPTH = 100

_NO_PARAMETERS = {"type": "object", "properties": {}}


def template_messages(
    messages: Sequence[ChatMessage], disguises: Disguises, *, knows_developer: bool
) -> list[dict[str, object]]:
    """The turns. What a tool returned carries the tool's name, which is that of the call it answers.

    Raises `InvalidRequest` where a call's arguments are not a JSON object.
    """
    names = {call.call_id: call.name for message in messages for call in message.tool_calls}
    turns = []
    for index, message in enumerate(messages):
        name = message.name
        if name is None and message.tool_call_id is not None:
            name = names.get(message.tool_call_id)
        turns.append(_turn(replace(message, name=name), f"messages[{index}]", disguises, knows_developer))
    return turns


def template_tools(tools: Sequence[Tool], disguises: Disguises) -> list[object]:
    """The tools, each with all keys, as templates join and list them without asking whether they are there."""
    described = []
    for index, tool in enumerate(tools):
        function = {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters or _NO_PARAMETERS,
        }
        described.append(
            disguised({"type": "function", "function": function}, disguises, f"tools[{index}].function")
        )
    return described


def disguised(value: object, disguises: Disguises, param: str, depth: int = 0) -> object:
    """A copy of a JSON value with all its strings in disguise, keys too; `InvalidRequest` if nested too deeply."""
    if isinstance(value, str):
        return disguises.apply(value)
    if not isinstance(value, Mapping | list | tuple):
        return value
    if depth >= _MAX_DEPTH:
        raise InvalidRequest(f"{param} is nested more than {_MAX_DEPTH} levels deep", param)
    if isinstance(value, Mapping):
        return {
            disguises.apply(str(key)): disguised(item, disguises, param, depth + 1) for key, item in value.items()
        }
    return [disguised(item, disguises, param, depth + 1) for item in value]


def _turn(message: ChatMessage, param: str, disguises: Disguises, knows_developer: bool) -> dict[str, object]:
    # `developer` is what newer clients call `system`.
    role = "system" if message.role == "developer" and not knows_developer else message.role
    turn: dict[str, object] = {"role": role, "content": disguises.apply(message.content)}
    if message.name is not None:
        turn["name"] = disguises.apply(message.name)
    if message.tool_calls:
        turn["tool_calls"] = [
            _call(call, f"{param}.tool_calls[{index}]", disguises) for index, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = disguises.apply(message.tool_call_id)
    return turn


def _call(call: ToolCall, param: str, disguises: Disguises) -> dict[str, object]:
    arguments = _parsed_arguments(call.arguments, f"{param}.function.arguments")
    return {
        "id": disguises.apply(call.call_id),
        "type": "function",
        "function": {
            "name": disguises.apply(call.name),
            "arguments": disguised(arguments, disguises, f"{param}.function.arguments"),
        },
    }


def _parsed_arguments(text: str, param: str) -> dict[str, object]:
    if not text.strip():  # how some clients write a call without arguments
        return {}
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param) from error
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{param} is {text[:100]!r}; it must be a JSON object", param)
    return arguments
