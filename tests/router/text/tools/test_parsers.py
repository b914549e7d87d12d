"""What is a call and what is content, in each format, however the answer is cut into pieces."""

import json
import re
import time
from collections.abc import Iterable
from itertools import combinations
from random import Random

import pytest
from bakehouse_router.text.tools.hermes import HermesParser
from bakehouse_router.text.tools.llama3 import Llama3Parser
from bakehouse_router.text.tools.machine import CallMachine
from bakehouse_router.text.tools.mistral import MistralParser
from bakehouse_router.text.tools.parser import CallDelta, ContentDelta, ParsedDelta
from hypothesis import given
from hypothesis import strategies as st

ParserClass = type[CallMachine]
Call = tuple[str, str]

NAMES = frozenset({"f", "look_up"})
PARSERS: dict[str, ParserClass] = {"hermes": HermesParser, "llama3_json": Llama3Parser, "mistral": MistralParser}

# One call of `f` in each way of writing it; `%s` is its arguments.
SPELLINGS = {
    "hermes": (HermesParser, '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'),
    "llama3_json": (Llama3Parser, '{"name": "f", "parameters": %s}'),
    "llama3_json_tagged": (Llama3Parser, '<|python_tag|>{"name": "f", "parameters": %s}'),
    "mistral": (MistralParser, '[TOOL_CALLS][{"name": "f", "arguments": %s}]'),
    "mistral_named": (MistralParser, "[TOOL_CALLS]f[ARGS]%s"),
}
every_spelling = pytest.mark.parametrize(("parser_class", "spelling"), SPELLINGS.values(), ids=SPELLINGS.keys())
every_format = pytest.mark.parametrize("parser_class", PARSERS.values(), ids=PARSERS.keys())


def _joined(deltas: Iterable[ParsedDelta]) -> tuple[str, list[Call]]:
    content = ""
    calls: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            assert delta.text, "no empty news"
            content += delta.text
            continue
        if delta.call_id is not None:
            assert delta.name is not None
            assert delta.index == len(calls), "announced once, in order"
            calls.append([delta.name, ""])
        else:
            assert delta.name is None
            assert delta.arguments, "no empty news"
        calls[delta.index][1] += delta.arguments
    return content, [(name, arguments) for name, arguments in calls]


def _read(parser_class: ParserClass, *pieces: str, is_parallel: bool = True) -> tuple[str, list[Call]]:
    parser = parser_class(NAMES, is_parallel=is_parallel)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return _joined([*deltas, *parser.finish()])


@every_spelling
def test_c32_a_call_is_the_same_wherever_the_answer_is_cut(parser_class: ParserClass, spelling: str) -> None:
    arguments = r'{"a":"x\"y","b":[1,2]}'
    answer = spelling % arguments
    assert _read(parser_class, *answer) == ("", [("f", arguments)])
    for first, second in combinations(range(len(answer) + 1), 2):
        pieces = answer[:first], answer[first:second], answer[second:]
        assert _read(parser_class, *pieces) == ("", [("f", arguments)]), pieces


FRAGMENTS = [
    *(spelling % arguments for _, spelling in SPELLINGS.values() for arguments in ("{}", r'{"q": "}\\\""}')),
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<tool", "[TOOL"),
    *("[", "]", "{", "}", '"', "\\", ",", ";", ":", " ", "\n", "  \n", "text", "é", "😀"),
    *('{"name": "f", ', '{"name": "nobody", ', '"arguments": ', '"parameters": ', '"[1, 2', "null", "f", "f{}"),
    *('{"arguments": {"a": 1}, "name": "look_up"}', r'{"name": "f", "arguments": "{\"a\": \"\\u00e9\"}"}'),
]


@given(
    name=st.sampled_from(sorted(PARSERS)),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    is_parallel=st.booleans(),
    randomness=st.randoms(use_true_random=False),
)
def test_any_cutting_gives_the_same_content_and_calls(
    name: str, fragments: list[str], is_parallel: bool, randomness: Random
) -> None:
    answer = "".join(fragments)
    borders = sorted(randomness.choices(range(len(answer) + 1), k=5))
    pieces = [answer[start:end] for start, end in zip([0, *borders], [*borders, len(answer)], strict=True)]
    whole = _read(PARSERS[name], answer, is_parallel=is_parallel)
    assert _read(PARSERS[name], *pieces, is_parallel=is_parallel) == whole
    assert _read(PARSERS[name], *answer, is_parallel=is_parallel) == whole


@given(name=st.sampled_from(sorted(PARSERS)), fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12))
def test_an_answer_without_calls_is_content_unchanged(name: str, fragments: list[str]) -> None:
    answer = "".join(fragments)
    content, calls = _read(PARSERS[name], answer)
    if not calls:
        assert content == answer


@every_format
@given(answer=st.text())
def test_plain_text_is_content_unchanged(parser_class: ParserClass, answer: str) -> None:
    assert _read(parser_class, *answer) == (answer, [])


