"""Every field of the request bodies is honoured, refused, or accepted because it asks for what happens anyway."""

import re
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import pytest
from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.sampling import Grammar, GrammarKind
from bakehouse_router.api.bodies import Origin, chat_call, completion_call, tokenize_call
from bakehouse_router.api.fields import Strict
from bakehouse_router.api.parse import parse_body, parse_tolerantly
from bakehouse_router.api.responses.body import ResponseBody
from bakehouse_router.api.schema import (
    ChatBody,
    CompletionBody,
    TokenizeChatBody,
    TokenizeTextBody,
)
from bakehouse_router.calls import ChatCall, CompletionCall, ToolUse
from bakehouse_router.settings import GatewaySettings
from bakehouse_router.text.messages import ChatMessage, Tool, ToolCall

API_PAGE = Path(__file__).parents[3] / "router" / "API.md"
SETTINGS = GatewaySettings()
USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "f", "description": "does", "parameters": {"type": "object"}, "strict": True}
TOOLS = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": {"name": "g"}}]

Fields = dict[str, object]


def _chat(**fields: object) -> ChatCall:
    body = parse_body(ChatBody, {"model": "m", "messages": [USER], **fields})
    return chat_call(body, SETTINGS)


def _completion(**fields: object) -> CompletionCall:
    return completion_call(parse_body(CompletionBody, {"model": "m", "prompt": "hi", **fields}), SETTINGS)


# field, value, where it is in the call, what it is there
SHARED: list[tuple[str, object, str, object]] = [
    ("model", "other", "model", "other"),
    ("max_tokens", 9, "options.max_tokens", 9),
    ("min_tokens", 2, "options.min_tokens", 2),
    ("n", 3, "options.n", 3),
    ("temperature", 0.25, "options.temperature", 0.25),
    ("top_k", 5, "options.top_k", 5),
    ("top_p", 0.5, "options.top_p", 0.5),
    ("min_p", 0.125, "options.min_p", 0.125),
    ("presence_penalty", 1.5, "options.presence_penalty", 1.5),
    ("frequency_penalty", -1.5, "options.frequency_penalty", -1.5),
    ("repetition_penalty", 1.25, "options.repetition_penalty", 1.25),
    ("logit_bias", {"5": -100, "0": 1.5}, "options.logit_bias", ((5, -100.0), (0, 1.5))),
    ("bad_words", ["a", "b"], "options.bad_words", ("a", "b")),
    ("allowed_token_ids", [4, 5], "options.allowed_token_ids", (4, 5)),
    ("seed", -7, "options.seed", -7),
    ("stop", "END", "options.stops", ("END",)),
    ("stop", ["a", "b", "a"], "options.stops", ("a", "b")),
    ("stop_token_ids", [3], "options.stop_token_ids", (3,)),
    ("include_stop_str_in_output", True, "options.keeps_stop", True),
    ("ignore_eos", True, "options.ignore_eos", True),
    ("prompt_logprobs", 2, "options.prompt_logprobs", 2),
    ("return_token_ids", True, "options.reports_tokens", True),
    ("user", "alice", "options.user", "alice"),
    ("priority", -3, "options.priority", -3),
    ("cache_salt", "salt", "options.cache_salt", "salt"),
    ("timeout_s", 2.5, "options.timeout_s", 2.5),
    ("response_format", {"type": "text"}, "options.grammar", None),
    ("response_format", {"type": "json_object"}, "options.grammar.kind", GrammarKind.JSON_SCHEMA),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}},
        "options.grammar",
        Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type": "integer"}'),
    ),
    (
        "structured_outputs",
        {"regex": "[ab]+"},
        "options.grammar",
        Grammar(kind=GrammarKind.REGEX, text="[ab]+"),
    ),
]
CHAT: list[tuple[str, object, str, object]] = [
    ("messages", [USER], "messages", (ChatMessage(role="user", content="hi"),)),
    ("max_completion_tokens", 9, "options.max_tokens", 9),
    ("max_completion_tokens", 9, "options.max_tokens_field", "max_completion_tokens"),
    ("add_generation_prompt", False, "opens_answer", False),
    ("continue_final_message", True, "continues_last", True),
    ("continue_final_message", True, "opens_answer", False),
    ("chat_template_kwargs", {"thinks": True}, "template_variables", {"thinks": True}),
]
COMPLETION: list[tuple[str, object, str, object]] = [
    ("prompt", "a", "prompts", ("a",)),
    ("prompt", ["a", "b"], "prompts", ("a", "b")),
    ("prompt", [1, 2], "prompts", ((1, 2),)),
    ("prompt", [[1], [2, 3]], "prompts", ((1,), (2, 3))),
    ("logprobs", 0, "options.logprobs", 0),
    ("logprobs", 4, "options.logprobs", 4),
    ("echo", True, "echoes", True),
]


