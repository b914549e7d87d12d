"""Which format a model has, how special markers reach its parser, and what its grammars let through."""

import json
from collections.abc import Mapping
from random import Random
from typing import Literal

import pytest
from bakehouse_replica.core.sampling import Grammar, GrammarKind
from bakehouse_replica.grammar_compiler import GrammarCompiler, unpack_mask
from bakehouse_replica.vocabulary import Vocabulary
from bakehouse_router.calls import ToolUse
from bakehouse_router.settings import ToolFormatName
from bakehouse_router.text.messages import Tool
from bakehouse_router.text.stream import TextStream
from bakehouse_router.text.tools.formats import choose_tool_format
from bakehouse_router.text.tools.hermes import HermesFormat
from bakehouse_router.text.tools.llama3 import Llama3Format
from bakehouse_router.text.tools.mistral import MistralFormat
from bakehouse_router.text.tools.parser import CallDelta, ContentDelta
from bakehouse_router.text.tools.tool_format import ToolFormat
from jsonschema import validate

EOS = "<|eos|>"
SPECIALS = [EOS, "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>"]
EOS_ID = SPECIALS.index(EOS)
BYTES = {len(SPECIALS) + byte: bytes([byte]) for byte in range(256)}

WITH_MARKERS = Vocabulary({**dict.fromkeys(range(len(SPECIALS)), b""), **BYTES}, dict(enumerate(SPECIALS)))
PLAIN = {token_id: text.encode() for token_id, text in enumerate(SPECIALS) if token_id != EOS_ID}
WITHOUT_MARKERS = Vocabulary({**PLAIN, **BYTES}, {EOS_ID: EOS})
CLOSING = frozenset(len(SPECIALS) + byte for byte in b'"]}')
N_VOCABULARY = len(SPECIALS) + len(BYTES)
COMPILERS = {
    WITH_MARKERS: GrammarCompiler(lambda: WITH_MARKERS, N_VOCABULARY),
    WITHOUT_MARKERS: GrammarCompiler(lambda: WITHOUT_MARKERS, N_VOCABULARY),
}

TOOLS = (
    Tool(
        name="f",
        parameters={
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"$ref": "#/$defs/whole"}}},
            "required": ["a"],
            "additionalProperties": False,
            "$defs": {"whole": {"type": "integer", "minimum": -5, "maximum": 2000}},
        },
    ),
    Tool(name="f-2", parameters={"properties": {"unit": {"enum": ["°C", "°F"]}}, "required": ["unit"]}),
    Tool(name="now"),
)
SCHEMAS: dict[str, Mapping[str, object]] = {tool.name: tool.parameters or {"maxProperties": 0} for tool in TOOLS}


def _formats(vocabulary: Vocabulary) -> dict[str, ToolFormat]:
    return {
        "hermes": HermesFormat(vocabulary),
        "llama3_json": Llama3Format(vocabulary),
        "mistral": MistralFormat(vocabulary, ""),
        "mistral_named": MistralFormat(vocabulary, "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}"),
    }


every_format = pytest.mark.parametrize("name", list(_formats(WITH_MARKERS)))
every_vocabulary = pytest.mark.parametrize(
    "vocabulary", [WITH_MARKERS, WITHOUT_MARKERS], ids=["special_markers", "plain_markers"]
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ '<tool_call>\\n' + call | tojson + '\\n</tool_call>' }}", HermesFormat),
        ("{{ '<|python_tag|>' }}", Llama3Format),
        ('{{ \'{"name": "\' + call.name + \'", "parameters": \' }}', Llama3Format),
        ("{{ '[TOOL_CALLS]' + calls | tojson }}", MistralFormat),
        ("{{ tools | tojson }}", HermesFormat),
        (None, HermesFormat),
    ],
)
def test_auto_goes_by_the_marks_in_the_template(template: str | None, expected: type[ToolFormat]) -> None:
    assert type(choose_tool_format("auto", template, WITH_MARKERS)) is expected


@pytest.mark.parametrize(
    ("setting", "expected"), [("hermes", HermesFormat), ("llama3_json", Llama3Format), ("mistral", MistralFormat)]
)
def test_a_setting_wins_over_the_template(setting: ToolFormatName, expected: type[ToolFormat]) -> None:
    template = "<tool_call> [TOOL_CALLS] <|python_tag|>"
    assert type(choose_tool_format(setting, template, WITH_MARKERS)) is expected


