"""What is refused before llguidance reads a grammar, and how little of Lark must be understood for it."""

import json

import pytest
from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.grammar_text import MAX_SCHEMA_DEPTH, depth_of, read_lark, read_schema
from hypothesis import given
from hypothesis import strategies as st

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(JSON_VALUES)
def test_depth_counts_the_deepest_nesting(value: object) -> None:
    def by_recursion(value: object) -> int:
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if children is None else 1 + max(map(by_recursion, children), default=0)

    assert depth_of(value) == by_recursion(value)


def test_depth_is_found_without_recursion() -> None:
    value: object = 0
    for _ in range(50_000):
        value = [value]
    assert depth_of(value) == 50_000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "it must be an object"),
        ("{", "not JSON"),
        ('{"const": NaN}', "NaN is not JSON"),
        ('{} {"type": "string"}', "followed by something else"),
        ('{"x-guidance": {"whitespace_flexible": true}}', "'x-guidance'"),
        ('{"items":' * 100_000 + "{}" + "}" * 100_000, "nested too deeply"),
        ('{"items":' * MAX_SCHEMA_DEPTH + "{}" + "}" * MAX_SCHEMA_DEPTH, f"{MAX_SCHEMA_DEPTH + 1} levels deep"),
        ('{"multipleOf": 9999991}', "here it is 9999991"),
        ('{"multipleOf": 1e300}', "multipleOf is 1e\\+300"),
        ('{"multip\\u006ceOf": 12345.6}', "here it is 123456"),
        ('{"allOf": [{"multipleOf": 997}, {"multipleOf": 0.991}]}', "here it is 988027"),
    ],
)
def test_a_schema_that_would_cost_too_much_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        read_schema(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"const": 9007199254740993}',
        '{"properties": {"a": {"enum": ["b", [{"c": -9007199254740993}]]}}}',
        '{"const": 123456789.12345679}',
        '{"const": 1e999}',
        '{"maximum": 9007199254740993}',
        '{"minimum": 9223372036854775808}',
    ],
)
def test_a_number_that_an_answer_could_not_keep_to_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be kept to exactly"):
        read_schema(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"const": 9007199254740992, "minimum": -0.1, "exclusiveMaximum": 1e22}',
        '{"type": "integer", "minimum": 0, "maximum": 9223372036854775807}',
        '{"type": "integer", "maximum": 18446744073709551615}',
        '{"default": 9007199254740993, "properties": {"const": {"maxLength": 5}}}',
    ],
)
def test_numbers_that_hold_pass(text: str) -> None:
    assert read_schema(text).startswith("start: %json {")


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"multipleOf": 9999991}', '{"items":' * 100_000 + "{}" + "}" * 100_000]
)
def test_the_same_holds_for_a_schema_inside_a_grammar(text: str) -> None:
    with pytest.raises(InvalidRequest):
        read_lark(f'start: "a" %json {text}')


@pytest.mark.parametrize(
    "text", ['{"multipleOf": 0.01}', '{"multipleOf": 1000}', '{"enum": [{"multipleOf": true}]}']
)
def test_usual_multiples_pass(text: str) -> None:
    assert read_schema(text).startswith("start: %json {")


@pytest.mark.parametrize(
    "text",
    [
        'start: "%json {\\"multipleOf\\": 99999}"',
        'start: "a" // %json {"multipleOf": 99999}',
        'start: "a" # %json {"multipleOf": 99999}',
        "start: /%json {}/ /[temperature=1]/",
        'start: "<[3]>" /<[4]>/ "[stop=1]"',
    ],
)
def test_strings_regexes_and_comments_of_a_grammar_are_left_alone(text: str) -> None:
    lark = read_lark(text)
    assert lark.text == text
    assert not lark.special_ids


@given(st.text(alphabet='"/\\#%json{}[]<>=\n temperature:', max_size=60))
def test_looking_through_a_grammar_changes_only_its_schemas(text: str) -> None:
    try:
        read = read_lark(text).text
    except InvalidRequest:
        return
    assert read.replace(json.dumps({"x-guidance": {"whitespace_pattern": "[ \n]?"}}), "{}") == text


@pytest.mark.parametrize("text", ['\\"' * 30_000, '"' * 30_000, "[" * 60_000, "<" * 60_000, "/\\" * 30_000])
@pytest.mark.timeout(5)
def test_looking_through_a_grammar_takes_linear_time(text: str) -> None:
    read_lark(text)


def test_the_special_tokens_that_a_grammar_names_are_known() -> None:
    lark = read_lark('start: <|end|> "a" <[3]> <[5-7,9]>')
    assert lark.special_names == {"<|end|>"}
    assert sorted(lark.special_ids, key=lambda ids: ids.start) == [range(3, 4), range(5, 8), range(9, 10)]
    assert not lark.names_any_token
    assert read_lark("start: <[*]>").names_any_token
    assert read_lark("start: <[^3]>").names_any_token


@pytest.mark.parametrize("option", ["temperature=0.5", 'stop="x"', 'capture, stop = "x"'])
def test_rule_options_that_cannot_be_kept_are_refused(option: str) -> None:
    with pytest.raises(InvalidRequest, match="for a rule, which is not supported"):
        read_lark(f"start: a\na[{option}]: /x+/")
