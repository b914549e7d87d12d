"""Reads grammars before llguidance does: finds their JSON schemas, and refuses what it would choke on or ignore.

Lark is scanned just far enough to tell strings, regexes and comments from the rest; llguidance parses it. What is
refused here is what its own limits do not cover (measured with 1.9): a schema with `multipleOf` 9,999,991 compiles
for 170 s and takes 5.8 GB.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite, lcm
from typing import cast

from bakehouse_replica.core.errors import InvalidRequest

# Deeper schemas may meet the recursion limits of parsers on their way, or overflow a thread's stack.
MAX_SCHEMA_DEPTH = 100
# The automaton of `multipleOf` has about as many states; 9,973 takes 0.1 s to compile.
MAX_MULTIPLE = 10_000

# llguidance reads numbers as float64, exactly only where their digits and their exponent are small: the constant
# 9007199254740993 would be written 9007199254740992, and 123456789.12345679 with another last digit.
MAX_EXACT = 2**53
_MAX_EXACT_EXPONENT = 22
_MAX_INTEGER = 2**63 - 1  # it generates none beyond, so that a larger maximum holds
_EXACT_KEYWORDS = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

OPTIONS_KEY = "x-guidance"  # llguidance's own options inside a schema
# One space or newline, nothing or all of it, wherever JSON allows white space: a model can write `{"a": 1}` and
# one item a line, and cannot go on with spaces for ever.
_WHITESPACE = "[ \n]?"

# What is not closed runs on to its end, so that scanning stays linear; llguidance refuses it.
_LARK_PART = re.compile(
    r"""
      (?P<hidden> "(?:\\.|[^"\\\n])*+"?i? | (?://|\#)[^\n]* | /(?:\\.|[^/\\])++/?[a-z]* )
    | %json\s* (?P<schema>)
    """,
    re.VERBOSE,
)
_SPECIAL_TOKEN = re.compile(r"<([^<>\s]+)>")
_ID_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
# `temperature` would change nothing here, and `stop` takes tokens back that have been sent already.
_UNKEPT_OPTION = re.compile(r"\[[^\[\]]*\b(temperature|stop)\s*=")


@dataclass(frozen=True, slots=True, kw_only=True)
class LarkGrammar:
    """A Lark grammar that has been looked through: its text, and the special tokens that it names.

    `special_names` as `<name>`, `special_ids` as `<[id]>`; `names_any_token`: by exclusion, or by `<[*]>`.
    """

    text: str
    special_names: frozenset[str]
    special_ids: tuple[range, ...]
    names_any_token: bool


def read_lark(text: str) -> LarkGrammar:
    """Checks a Lark grammar; white space in its JSON schemas is bounded unless they say otherwise.

    Raises `InvalidRequest`.
    """
    kept: list[str] = []
    bare: list[str] = []
    end = 0
    while part := _LARK_PART.search(text, end):
        bare.append(text[end : part.start()])
        kept.append(text[end : part.end()])
        end = part.end()
        if part["schema"] is not None:
            schema, end = _decode(text, end)
            check_schema(schema)
            options = schema.get(OPTIONS_KEY)
            kept.append(json.dumps(schema if options else {**schema, **_bounded_whitespace()}))
    kept.append(text[end:])
    bare.append(text[end:])
    return _with_specials("".join(kept), " ".join(bare))


def read_schema(text: str) -> str:
    """A JSON schema as a Lark grammar. Raises `InvalidRequest` where it is not an object or asks for too much."""
    schema, end = _decode(text, 0)
    if text[end:].strip():
        raise InvalidRequest("the JSON schema is followed by something else")
    if OPTIONS_KEY in schema:
        raise InvalidRequest(f"the JSON schema has {OPTIONS_KEY!r}; it must have keywords of JSON schema only")
    check_schema(schema)
    return f"start: %json {json.dumps({**schema, **_bounded_whitespace()})}"


def check_schema(schema: object) -> None:
    """Raises `InvalidRequest` where a schema is nested too deeply, has multiples of too large a number, or numbers
    that an answer could not keep to exactly.
    """
    depth = depth_of(schema)
    if depth > MAX_SCHEMA_DEPTH:
        raise InvalidRequest(f"the JSON schema is {depth} levels deep; the limit is {MAX_SCHEMA_DEPTH}")
    common = 1
    for value in _objects(schema):
        _check_numbers(value)
        match value.get("multipleOf"):
            case bool():  # no schema, or a wrong one
                pass
            case int() | float() as multiple if isfinite(multiple) and multiple > 0:
                common = lcm(common, _coefficient(multiple))
                if common > MAX_MULTIPLE:
                    raise InvalidRequest(
                        f"multipleOf is {multiple!r}; the significant digits of all multiples in a schema must "
                        f"have a common multiple of at most {MAX_MULTIPLE}, here it is {common}"
                    )


def _check_numbers(schema: Mapping[str, object]) -> None:
    for keyword in _EXACT_KEYWORDS:
        left = [schema.get(keyword)]
        while left:
            value = left.pop()
            if isinstance(value, dict | list):
                left.extend(value.values() if isinstance(value, dict) else value)
            elif not _is_exact(value) and not (keyword == "maximum" and _is_beyond_all(value)):
                raise InvalidRequest(
                    f"{keyword} has the number {str(value)[:40]}, which cannot be kept to exactly; the limit is "
                    f"{MAX_EXACT} without the decimal point"
                )


def _is_beyond_all(value: object) -> bool:
    return isinstance(value, int | float) and value >= _MAX_INTEGER


def _is_exact(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    digits = Decimal(repr(value)).normalize().as_tuple()
    if not isinstance(digits.exponent, int):  # infinite, as 1e999 is
        return False
    return int("".join(map(str, digits.digits))) <= MAX_EXACT and abs(digits.exponent) <= _MAX_EXACT_EXPONENT


def depth_of(value: object) -> int:
    """How many objects and arrays stand inside each other at the deepest place; 0 for a plain value."""
    depth = 0
    level: list[object] = [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth


def _objects(value: object) -> Iterator[Mapping[str, object]]:
    """Every JSON object in a value, itself among them."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            yield item
            left.extend(item.values())
        elif isinstance(item, list):
            left.extend(item)


