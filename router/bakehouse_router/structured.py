"""Structured output: from a request's fields to a grammar, with limits on its size, and its check before queueing.

`response_format` is OpenAI's field, `structured_outputs` vLLM's. Either constrains the whole answer; a JSON schema
always holds, `strict` or not. In JSON, white space is at most one space or newline in a place.
"""

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType

from bakehouse_replica.core.errors import InvalidRequest, Overloaded
from bakehouse_replica.core.sampling import Grammar, GrammarKind
from bakehouse_replica.grammar_text import depth_of
from bakehouse_replica.recently_used import RecentlyUsed
from bakehouse_replica.vocabulary import Vocabulary

from bakehouse_router.calls import ToolUse
from bakehouse_router.grammar_sandbox import Bounds, GrammarSandbox
from bakehouse_router.lanes import Lane
from bakehouse_router.settings import GatewaySettings

Fields = Mapping[str, object]

_ANY_OBJECT = {"type": "object"}
_SCHEMA_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # as OpenAI has it
_CONSTRAINTS = ("json", "regex", "choice", "grammar")

MOST = Bounds(compute_s=1.5, n_bytes=2 * 1024**3)  # for any grammar
_MAX_WAIT_S = 10.0  # for a verdict, in all lanes together
_MAX_BLAME_S = 2.0
_MAX_VERDICTS = 256
_NO_PARTS: Mapping[str, Grammar] = MappingProxyType({})

# Where these fields are wrong, the place is one in a text of ours.
_WRITTEN_HERE = ("tools", "structured_outputs.choice")
_PLACE = re.compile(r"\bat \d+\(\d+\): ")


def grammar_of(
    response_format: Fields | None, structured_outputs: Fields | None, settings: GatewaySettings
) -> Grammar | None:
    """What the fields constrain an answer to, None where that is nothing.

    Raises `InvalidRequest` naming the field that is wrong. Whether the grammar compiles is `GrammarChecker`'s.
    """
    formatted = None if response_format is None else _from_response_format(response_format, settings)
    if structured_outputs is None:
        return formatted
    if formatted is not None:
        raise InvalidRequest(
            "response_format and structured_outputs are both given; only one of them can constrain an answer",
            "structured_outputs",
        )
    return _from_structured_outputs(structured_outputs, settings)


def grammar_field(structured_outputs: Fields | None) -> str:
    """The field that a grammar of `grammar_of` came from."""
    if structured_outputs is None:
        return "response_format"
    return next((f"structured_outputs.{key}" for key in structured_outputs), "structured_outputs")


def _from_response_format(fields: Fields, settings: GatewaySettings) -> Grammar | None:
    kind = fields.get("type")
    match kind:
        case "text" | "json_object":
            _refuse_unknown(fields, ("type",), "response_format")
            return None if kind == "text" else _schema_grammar(_ANY_OBJECT, "response_format", settings)
        case "json_schema":
            _refuse_unknown(fields, ("type", "json_schema"), "response_format")
            return _from_json_schema(fields.get("json_schema"), settings)
        case _:
            raise InvalidRequest(
                f"response_format.type is {kind!r}; it must be 'text', 'json_object' or 'json_schema'",
                "response_format.type",
            )


def _from_json_schema(fields: object, settings: GatewaySettings) -> Grammar:
    param = "response_format.json_schema"
    if not isinstance(fields, Mapping):
        raise InvalidRequest(f"{param} is {_shown(fields)}; it must be an object with name and schema", param)
    _refuse_unknown(fields, ("name", "description", "schema", "strict"), param)
    name, strict, description = (fields.get(key) for key in ("name", "strict", "description"))
    if not isinstance(name, str) or not _SCHEMA_NAME.fullmatch(name):
        raise InvalidRequest(
            f"{param}.name is {_shown(name)}; it must be 1 to 64 letters, digits, dashes or underscores",
            f"{param}.name",
        )
    if not isinstance(strict, bool | None):
        raise InvalidRequest(f"{param}.strict is {_shown(strict)}; it must be a boolean", f"{param}.strict")
    if not isinstance(description, str | None):
        raise InvalidRequest(
            f"{param}.description is {_shown(description)}; it must be a string", f"{param}.description"
        )
    return _schema_grammar(fields.get("schema"), f"{param}.schema", settings)


def _from_structured_outputs(fields: Fields, settings: GatewaySettings) -> Grammar:
    _refuse_unknown(fields, _CONSTRAINTS, "structured_outputs")
    if len(fields) != 1:
        raise InvalidRequest(
            f"structured_outputs has {len(fields)} constraints; it must have one of {', '.join(_CONSTRAINTS)}",
            "structured_outputs",
        )
    ((key, value),) = fields.items()
    param = f"structured_outputs.{key}"
    if key == "choice":
        return _choice_grammar(value, param, settings)
    if key == "json" and not isinstance(value, str):
        return _schema_grammar(value, param, settings)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param} is {_shown(value)}; it must be a non-empty string", param)
    _check_size(value, param, settings)
    match key:
        case "json":
            return _schema_grammar(_parsed(value, param), param, settings)
        case "regex":
            return Grammar(kind=GrammarKind.REGEX, text=value)
        case _:
            return Grammar(kind=GrammarKind.LARK, text=value)


def schema_text(schema: object, param: str, settings: GatewaySettings) -> str:
    """A JSON schema's text. Raises `InvalidRequest` naming `param` where it is none, too deep, or too long."""
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{param} is {_shown(schema)}; it must be a JSON schema, as an object", param)
    depth = depth_of(schema)
    if depth > settings.max_schema_depth:
        raise InvalidRequest(f"{param} is {depth} levels deep; the limit is {settings.max_schema_depth}", param)
    text = json.dumps(schema)
    _check_size(text, param, settings)
    return text


