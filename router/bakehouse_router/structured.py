"""Structured output: from a request's fields to a grammar, with limits on its size, and its check before queueing.

`response_format` is OpenAI's field, `structured_outputs` vLLM's. Either constrains the whole answer; a JSON schema
always holds, `strict` or not. In JSON, white space is at most one space or newline in a place.
"""

import asyncio
import json
import re
from collections.abc import Mapping

from bakehouse_replica.core.errors import InvalidRequest, Overloaded
from bakehouse_replica.core.sampling import Grammar, GrammarKind
from bakehouse_replica.grammar_text import depth_of
from bakehouse_replica.recently_used import RecentlyUsed
from bakehouse_replica.vocabulary import Vocabulary

from bakehouse_router.grammar_sandbox import GrammarSandbox, TooCostly
from bakehouse_router.settings import GatewaySettings

Fields = Mapping[str, object]

_ANY_OBJECT = {"type": "object"}
_SCHEMA_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # as OpenAI has it
_CONSTRAINTS = ("json", "regex", "choice", "grammar")

_MAX_WAIT_S = 10.0  # for other grammars
_MAX_VERDICTS = 256


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


class GrammarChecker:
    """Tries grammars, so that a bad one is refused before anything is queued; remembers what it has found."""

    def __init__(self, vocabulary: Vocabulary, settings: GatewaySettings) -> None:
        self._settings = settings
        self._sandbox = GrammarSandbox(vocabulary)
        self._trying = asyncio.Lock()
        self._verdicts: RecentlyUsed[Grammar, str] = RecentlyUsed(_MAX_VERDICTS)

    async def check(self, grammar: Grammar, param: str = "structured_outputs") -> None:
        """Raises `InvalidRequest` naming `param` where nothing can be generated by the grammar.

        Raises `Overloaded` where too many others are being tried.
        """
        _check_size(grammar.text, param, self._settings)
        fault = self._verdicts.find(grammar)
        if fault is None:
            try:
                fault = await self._try(grammar)
            except TooCostly as error:  # not remembered: the machine may have been busy
                raise InvalidRequest(f"{param}: {error}", param) from error
        if fault:
            raise InvalidRequest(f"{param}: {fault}", param)

    async def _try(self, grammar: Grammar) -> str:
        """What is wrong with a grammar, empty where nothing is."""
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await self._trying.acquire()
        except TimeoutError:
            raise Overloaded("too many grammars are being compiled; try again later") from None
        # Shielded, so that a client who leaves does not let another grammar in while the sandbox is busy.
        return await asyncio.shield(asyncio.ensure_future(self._find_fault(grammar)))

    async def _find_fault(self, grammar: Grammar) -> str:
        try:
            fault = self._verdicts.find(grammar)
            if fault is None:
                fault = await asyncio.to_thread(self._sandbox.find_fault, grammar)
                self._verdicts.keep(grammar, fault)
            return fault
        finally:
            self._trying.release()