@pytest.mark.parametrize(("field", "value", "place", "expected"), [*SHARED, *CHAT])
def test_a_field_of_a_chat_reaches_the_call(field: str, value: object, place: str, expected: object) -> None:
    assert attrgetter(place)(_chat(**{field: value})) == expected


@pytest.mark.parametrize(("field", "value", "place", "expected"), [*SHARED, *COMPLETION])
def test_a_field_of_a_completion_reaches_the_call(field: str, value: object, place: str, expected: object) -> None:
    assert attrgetter(place)(_completion(**{field: value})) == expected


@pytest.mark.parametrize("field", sorted(ChatBody.model_fields.keys() - {"model", "messages"}))
def test_null_in_a_chat_means_that_a_field_is_not_given(field: str) -> None:
    assert _chat(**{field: None}) == _chat()


@pytest.mark.parametrize("field", sorted(CompletionBody.model_fields.keys() - {"model", "prompt"}))
def test_null_in_a_completion_means_that_a_field_is_not_given(field: str) -> None:
    assert _completion(**{field: None}) == _completion()


def test_e13_no_field_is_accepted_without_a_meaning_that_is_tested_here() -> None:
    """A new field of a body needs a row in a table of this file, or tests of its own that are named here."""
    elsewhere = {
        "stream", "stream_options", "best_of", "tools", "tool_choice", "parallel_tool_calls", "logprobs",
        "top_logprobs",
    }  # fmt: skip
    tested = {field for field, *_ in (*SHARED, *CHAT, *COMPLETION)} | elsewhere | {field for field, _ in INERT}
    refused = {field for field, *_ in REFUSED_EVERYWHERE}
    for body in (ChatBody, CompletionBody):
        assert body.model_fields.keys() <= tested | refused


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, ResponseBody], ids=lambda body: body.__name__)
def test_e13_every_field_is_documented(body: type[Strict]) -> None:
    documented = set(re.findall(r"`(\w+)`", API_PAGE.read_text()))
    assert body.model_fields.keys() <= documented


INERT = [
    ("store", False),
    ("metadata", {}),
    ("service_tier", "auto"),
    ("service_tier", "default"),
    ("skip_special_tokens", True),
    ("modalities", ["text"]),
    ("verbosity", "medium"),
    ("suffix", ""),
]


@pytest.mark.parametrize(("field", "value"), INERT)
def test_a_value_that_asks_for_what_happens_anyway_changes_nothing(field: str, value: object) -> None:
    if field in ChatBody.model_fields:
        assert _chat(**{field: value}) == _chat()
    if field in CompletionBody.model_fields:
        assert _completion(**{field: value}) == _completion()


REFUSED_EVERYWHERE = [
    ("store", True, "it must be false"),
    ("store", 0, "it must be false"),
    ("metadata", {"a": "b"}, "it must be empty"),
    ("service_tier", "flex", "there is one tier"),
    ("skip_special_tokens", False, "it must be true"),
    ("modalities", ["audio"], "answers are text"),
    ("verbosity", "high", "nothing else is known"),
    ("reasoning_effort", "low", "chat_template_kwargs"),
    ("functions", [], "use tools"),
    ("function_call", "auto", "use tool_choice"),
    ("audio", {}, "answers are text"),
    ("prediction", {}, "not supported"),
    ("web_search_options", {}, "nothing is searched"),
    ("suffix", "end", "not inserted"),
]


