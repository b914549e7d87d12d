"""Limits on what a call may ask for: each refusal names the field, the value and the limit."""

from dataclasses import replace

import pytest
from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.sampling import Grammar, GrammarKind
from bakehouse_router.bounds import MAX_PROMPT_ENTRIES, check_bad_words, check_bounds, check_prompt_report
from bakehouse_router.calls import Call, ToolUse
from bakehouse_router.requests import check_token_ids, scoped_salt
from bakehouse_router.text.messages import Tool
from gateways import chat, completion, settings
from hypothesis import given
from hypothesis import strategies as st

LIMITS = settings(
    max_choices=2,
    max_prompts=2,
    max_stops=2,
    max_stop_chars=4,
    max_logprobs=3,
    max_listed_tokens=2,
    max_tools=2,
)
TOOLS = tuple(Tool(name=f"tool_{index}") for index in range(3))
GRAMMAR = Grammar(kind=GrammarKind.REGEX, text="a")

ALLOWED: list[Call] = [
    completion(n=2, prompts=("a", "b"), stops=("abcd", "b"), logprobs=3, prompt_logprobs=0),
    completion(logit_bias=((1, -100.0), (2, 100)), stop_token_ids=(1, 2), allowed_token_ids=(1, 2)),
    completion(bad_words=("abcd", "b"), priority=-(2**31), timeout_s=0.001, user="u" * 256),
    chat(tool_use=ToolUse(tools=TOOLS[:2], choice="named", name="tool_1")),
    chat(tool_use=ToolUse(tools=TOOLS[:2], choice="none"), grammar=GRAMMAR),
]

REFUSED: list[tuple[Call, str, str]] = [
    (completion(n=3), "n", "n is 3; it must be at most 2"),
    (completion(prompts=("a",) * 3), "prompt", "prompt has 3 prompts; the limit is 2"),
    (completion(prompts=()), "prompt", "prompt is empty"),
    (completion(prompts=("a", "")), "prompt", "prompt is empty"),
    (completion(prompts=((),)), "prompt", "prompt is empty"),
    (replace(chat(), messages=()), "messages", "messages is empty"),
    (completion(stops=("a",) * 3), "stop", "stop has 3 strings; the limit is 2"),
    (completion(stops=("abcde",)), "stop", "stop has a string of 5 characters; the limit is 4"),
    (completion(stops=("",)), "stop", "stop has an empty string"),
    (completion(logprobs=4), "logprobs", "logprobs is 4; it must be between 0 and 3"),
    (completion(logprobs=-1), "logprobs", "logprobs is -1; it must be between 0 and 3"),
    (completion(prompt_logprobs=4), "prompt_logprobs", "prompt_logprobs is 4; it must be between 0 and 3"),
    (completion(logit_bias=((1, 0.0),) * 3), "logit_bias", "logit_bias has 3 tokens; the limit is 2"),
    (completion(logit_bias=((7, 100.5),)), "logit_bias", "the token 7 is 100.5; it must be between -100 and 100"),
    (completion(logit_bias=((7, float("nan")),)), "logit_bias", "the token 7 is nan"),
    (completion(stop_token_ids=(1,) * 3), "stop_token_ids", "stop_token_ids has 3 tokens; the limit is 2"),
    (completion(allowed_token_ids=(1,) * 3), "allowed_token_ids", "allowed_token_ids has 3 tokens"),
    (completion(allowed_token_ids=()), "allowed_token_ids", "allowed_token_ids is empty"),
    (completion(bad_words=("a",) * 3), "bad_words", "bad_words has 3 strings; the limit is 2"),
    (completion(bad_words=("abcde",)), "bad_words", "bad_words has a string of 5 characters; the limit is 4"),
    (completion(bad_words=(" ",)), "bad_words", "bad_words has an empty string"),
    (completion(timeout_s=0.0), "timeout_s", "timeout_s is 0.0; it must be above 0 and at most 86400"),
    (completion(timeout_s=float("nan")), "timeout_s", "timeout_s is nan"),
    (completion(priority=2**31), "priority", "priority is 2147483648"),
    (completion(stops=("\ud800",)), "stop", "surrogate"),
    (completion(bad_words=("\ud800",)), "bad_words", "surrogate"),
    (completion(user="\ud800"), "user", "surrogate"),
    (completion(cache_salt="\ud800"), "cache_salt", "surrogate"),
    (completion(user="u" * 257), "user", "user has 257 characters; the limit is 256"),
    (completion(cache_salt="s" * 257), "cache_salt", "cache_salt has 257 characters; the limit is 256"),
    (chat(tool_use=ToolUse(tools=TOOLS)), "tools", "tools has 3 tools; the limit is 2"),
    (chat(tool_use=ToolUse(tools=())), "tools", "tools is empty"),
    (chat(tool_use=ToolUse(tools=TOOLS[:1], choice="named", name="x")), "tool_choice", "names 'x'"),
    *(
        (
            chat(tool_use=ToolUse(tools=TOOLS[:1], choice=choice), grammar=GRAMMAR),
            "structured_outputs",
            "structured_outputs and tools",
        )
        for choice in ("auto", "required")
    ),
]