def _coefficient(number: float) -> int:
    """A positive number's significant digits, and the zeros before its decimal point, as a whole number."""
    digits = Decimal(repr(number)).normalize().as_tuple()
    assert isinstance(digits.exponent, int), f"{number} is finite"
    return int("".join(map(str, digits.digits)) + "0" * max(0, digits.exponent))


def _decode(text: str, begin: int) -> tuple[dict[str, object], int]:
    """The JSON object that begins at `begin`, and where it ends."""
    try:
        value, end = json.JSONDecoder(parse_constant=_refuse_constant).raw_decode(text, begin)
    except RecursionError:
        raise InvalidRequest(f"the JSON schema is nested too deeply; the limit is {MAX_SCHEMA_DEPTH}") from None
    except ValueError as error:
        raise InvalidRequest(f"the JSON schema is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"the JSON schema is {text[begin:end][:50]}; it must be an object")
    return cast("dict[str, object]", value), end


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _bounded_whitespace() -> dict[str, object]:
    return {OPTIONS_KEY: {"whitespace_pattern": _WHITESPACE}}


def _with_specials(text: str, bare: str) -> LarkGrammar:
    if option := _UNKEPT_OPTION.search(bare):
        raise InvalidRequest(
            f"the grammar sets {option[1]!r} for a rule, which is not supported (instead of stop: suffix, or lazy)"
        )
    names = frozenset(match[1] for match in _SPECIAL_TOKEN.finditer(bare))
    lists = [name[1:-1] for name in names if name.startswith("[")]
    ranges = [match for listed in lists for match in _ID_RANGE.finditer(listed)]
    return LarkGrammar(
        text=text,
        special_names=frozenset(f"<{name}>" for name in names if not name.startswith("[")),
        special_ids=tuple(range(int(match[1]), int(match[2] or match[1]) + 1) for match in ranges),
        names_any_token=any("^" in listed or "*" in listed for listed in lists),
    )