def test_special_tokens_that_are_markers_reach_the_parser_and_no_others_do() -> None:
    tool_format = MistralFormat(WITH_MARKERS, "")
    token_ids = [SPECIALS.index("[TOOL_CALLS]"), *_ids('[{"name": "now", "arguments": {}}]'), EOS_ID]
    assert "TOOL_CALLS" not in TextStream(WITH_MARKERS).feed(token_ids)
    text = TextStream(tool_format.vocabulary).feed(token_ids)
    assert text == '[TOOL_CALLS][{"name": "now", "arguments": {}}]'
    (call,) = tool_format.parser(ToolUse(tools=TOOLS)).feed(text)
    assert call == CallDelta(index=0, call_id=_id_of(call), name="now", arguments="{}")


def test_a_vocabulary_without_special_markers_needs_no_view() -> None:
    assert HermesFormat(WITHOUT_MARKERS).vocabulary is WITHOUT_MARKERS


@every_format
def test_only_forced_calls_have_a_grammar(name: str) -> None:
    tool_format = _formats(WITH_MARKERS)[name]
    assert tool_format.grammar(ToolUse(tools=TOOLS, choice="auto")) is None
    assert tool_format.grammar(ToolUse(tools=TOOLS, choice="none")) is None


@every_format
def test_a_parser_of_a_named_tool_takes_calls_of_no_other(name: str) -> None:
    parser = _formats(WITH_MARKERS)[name].parser(ToolUse(tools=TOOLS, choice="named", name="now"))
    answer = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert [*parser.feed(answer), *parser.finish()] == [ContentDelta(text=answer)]


@every_vocabulary
@every_format
@pytest.mark.parametrize("choice", ["required", "named"])
@pytest.mark.parametrize("is_parallel", [True, False], ids=["parallel", "single"])
def test_whatever_the_grammar_lets_through_is_calls_with_valid_arguments(
    name: str, vocabulary: Vocabulary, choice: Literal["required", "named"], is_parallel: bool
) -> None:
    tool_format = _formats(vocabulary)[name]
    tool_use = ToolUse(
        tools=TOOLS, choice=choice, name="f-2" if choice == "named" else None, is_parallel=is_parallel
    )
    grammar = tool_format.grammar(tool_use)
    assert grammar is not None
    assert grammar.kind is GrammarKind.LARK
    walks = [_walk(grammar, vocabulary, seed) for seed in range(50)]
    called: set[str] = set()
    most = 0
    for token_ids in walks:
        calls = _calls(tool_format, tool_use, token_ids)
        for tool, arguments in calls:
            validate(json.loads(arguments), SCHEMAS[tool])
            called.add(tool)
        most = max(most, len(calls))
    assert called == ({"f-2"} if choice == "named" else {"f", "f-2", "now"})
    assert (most > 1) == (is_parallel and choice == "required")


def _calls(tool_format: ToolFormat, tool_use: ToolUse, token_ids: list[int]) -> list[tuple[str, str]]:
    parser = tool_format.parser(tool_use)
    stream = TextStream(tool_format.vocabulary)
    deltas = [delta for token_id in token_ids for delta in parser.feed(stream.feed([token_id]))]
    deltas += [*parser.feed(stream.finish()), *parser.finish()]
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        assert isinstance(delta, CallDelta), f"content in a forced answer: {delta}"
        if delta.name is not None:
            calls.append((delta.name, ""))
        name, arguments = calls[-1]
        calls[-1] = name, arguments + delta.arguments
    assert len(calls) == parser.n_calls
    return calls


def _walk(grammar: Grammar, vocabulary: Vocabulary, seed: int) -> list[int]:
    """A random answer that the grammar allows, drawn token by token; what ends strings and values is preferred."""
    compiled = COMPILERS[vocabulary].compile(grammar)
    matcher = compiled.matcher()
    random = Random(seed)
    token_ids: list[int] = []
    while True:
        mask = unpack_mask(matcher.compute_bitmask(), N_VOCABULARY) & compiled.producible
        allowed = mask.nonzero()[0].tolist()
        if matcher.is_accepting() and (not allowed or random.random() < 0.5):
            return token_ids
        preferred = [token_id for token_id in allowed if token_id in CLOSING]
        token_ids.append(random.choice(preferred if preferred and random.random() < 0.5 else allowed))
        assert matcher.consume_token(token_ids[-1]), matcher.get_error()


def _ids(text: str) -> list[int]:
    return [len(SPECIALS) + byte for byte in text.encode()]


def _id_of(delta: object) -> str:
    assert isinstance(delta, CallDelta)
    assert delta.call_id is not None
    return delta.call_id