@pytest.mark.parametrize("call", ALLOWED)
def test_what_is_within_the_limits_is_allowed(call: Call) -> None:
    check_bounds(call, LIMITS)


@pytest.mark.parametrize(
    ("call", "param", "complaint"), REFUSED, ids=[f"{param}: {complaint}" for _, param, complaint in REFUSED]
)
def test_what_is_beyond_a_limit_is_refused_by_name(call: Call, param: str, complaint: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_bounds(call, LIMITS)
    assert refused.value.param == param
    assert complaint in refused.value.message


def test_bad_words_are_counted_in_tokens_too() -> None:
    check_bad_words(((1, 2),), LIMITS)
    with pytest.raises(InvalidRequest, match=r"bad_words are 3 tokens, .* the limit is 2") as refused:
        check_bad_words(((1, 2), (3,)), LIMITS)
    assert refused.value.param == "bad_words"


@pytest.mark.parametrize(
    ("token_ids", "complaint"),
    [
        ((1, -1), "the token id -1; it must be between 0 and 9"),
        ((10,), "the token id 10"),
        ((2**70,), "token id 1180591620717411303424"),
        ((1, True), "'True', which is not a token id"),
        ((1, 2.0), "'2.0', which is not a token id"),
    ],
)
def test_c22_ids_that_the_model_lacks_are_refused(token_ids: tuple[int, ...], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        check_token_ids(token_ids, "stop_token_ids", 10)


def test_ids_that_the_model_has_are_taken() -> None:
    check_token_ids((0, 9), "prompt", 10)
    check_token_ids((), "prompt", 10)


def test_nobody_in_particular_has_no_salt() -> None:
    assert scoped_salt("", "") == ""


@given(*[st.text("ab:1", max_size=4)] * 4)
def test_different_tenants_and_salts_never_read_alike(tenant: str, salt: str, other: str, other_salt: str) -> None:
    is_same = (tenant, salt) == (other, other_salt)
    assert (scoped_salt(tenant, salt) == scoped_salt(other, other_salt)) == is_same


def of_tokens(*counts: int) -> list[tuple[int, ...]]:
    """Prompts of so many tokens."""
    return [(0,) * count for count in counts]


@pytest.mark.parametrize(
    ("call", "n_each", "param"),
    [
        (completion(echoes=True), 1, "echo"),
        (completion(echoes=True, logprobs=4), 5, "echo"),
        (completion(echoes=True, logprobs=4, n=2), 10, "echo"),
        (completion(prompt_logprobs=0), 1, "prompt_logprobs"),
        (completion(prompt_logprobs=4, echoes=True, reports_tokens=True, n=2), 14, "prompt_logprobs"),
        (completion(reports_tokens=True), 1, "return_token_ids"),
        (chat(prompt_logprobs=4, n=2), 5, "prompt_logprobs"),  # of the one prompt, which is shown once
    ],
)
def test_what_a_reply_shows_of_prompts_is_bounded(call: Call, n_each: int, param: str) -> None:
    n_most = MAX_PROMPT_ENTRIES // n_each
    check_prompt_report(call, of_tokens(n_most - 1, 1))
    with pytest.raises(InvalidRequest, match=f"^{param}: the reply would show .*; the limit is 500000$") as caught:
        check_prompt_report(call, of_tokens(n_most, 1))
    assert caught.value.param == param


@pytest.mark.parametrize("call", [completion(n=2, logprobs=3), chat(logprobs=3)])
def test_prompts_that_are_not_shown_may_have_any_length(call: Call) -> None:
    check_prompt_report(call, of_tokens(MAX_PROMPT_ENTRIES + 1))