@pytest.mark.parametrize(("field", "value", "message"), REFUSED_EVERYWHERE)
def test_any_other_value_is_refused_with_its_reason(field: str, value: object, message: str) -> None:
    make: Callable[..., object] = _chat if field in ChatBody.model_fields else _completion
    with pytest.raises(InvalidRequest, match=message) as refused:
        make(**{field: value})
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": False}, None),
    ],
)
def test_a_chat_asks_for_log_probabilities_by_two_fields(fields: Fields, expected: int | None) -> None:
    assert _chat(**fields).options.logprobs == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("auto", None, True)),
        ({"tool_choice": "auto"}, ("auto", None, True)),
        ({"tool_choice": "none"}, ("none", None, True)),
        ({"tool_choice": "required"}, ("required", None, True)),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, ("named", "g", True)),
        ({"parallel_tool_calls": False}, ("auto", None, False)),
    ],
)
def test_tools_and_their_choice_reach_the_call(fields: Fields, expected: tuple[object, ...]) -> None:
    choice, name, is_parallel = expected
    tools = (Tool(name="f", description="does", parameters={"type": "object"}), Tool(name="g"))
    assert _chat(tools=TOOLS, **fields).tool_use == ToolUse(
        tools=tools,
        choice=choice,  # type: ignore[arg-type]
        name=name,  # type: ignore[arg-type]
        is_parallel=bool(is_parallel),
    )


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "none"}, {"tool_choice": "auto"}])
def test_without_tools_none_are_used(fields: Fields) -> None:
    assert _chat(tools=[], **fields).tool_use is None


def test_a_whole_conversation_reaches_the_call() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": parts, "name": "boss"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": parts, "tool_call_id": "c1"},
    ]
    asked = ToolCall(call_id="c1", name="f", arguments='{"a": 1}')
    assert _chat(messages=messages).messages == (
        ChatMessage(role="developer", content="ab", name="boss"),
        ChatMessage(role="assistant", tool_calls=(asked,)),
        ChatMessage(role="assistant", tool_calls=(asked,)),
        ChatMessage(role="tool", content="ab", tool_call_id="c1"),
    )


def test_c35_a_call_holds_no_iterator_so_it_can_be_read_twice() -> None:
    call = _chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}]}] * 2)
    first, second = ([message.content for message in call.messages] for _ in range(2))
    assert first == second == ["a", "a"]


@pytest.mark.parametrize(
    ("in_body", "in_header", "expected"), [(None, None, None), (3.0, None, 3.0), (None, 2.0, 2.0), (3.0, 2.0, 2.0)]
)
def test_of_two_time_limits_the_smaller_counts(
    in_body: float | None, in_header: float | None, expected: float | None
) -> None:
    body = parse_body(CompletionBody, {"model": "m", "prompt": "hi", "timeout_s": in_body})
    options = completion_call(body, SETTINGS, Origin(tenant="alice", timeout_s=in_header)).options
    assert (options.timeout_s, options.tenant) == (expected, "alice")


@pytest.mark.parametrize("fields", [{"best_of": 1}, {"best_of": 3, "n": 3}])
def test_best_of_is_accepted_where_all_of_them_are_returned(fields: Fields) -> None:
    assert _completion(**fields).options.n == fields.get("n")


@pytest.mark.parametrize("fields", [{"echo": True}, {"prompt_logprobs": 0}])
def test_no_output_at_all_is_accepted_where_the_prompt_is_shown(fields: Fields) -> None:
    assert _completion(max_tokens=0, **fields).options.max_tokens == 0


def test_the_prompt_to_tokenize_is_given_as_in_a_call() -> None:
    text = tokenize_call(parse_body(TokenizeTextBody, {"prompt": "hi"}), "served")
    assert text == CompletionCall(model="served", prompts=("hi",), options=text.options)
    fields = {"model": "m", "messages": [USER], "tools": TOOLS, "add_generation_prompt": False}
    chat = tokenize_call(parse_body(TokenizeChatBody, fields), "served")
    assert isinstance(chat, ChatCall)
    assert (chat.model, chat.opens_answer, chat.tool_use is not None) == ("m", False, True)


def test_unknown_fields_are_listed_by_their_paths_where_they_are_ignored() -> None:
    messages = [USER, {**USER, "mood": 1, "content": [{"type": "text", "text": "a", "b": 2}]}]
    fields = {"model": "m", "messages": messages, "x": {"y": 1}, "stream": True, "stream_options": {"z": 1}}
    body, ignored = parse_tolerantly(ChatBody, fields)
    assert chat_call(body, SETTINGS).messages == (
        ChatMessage(role="user", content="hi"),
        ChatMessage(role="user", content="a"),
    )
    assert sorted(ignored) == ["messages[1].content[0].b", "messages[1].mood", "stream_options.z", "x"]


def test_a_wrong_field_is_refused_also_where_unknown_ones_are_ignored() -> None:
    with pytest.raises(InvalidRequest, match="n is 0"):
        parse_tolerantly(ChatBody, {"model": "m", "messages": [USER], "n": 0, "x": 1})