@every_spelling
def test_c12_an_answer_that_ends_before_the_name_is_known_is_content(
    parser_class: ParserClass, spelling: str
) -> None:
    half_a_call = spelling[: spelling.index("f", spelling.rindex("name") if "name" in spelling else 0)]
    answer = f"text\n{half_a_call}"
    assert _read(parser_class, *answer) == (answer, [])


@every_spelling
def test_c12_text_before_and_after_a_call_survives(parser_class: ParserClass, spelling: str) -> None:
    answer = f"\nLet me see.\n{spelling % '{}'}\nThat was it.\n"
    content, calls = _read(parser_class, *answer)
    assert content == "\nLet me see.\nThat was it."
    assert calls == [("f", "{}")]


@every_spelling
def test_space_around_calls_is_not_content(parser_class: ParserClass, spelling: str) -> None:
    answer = "\n\n{}\n \n{}\n".format(spelling % "{}", spelling % '{"a": 1}')
    assert _read(parser_class, *answer) == ("", [("f", "{}"), ("f", '{"a": 1}')])


@every_spelling
def test_c33_arguments_that_the_end_cuts_off_stay_as_they_were_sent(
    parser_class: ParserClass, spelling: str
) -> None:
    begun = '{"a": "b'
    answer = spelling[: spelling.index("%s")] + begun
    parser = parser_class(NAMES)
    assert _joined(parser.feed(answer)) == ("", [("f", begun)])
    assert parser.finish() == []
    assert parser.n_calls == 1
    assert not parser.is_complete


@pytest.mark.parametrize("text", [r"{\"a\": \"\\u00e9", r"{\"a\": \"\\u00e9\u00", '{\\"a\\": \\"\\\\u00e9\\'])
def test_quoted_arguments_that_the_end_cuts_off_are_given_as_far_as_they_go(text: str) -> None:
    answer = f'<tool_call>{{"name": "f", "arguments": "{text}'
    assert _read(HermesParser, *answer) == ("", [("f", r'{"a": "\u00e9')])


def test_arguments_are_released_as_they_come_once_the_name_is_known() -> None:
    parser = HermesParser(NAMES)
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a"')[1:] == []
    assert parser.feed(': "b') == [CallDelta(index=0, arguments=': "b')]
    assert parser.feed('"}}') == [CallDelta(index=0, arguments='"}')]


def test_a_call_is_announced_once_with_its_id_and_name() -> None:
    parser = HermesParser(NAMES)
    announced, *rest = parser.feed('<tool_call>{"name": "f"')
    assert isinstance(announced, CallDelta)
    assert rest == []
    assert re.fullmatch(r"call_[0-9a-f]{24}", announced.call_id or "")
    assert announced == CallDelta(index=0, call_id=announced.call_id, name="f")


def test_ids_of_mistrals_calls_are_those_that_its_templates_take_back() -> None:
    announced = MistralParser(NAMES).feed("[TOOL_CALLS]f[ARGS]{}")[0]
    assert isinstance(announced, CallDelta)
    assert re.fullmatch(r"[0-9A-Za-z]{9}", announced.call_id or "")