def _schema_grammar(schema: object, param: str, settings: GatewaySettings) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=schema_text(schema, param, settings))


def _choice_grammar(choices: object, param: str, settings: GatewaySettings) -> Grammar:
    if not isinstance(choices, list | tuple) or not choices:
        raise InvalidRequest(f"{param} is {_shown(choices)}; it must be a non-empty list of strings", param)
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise InvalidRequest(f"{param} holds {_shown(choice)}; it must hold non-empty strings", param)
    # One terminal, so that the number of choices costs no rules.
    text = f"start: CHOICE\nCHOICE: {' | '.join(map(_lark_string, choices))}"
    _check_size(text, param, settings)
    return Grammar(kind=GrammarKind.LARK, text=text)


def _lark_string(text: str) -> str:
    """Lark's strings are JSON's, but for the delete character."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def _parsed(text: str, param: str) -> object:
    try:
        parsed: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param) from error
    return parsed


def _check_size(text: str, param: str, settings: GatewaySettings) -> None:
    try:
        n_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param} holds half a surrogate pair, which is no text: {error}", param) from error
    if n_bytes > settings.max_schema_bytes:
        raise InvalidRequest(f"{param} has {n_bytes} bytes; the limit is {settings.max_schema_bytes}", param)


def _refuse_unknown(fields: Fields, known: tuple[str, ...], param: str) -> None:
    for key in fields:
        if key not in known:
            raise InvalidRequest(
                f"{param} has the unknown field {_shown(key)}; known here: {', '.join(known)}",
                f"{param}.{key}"[:200],
            )


def _shown(value: object) -> str:
    """A value in a message; nested ones by their type, as `repr` recurses."""
    return type(value).__name__ if isinstance(value, list | tuple | Mapping) else repr(value)[:100]


def schemas_of_tools(tool_use: ToolUse) -> dict[str, Grammar]:
    """The arguments of each tool that may be called, by the field that they come from."""
    return {
        f"tools[{index}].function.parameters": Grammar(
            kind=GrammarKind.JSON_SCHEMA, text=json.dumps({"type": "object", **tool.parameters})
        )
        for index, tool in enumerate(tool_use.tools)
        if tool_use.choice != "named" or tool.name == tool_use.name
    }


class GrammarChecker:
    """Tries grammars, so that a bad one is refused before anything is queued; remembers what it has found.

    Each begins in a wide lane; what goes beyond its bounds begins again in the next, which is narrower, so that
    only its like waits for it. Measured on two cores with V = 151,936: a regex takes 5 ms, a schema of 4 kB 12 ms,
    one of 27 kB 40 ms, 64 tools 60 ms. A new regex waits 0.1 s while a client keeps 12 costly grammars on the way
    all the time, 0.6 s while it keeps 64.
    """

    def __init__(self, vocabulary: Vocabulary, settings: GatewaySettings) -> None:
        self._settings = settings
        self._sandbox = GrammarSandbox(vocabulary)
        self._lanes = (
            (Lane(16, max_waiting=1024), Bounds(compute_s=0.02, n_bytes=256 * 1024**2)),
            (Lane(2, max_waiting=32), Bounds(compute_s=0.15, n_bytes=512 * 1024**2)),
            (Lane(1, max_waiting=4), MOST),
        )
        self._verdicts: RecentlyUsed[Grammar, str] = RecentlyUsed(_MAX_VERDICTS)

    async def check(
        self,
        grammar: Grammar,
        param: str = "structured_outputs",
        *,
        parts: Mapping[str, Grammar] = _NO_PARTS,
        tenant: str = "",
    ) -> None:
        """Raises `InvalidRequest` naming `param` where nothing can be generated by the grammar.

        Of a grammar made of `parts`, by field, the first that is wrong alone is named. Raises `Overloaded` where
        too many others are being tried; tenants take turns.
        """
        try:
            await self._check(grammar, param, tenant)
        except InvalidRequest:
            # What takes longer than this is left unnamed.
            with suppress(TimeoutError, Overloaded):
                async with asyncio.timeout(_MAX_BLAME_S):
                    for field, part in parts.items():
                        await self._check(part, field, tenant)
            raise

    async def _check(self, grammar: Grammar, param: str, tenant: str) -> None:
        _check_size(grammar.text, param, self._settings)
        fault = self._verdicts.find(grammar)
        if fault is None:
            fault = await self._find_fault(grammar, tenant)
        if fault:
            is_clients_text = param not in _WRITTEN_HERE
            raise InvalidRequest(f"{param}: {fault if is_clients_text else _PLACE.sub('', fault)}", param)

    async def _find_fault(self, grammar: Grammar, tenant: str) -> str:
        """What is wrong with a grammar, empty where nothing is."""
        await self._sandbox.start()
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                for lane, bounds in self._lanes:
                    async with lane.place(tenant):
                        fault = self._verdicts.find(grammar)  # another may have asked meanwhile
                        if fault is None:
                            fault = await self._sandbox.find_fault(grammar, bounds)
                    if fault is not None:
                        self._verdicts.keep(grammar, fault)
                        return fault
        except TimeoutError:
            raise Overloaded("too many grammars are being compiled; try again later") from None
        # Not remembered: the server may have died of something else.
        return (
            f"the grammar takes more than {MOST.compute_s:g} s, more than {MOST.n_bytes // 1024**3} GiB of memory "
            "or too deep a stack to compile"
        )
