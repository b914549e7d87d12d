"""What compiles to what, and that nothing a client writes takes a core or the process."""

import json
from contextlib import suppress
from threading import Thread
from time import thread_time

import grammars
import pytest
from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.sampling import Grammar
from bakehouse_replica.grammar_compiler import GrammarCompiler, unpack_mask
from bakehouse_replica.vocabulary import Vocabulary
from grammars import N_VOCABULARY, TOOL_ID, lark, regex, schema, small_vocabulary

MAX_COMPILE_S = 2.0


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(small_vocabulary, N_VOCABULARY)


def accepts(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    """Whether a whole output may read as `text`, byte by byte."""
    matcher = compiler.compile(grammar).matcher()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


def refusal(compiler: GrammarCompiler, grammar: Grammar) -> str:
    with pytest.raises(InvalidRequest) as refused:
        compiler.compile(grammar)
    return str(refused.value)


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (regex("[a-c]{2}"), "ab", "a"),
        (regex('a/b"\\d\\n'), 'a/b"7\n', "a/b7"),
        (regex("a\nb\x00"), "a\nb\x00", "ab"),
        (regex("(?i)é+"), "Éé", "e"),
        (schema('{"type": "object"}'), '{"a": [1, {}]}', "[]"),
        (schema('{"type": "integer", "maximum": 12}'), "12", "13"),
        (lark('start: "a" | b\nb: "b" /[0-9]+/'), "b12", "b"),
    ],
)
def test_each_kind_of_grammar_matches_whole_texts(
    compiler: GrammarCompiler, grammar: Grammar, right: str, wrong: str
) -> None:
    assert accepts(compiler, grammar, right)
    assert not accepts(compiler, grammar, wrong)


@pytest.mark.parametrize("text", ['{"a": 1,\n"b": []}', '{"a":1,"b":[]}', '{ "a" : 1 , "b":[ ] }'])
def test_json_may_have_one_space_or_newline_in_a_place(compiler: GrammarCompiler, text: str) -> None:
    for grammar in (schema('{"type": "object"}'), lark('start: %json {"type": "object"}')):
        assert accepts(compiler, grammar, text)


@pytest.mark.parametrize("text", ['{  "a": 1}', '{"a":\n\n1}', '{"a":\t1}', ' {"a":1}', '{"a":1} '])
def test_json_has_no_other_white_space(compiler: GrammarCompiler, text: str) -> None:
    for grammar in (schema('{"type": "object"}'), lark('start: %json {"type": "object"}')):
        assert not accepts(compiler, grammar, text)


def test_a_forced_tool_call_is_lark_with_inline_schemas(compiler: GrammarCompiler) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = lark(
        'start: "<tool_call>" call "</tool_call>"\n'
        'call: "{\\"name\\": \\"add\\", \\"arguments\\": " add "}"\n'
        f"add: %json {json.dumps({**parameters, 'additionalProperties': False})}\n"
    )
    assert accepts(compiler, grammar, '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    assert not accepts(compiler, grammar, '<tool_call>{"name": "add", "arguments": {"a": "x"}}</tool_call>')


@pytest.mark.parametrize("marker", [f"<[{TOOL_ID}]>", f"<[{TOOL_ID}-{TOOL_ID}]>"])
def test_a_grammar_may_name_special_tokens_by_id(compiler: GrammarCompiler, marker: str) -> None:
    compiled = compiler.compile(lark(f'start: {marker} "a"'))
    matcher = compiled.matcher()
    usable = unpack_mask(matcher.compute_bitmask(), N_VOCABULARY) & compiled.producible
    assert usable.nonzero()[0].tolist() == [TOOL_ID]
    assert matcher.consume_tokens([TOOL_ID, ord("a")])
    assert matcher.is_accepting()


def test_no_text_is_forced_whatever_the_grammar_says(compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(lark('%llguidance {"no_forcing": false}\nstart: "abcd"'))
    usable = unpack_mask(compiled.matcher().compute_bitmask(), N_VOCABULARY)
    assert usable.nonzero()[0].tolist() == [ord("a"), 256, 257]


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (schema('{"type": "strin"}'), "Invalid type: strin"),
        (schema('{"type": "object", "not": {}}'), "Unimplemented keys"),
        (schema('{"$ref": "http://example.com/schema"}'), "retrieving it failed"),
        (schema('{"type": "integer", "minimum": 5, "maximum": 3}'), "Unsatisfiable"),
        (regex("(a"), "regex parse error: unclosed group"),
        (regex("a(?=b)"), "regex parse error: look-around"),
        (regex(""), "the empty one only"),
        (lark(""), "no start rule"),
        (lark("start: foo"), "foo"),
        (lark('start: "a'), "lexer error"),
        (lark("start: A\nA: B\nB: A"), "circular"),
        (lark('start: "" | ""'), "the empty one only"),
        (lark("start: a\na: b\nb: a"), "it matches no text"),
        (lark('{"grammars": [{"json_schema": {}}]}'), "cannot be used"),
        (lark(f'start: "a" <[{N_VOCABULARY}]>'), "no text that this model can write"),
        (lark(f'start: "a" <[{N_VOCABULARY + 1}]>'), "Token range end too large"),
        (lark(f'start: "a" <[{N_VOCABULARY - 1}]>'), "no text that this model can write"),
        (lark("start: <|nothing|>"), "unknown special token"),
        (schema('{"pattern": "\\ud800", "type": "string"}'), "hex escape"),
    ],
)
def test_a_bad_grammar_is_refused_with_the_reason(
    compiler: GrammarCompiler, grammar: Grammar, reason: str
) -> None:
    said = refusal(compiler, grammar)
    assert reason in said
    assert "\n" not in said
    assert "backtrace" not in said


