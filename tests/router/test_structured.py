"""From a request's fields to a grammar, and what is refused on the way."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
from bakehouse_replica.core.errors import InvalidRequest, Overloaded
from bakehouse_replica.core.sampling import Grammar, GrammarKind
from bakehouse_replica.grammar_compiler import GrammarCompiler
from bakehouse_router import structured
from bakehouse_router.calls import ToolUse
from bakehouse_router.grammar_sandbox import Bounds
from bakehouse_router.settings import GatewaySettings
from bakehouse_router.structured import GrammarChecker, grammar_field, grammar_of, schemas_of_tools
from bakehouse_router.text.messages import Tool
from bakehouse_router.text.tools.hermes import HermesFormat
from grammars import N_VOCABULARY, lark, regex, schema, small_vocabulary
from hypothesis import example, given, settings
from hypothesis import strategies as st

SETTINGS = GatewaySettings()
WAIT_S = 200.0  # what is tried is niced: on busy cores its seconds take many times as long
COMPILER = GrammarCompiler(small_vocabulary, N_VOCABULARY)


def json_schema(**fields: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}, **fields}}


def deep_schema(n_levels: int) -> dict[str, object]:
    value: dict[str, object] = {}
    for _ in range(n_levels - 1):
        value = {"items": value}
    return value


@pytest.mark.parametrize(
    ("response_format", "structured_outputs", "grammar"),
    [
        (None, None, None),
        ({"type": "text"}, None, None),
        ({"type": "json_object"}, None, schema('{"type": "object"}')),
        (json_schema(), None, schema('{"type": "object"}')),
        (json_schema(strict=True, description="d"), None, schema('{"type": "object"}')),
        (json_schema(strict=None), None, schema('{"type": "object"}')),
        (None, {"json": {"type": "integer"}}, schema('{"type": "integer"}')),
        (None, {"json": '{"type": "integer"}'}, schema('{"type": "integer"}')),
        ({"type": "text"}, {"regex": "a+"}, regex("a+")),
        (None, {"grammar": "start: /a/"}, lark("start: /a/")),
        (None, {"choice": ["a", 'b"\n']}, lark('start: CHOICE\nCHOICE: "a" | "b\\"\\n"')),
    ],
)
def test_each_form_becomes_a_grammar(
    response_format: Mapping[str, object] | None,
    structured_outputs: Mapping[str, object] | None,
    grammar: Grammar | None,
) -> None:
    assert grammar_of(response_format, structured_outputs, SETTINGS) == grammar


@pytest.mark.parametrize(
    ("response_format", "param", "said"),
    [
        ({}, "response_format.type", "is None; it must be 'text'"),
        ({"type": "xml"}, "response_format.type", "'xml'"),
        ({"type": ["text"]}, "response_format.type", "it must be 'text'"),
        ({"type": "text", "schema": {}}, "response_format.schema", "unknown field 'schema'"),
        ({"type": "json_object", "json_schema": {}}, "response_format.json_schema", "unknown field"),
        ({"type": "json_schema"}, "response_format.json_schema", "it must be an object"),
        (json_schema(name="a b"), "response_format.json_schema.name", "'a b'; it must be 1 to 64"),
        (json_schema(name=None), "response_format.json_schema.name", "1 to 64"),
        (json_schema(name="n" * 65), "response_format.json_schema.name", "1 to 64"),
        (json_schema(strict="yes"), "response_format.json_schema.strict", "'yes'; it must be a boolean"),
        (json_schema(description=1), "response_format.json_schema.description", "1; it must be a string"),
        (json_schema(schema=None), "response_format.json_schema.schema", "it must be a JSON schema"),
        (json_schema(schema=[]), "response_format.json_schema.schema", "list; it must be a JSON schema"),
        (json_schema(kind="x"), "response_format.json_schema.kind", "unknown field 'kind'"),
        (
            json_schema(schema=deep_schema(33)),
            "response_format.json_schema.schema",
            "33 levels deep; the limit is 32",
        ),
        (json_schema(schema=deep_schema(50_000)), "response_format.json_schema.schema", "50000 levels deep"),
        (
            json_schema(schema={"const": "x" * 70_000}),
            "response_format.json_schema.schema",
            "has 70013 bytes; the limit is 65536",
        ),
    ],
)
def test_a_wrong_response_format_is_refused_naming_the_field(
    response_format: Mapping[str, object], param: str, said: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammar_of(response_format, None, SETTINGS)
    assert refused.value.param == param
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("structured_outputs", "param", "said"),
    [
        ({}, "structured_outputs", "has 0 constraints; it must have one of json, regex, choice, grammar"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs", "has 2 constraints"),
        ({"guided_regex": "a"}, "structured_outputs.guided_regex", "unknown field 'guided_regex'"),
        ({"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern", "unknown field"),
        ({"regex": ""}, "structured_outputs.regex", "it must be a non-empty string"),
        ({"regex": 1}, "structured_outputs.regex", "1; it must be a non-empty string"),
        ({"regex": "a" * 65_537}, "structured_outputs.regex", "has 65537 bytes; the limit is 65536"),
        ({"regex": "\ud800"}, "structured_outputs.regex", "half a surrogate pair"),
        ({"grammar": None}, "structured_outputs.grammar", "non-empty string"),
        ({"json": "{"}, "structured_outputs.json", "is not JSON"),
        ({"json": "[" * 60_000}, "structured_outputs.json", "is not JSON"),
        ({"json": "3"}, "structured_outputs.json", "3; it must be a JSON schema"),
        ({"json": True}, "structured_outputs.json", "True; it must be a JSON schema"),
        ({"choice": []}, "structured_outputs.choice", "it must be a non-empty list"),
        ({"choice": "ab"}, "structured_outputs.choice", "'ab'; it must be a non-empty list"),
        ({"choice": ["a", ""]}, "structured_outputs.choice", "holds ''"),
        ({"choice": ["a", 1]}, "structured_outputs.choice", "holds 1"),
        ({"choice": ["a" * 70_000]}, "structured_outputs.choice", "the limit is 65536"),
    ],
)
def test_wrong_structured_outputs_are_refused_naming_the_field(
    structured_outputs: Mapping[str, object], param: str, said: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammar_of(None, structured_outputs, SETTINGS)
    assert refused.value.param == param
    assert said in str(refused.value)


def test_two_constraints_on_one_answer_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="only one of them"):
        grammar_of({"type": "json_object"}, {"regex": "a"}, SETTINGS)


def test_the_limits_are_the_settings_own() -> None:
    small = replace(SETTINGS, max_schema_bytes=20, max_schema_depth=2)
    assert grammar_of(None, {"json": {"type": "integer"}}, small)
    with pytest.raises(InvalidRequest, match="the limit is 20"):
        grammar_of(None, {"json": {"type": "integer", "minimum": 1}}, small)
    with pytest.raises(InvalidRequest, match="3 levels deep; the limit is 2"):
        grammar_of(None, {"json": {"items": {"items": {}}}}, small)


def test_an_error_names_the_field_that_the_grammar_came_from() -> None:
    assert grammar_field(None) == "response_format"
    assert grammar_field({"regex": "("}) == "structured_outputs.regex"


@settings(max_examples=150)
@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4))
@example(["a", "ab", "a"])
@example(["\x7f", '\x00\n"\\/', "%json {}", "// #", "😀", "é", "\x85\u2028"])
def test_choices_are_matched_exactly(choices: list[str]) -> None:
    grammar = grammar_of(None, {"choice": choices}, SETTINGS)
    assert grammar is not None
    compiled = COMPILER.compile(grammar)
    for choice in choices:
        matcher = compiled.matcher()
        assert matcher.consume_tokens(list(choice.encode()))
        assert matcher.is_accepting()
    for other in ("x", choices[0] + "x", choices[0][:-1]):
        matcher = compiled.matcher()
        accepted = all(matcher.consume_token(byte) for byte in other.encode()) and matcher.is_accepting()
        assert accepted == (other in choices)


async def test_c11_a_grammar_that_does_not_compile_is_refused_naming_its_field() -> None:
    checker = GrammarChecker(small_vocabulary(), SETTINGS)
    for _ in range(2):  # the second time from memory
        with pytest.raises(InvalidRequest, match=r"structured_outputs\.regex: .*regex parse error") as refused:
            await checker.check(regex("(a"), "structured_outputs.regex")
        assert refused.value.param == "structured_outputs.regex"
    with pytest.raises(InvalidRequest, match="tools: "):
        await checker.check(regex("(a"), "tools")


async def test_a_grammar_that_compiles_passes() -> None:
    checker = GrammarChecker(small_vocabulary(), SETTINGS)
    await checker.check(schema(json.dumps({"type": "object"})))
    await checker.check(Grammar(kind=GrammarKind.LARK, text='start: "a"'))


async def test_forced_tools_that_make_too_large_a_grammar_are_refused() -> None:
    checker = GrammarChecker(small_vocabulary(), replace(SETTINGS, max_schema_bytes=10))
    with pytest.raises(InvalidRequest, match="tools has 15 bytes; the limit is 10"):
        await checker.check(lark('start: "abcdef"'), "tools")


def costly(n_chars: int) -> Grammar:
    """The intersection of many patterns, which takes seconds."""
    parts = " & ".join(f"/[ab]*a[ab]{{{n}}}/" for n in range(5, 25))
    return lark(f"start: X\nX: {parts} & /a{{{n_chars}}}.*/")


async def test_c26_a_new_grammar_does_not_wait_for_costly_ones_and_of_these_too_many_are_refused() -> None:
    checker = GrammarChecker(small_vocabulary(), SETTINGS)
    hostile = [asyncio.create_task(checker.check(costly(10 + index))) for index in range(8)]
    for n_chars in range(1, 4):
        await checker.check(regex(f"b+c{{{n_chars}}}"))
        assert not any(task.done() and not isinstance(task.exception(), Overloaded) for task in hostile)
    done, pending = await asyncio.wait(hostile, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    assert all(isinstance(task.exception(), Overloaded) for task in done)


async def test_c26_a_grammar_that_takes_too_long_is_refused_naming_its_field(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Left to itself this one takes 1 to 3 s, and no machine comes near the limit.
    monkeypatch.setattr(structured, "MOST", Bounds(compute_s=0.2, n_bytes=2 * 1024**3))
    monkeypatch.setattr(structured, "_MAX_WAIT_S", WAIT_S)
    checker = GrammarChecker(small_vocabulary(), SETTINGS)
    with pytest.raises(InvalidRequest, match=r"response_format: the grammar takes more than 0\.2 s") as refused:
        await checker.check(costly(9), "response_format")
    assert refused.value.param == "response_format"
    await checker.check(regex("ok"))


async def test_c26_a_grammar_that_spends_its_compilers_fuel_is_refused_naming_its_field(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(structured, "MOST", Bounds(compute_s=60.0, n_bytes=2 * 1024**3))
    monkeypatch.setattr(structured, "_MAX_WAIT_S", WAIT_S)
    checker = GrammarChecker(small_vocabulary(), SETTINGS)
    with pytest.raises(InvalidRequest, match=r"response_format: .*fuel exhausted") as refused:
        await checker.check(costly(9), "response_format")
    assert refused.value.param == "response_format"
    await checker.check(regex("ok"))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "(a"}}}, "regex parse error"),
        ({"properties": {"a": {"type": "zebra"}}}, "Invalid type: zebra"),
        ({"type": "object", "properties": {"a": {"multipleOf": 9_999_991}}}, "multipleOf is 9999991"),
    ],
)
async def test_a_forced_tool_with_wrong_parameters_is_named_with_its_own_reason(
    wrong: Mapping[str, object], reason: str
) -> None:
    tools = (
        Tool(name="plain"),
        Tool(name="right", parameters={"type": "object"}),
        Tool(name="x", parameters=wrong),
    )
    tool_use = ToolUse(tools=tools, choice="required")
    grammar = HermesFormat(small_vocabulary()).grammar(tool_use)
    assert grammar is not None
    with pytest.raises(InvalidRequest, match=reason) as refused:
        await GrammarChecker(small_vocabulary(), SETTINGS).check(
            grammar, "tools", parts=schemas_of_tools(tool_use)
        )
    assert refused.value.param == "tools[2].function.parameters"
    assert str(refused.value).startswith("tools[2].function.parameters: ")
    assert "): " not in str(refused.value)  # as after a line and a column


def test_of_a_named_tool_only_its_own_parameters_are_looked_at() -> None:
    tools = (Tool(name="a"), Tool(name="b", parameters={"properties": {}}))
    tool_use = ToolUse(tools=tools, choice="named", name="b")
    parameters = schema('{"type": "object", "properties": {}}')
    assert schemas_of_tools(tool_use) == {"tools[1].function.parameters": parameters}


async def test_a_place_in_a_grammar_is_told_only_where_the_client_has_written_it() -> None:
    checker = GrammarChecker(small_vocabulary(), SETTINGS)
    broken = lark("start: X\nX: /a/ Y\n")
    with pytest.raises(InvalidRequest, match=r"used: at 2\(4\): unknown name"):
        await checker.check(broken, "structured_outputs.grammar")
    with pytest.raises(InvalidRequest, match=r"tools: the grammar cannot be used: unknown name"):
        await checker.check(broken, "tools", parts={"tools[0].function.parameters": schema("{}")})