OBJECTS = {
    "arguments_first": ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
    "unknown_keys": ('{"id": [{"}": "]"}], "name": "f", "x": null, "arguments": {}, "y": 1.5}', "{}"),
    "quoted_arguments": (r'{"name": "f", "arguments": "{\"a\": \"x\\\"y\", \"b\": \"\u00e9\"}"}', None),
    "quoted_arguments_first": (r'{"arguments": "{\"a\": 1}", "name": "f"}', '{"a": 1}'),
    "braces_in_strings": (r'{"name": "f", "arguments": {"a": "}]\"}\\"}}', r'{"a": "}]\"}\\"}'),
    "unicode_escapes": (r'{"name": "\u0066", "arguments": {"a": "\ud83d\ude00"}}', r'{"a": "\ud83d\ude00"}'),
    "no_arguments": ('{"name": "f", "arguments": null}', "{}"),
    "other_key_for_arguments": ('{"name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
    "two_arguments": ('{"name": "f", "arguments": {"a": 1}, "parameters": {}}', '{"a": 1}'),
    "name_in_arguments": ('{"name": "f", "arguments": {"name": "nobody"}}', '{"name": "nobody"}'),
    "spread_out": ('{\n  "name" : "f" ,\n  "arguments" : { "a" : 1 }\n}', '{ "a" : 1 }'),
}


@every_format
@pytest.mark.parametrize(("written", "arguments"), OBJECTS.values(), ids=OBJECTS.keys())
def test_objects_that_are_calls(parser_class: ParserClass, written: str, arguments: str | None) -> None:
    marker = {HermesParser: "<tool_call>", MistralParser: "[TOOL_CALLS]"}.get(parser_class, "")
    if arguments is None:
        arguments = json.loads(written)["arguments"]
    assert _read(parser_class, marker + written) == ("", [("f", arguments)])
    assert _read(parser_class, *marker, *written) == ("", [("f", arguments)])


NOT_CALLS = {
    "unknown_name": '{"name": "nobody", "arguments": {}}',
    "no_name": '{"arguments": {}}',
    "name_not_a_text": '{"name": 1, "arguments": {}}',
    "name_of_a_wrong_form": r'{"name": "\x66", "arguments": {}}',
    "not_json": '{name: "f"}',
    "no_value": '{"arguments": , "name": "f"}',
    "no_colon": '{"name" "f"}',
    "a_list": '["f"]',
    "empty": "{}",
}


@every_format
@pytest.mark.parametrize("written", NOT_CALLS.values(), ids=NOT_CALLS.keys())
def test_what_is_no_call_is_content_unchanged(parser_class: ParserClass, written: str) -> None:
    before, after = {
        HermesParser: ("<tool_call>\n", "\n</tool_call>"),
        MistralParser: ("[TOOL_CALLS] [", "]"),
    }.get(parser_class, ("", ""))
    answer = f"a \n{before}{written}{after} b\n"
    assert _read(parser_class, *answer) == (answer, [])


def test_json_that_has_no_parameters_is_no_call_without_a_marker() -> None:
    answer = '{"name": "f", "description": "a tool"}'
    assert _read(Llama3Parser, *answer) == (answer, [])


def test_json_within_a_line_is_no_call_without_a_marker() -> None:
    answer = 'Say {"name": "f", "parameters": {}}'
    assert _read(Llama3Parser, *answer) == (answer, [])


@pytest.mark.parametrize("separator", ["; ", ";", "\n", " ", ""])
def test_llamas_calls_may_be_separated_in_several_ways(separator: str) -> None:
    calls = ['{"name": "f", "parameters": {"a": 1}}', '{"name": "look_up", "parameters": {}}']
    assert _read(Llama3Parser, *separator.join(calls)) == ("", [("f", '{"a": 1}'), ("look_up", "{}")])


def test_a_list_of_mistrals_may_hold_several_calls() -> None:
    answer = '[TOOL_CALLS] [ {"name": "f", "arguments": {}} , {"name": "look_up", "arguments": {"a": []}} ] done'
    assert _read(MistralParser, *answer) == ("done", [("f", "{}"), ("look_up", '{"a": []}')])


def test_mistrals_call_may_carry_an_id() -> None:
    answer = "[TOOL_CALLS]look_up[CALL_ID]a1B2c3D4e[ARGS] {}"
    assert _read(MistralParser, *answer) == ("", [("look_up", "{}")])


def test_a_call_after_one_that_failed_is_found() -> None:
    assert _read(HermesParser, '<tool_call><tool_call>{"name": "f"}') == ("<tool_call>", [("f", "{}")])
    assert _read(MistralParser, "[TOOL_CALLS][TOOL_CALLS]f{}") == ("[TOOL_CALLS]", [("f", "{}")])


def test_a_broken_end_of_a_call_is_content() -> None:
    assert _read(HermesParser, *'<tool_call>{"name": "f", "arguments": {} or so') == ("or so", [("f", "{}")])


@every_spelling
def test_after_the_one_call_that_was_allowed_nothing_is_of_interest(
    parser_class: ParserClass, spelling: str
) -> None:
    parser = parser_class(NAMES, is_parallel=False)
    call = spelling % '{"a": 1}'
    deltas = parser.feed(f"{call}\n{call} and text")
    assert parser.is_complete
    assert _joined([*deltas, *parser.feed("more"), *parser.finish()]) == ("", [("f", '{"a": 1}')])
    assert parser.n_calls == 1


HOSTILE = {
    "long_arguments": (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": "%s"}}' % ("x" * 1_000_000)),
    "escapes": (HermesParser, '<tool_call>{"name": "f", "arguments": "%s"}' % (r"\n" * 250_000)),
    "long_key": (HermesParser, '<tool_call>{"%s' % ("x" * 200_000)),
    "begun_markers": (HermesParser, "<tool_call" * 20_000),
    "markers": (HermesParser, "<tool_call>" * 20_000),
    "open_objects": (HermesParser, "<tool_call>{" * 20_000),
    "space": (HermesParser, " " * 200_000),
    "brackets": (Llama3Parser, '{"parameters": ' + "[{" * 100_000),
    "lines": (Llama3Parser, "\n{" * 100_000),
    "calls": (Llama3Parser, '{"name": "f", "parameters": {}};' * 8_000),
    "lists": (MistralParser, "[TOOL_CALLS][" * 15_000),
    "heads": (MistralParser, "[TOOL_CALLS]f[ARGS]" * 25_000),
}


@pytest.mark.parametrize(("parser_class", "answer"), HOSTILE.values(), ids=HOSTILE.keys())
def test_time_is_linear_whatever_the_answer(parser_class: ParserClass, answer: str) -> None:
    parser = parser_class(NAMES)
    started_s = time.process_time()
    n_characters = 0
    for start in range(0, len(answer), 4):
        for delta in parser.feed(answer[start : start + 4]):
            n_characters += len(delta.text if isinstance(delta, ContentDelta) else delta.arguments)
    n_characters += sum(len(delta.text) for delta in parser.finish() if isinstance(delta, ContentDelta))
    # Below one second on an idle machine; a quadratic machine needs minutes.
    assert time.process_time() - started_s < 15.0
    assert parser.n_calls or n_characters == len(answer), "flushed unchanged"