def _nested(n_levels: int) -> str:
    return '{"type":"object","properties":{"a":' * n_levels + "{}" + "}}" * n_levels


_HOSTILE = {
    "nesting of 10,000": schema(_nested(10_000)),
    "nesting of 50 is fine": schema(_nested(45)),
    "a maximum of 20e9": schema('{"type": "integer", "maximum": 20e9}'),
    "an unknown type": schema('{"type": "strin"}'),
    "a large multiple": schema('{"type": "integer", "multipleOf": 9999991}'),
    "an enum of 5,000": schema(json.dumps({"enum": [f"{index * 7919:x}" for index in range(5_000)]})),
    "a constant of 60,000 characters": schema(json.dumps({"const": "a" * 60_000})),
    "lengths up to a million": schema('{"type": "string", "minLength": 1000, "maxLength": 1000000}'),
    "arrays of ten million": schema('{"type": "array", "minItems": 100000, "maxItems": 10000000}'),
    "1,000 optional properties": schema(json.dumps({"properties": {f"p{i}": {} for i in range(1_000)}})),
    "patterns that overlap": schema(
        json.dumps({"type": "object", "patternProperties": {f"^a{i}.*$": {} for i in range(300)}})
    ),
    "references in a circle": schema('{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'),
    "references that double": schema(
        json.dumps(
            {"$ref": "#/$defs/a0", "$defs": {"a40": {"type": "object"}}}
            | {"$defs": {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}}
        )
    ),
    "a product of anyOf": schema(
        json.dumps(
            {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(6)]} for i in range(10)]}
        )
    ),
    "a million repetitions": regex("(a{1000}){1000}"),
    "nested repetitions": regex("(((a{1,100}){1,100}){1,100}){1,100}"),
    "an exponential automaton": regex("(.*a.{20}){3}"),
    "a long alternation": regex("|".join(f"{index * 7919:x}" for index in range(8_000))),
    "many parentheses": regex("(" * 20_000 + "a" + ")" * 20_000),
    "an ambiguous grammar": lark('start: s\ns: s s s | s s | "a" | "b"'),
    "a rule in a circle": lark("start: a\na: b\nb: a"),
    "doubling rules": lark("start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60: "a"'),
    "deep groups": lark("start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "a complement": lark("start: A\nA: /[a-z]*/ & ~/(.*(ab|cd).{18})/"),
    "3,000 alternatives": lark("start: " + " | ".join(f'"{index:x}"' for index in range(3_000))),
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_c26_a_hostile_grammar_compiles_or_is_refused_within_two_seconds_and_the_next_is_served(
    compiler: GrammarCompiler, name: str
) -> None:
    taken_s: list[float] = []

    def compile_it() -> None:
        begun_at = thread_time()  # by its processor's clock, which stands still while others have that one
        with suppress(InvalidRequest):
            compiler.compile(_HOSTILE[name])
        taken_s.append(thread_time() - begun_at)

    thread = Thread(target=compile_it)  # as served: on a thread's smaller stack
    thread.start()
    thread.join()
    assert taken_s[0] < MAX_COMPILE_S
    assert accepts(compiler, regex("ok"), "ok")


def test_a_grammar_that_breaks_after_the_first_token_is_refused_at_once(compiler: GrammarCompiler) -> None:
    assert "items" in refusal(compiler, _HOSTILE["3,000 alternatives"])


def test_the_vocabulary_is_loaded_at_the_first_grammar_and_once() -> None:
    loaded: list[Vocabulary] = []

    def load() -> Vocabulary:
        loaded.append(grammars.small_vocabulary())
        return loaded[-1]

    compiler = GrammarCompiler(load, N_VOCABULARY)
    assert not loaded
    threads = [Thread(target=compiler.compile, args=(regex(f"a{index}"),)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60.0)
    assert len(loaded) == 1
