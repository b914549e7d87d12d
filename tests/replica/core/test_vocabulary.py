"""What a request may say about the vocabulary."""

from dataclasses import replace

import pytest
from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.types import Request
from bakehouse_replica.core.vocabulary import check_vocabulary
from driving import make_request

N_VOCABULARY = 10
WHOLE = tuple(range(N_VOCABULARY))


def request_with(**params: object) -> Request:
    plain = make_request("r", [1])
    return replace(plain, params=replace(plain.params, **params))  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [-1, N_VOCABULARY])
@pytest.mark.parametrize("param", ["prompt", "prior_output"])
def test_c22_an_id_of_prompt_or_output_outside_the_vocabulary_is_refused(param: str, wrong: int) -> None:
    request = make_request("r", [1, wrong] if param == "prompt" else [1])
    request = replace(request, prior_output=(wrong,) if param == "prior_output" else ())
    with pytest.raises(InvalidRequest, match=f"{param} holds token id {wrong}; .* between 0 and 9") as caught:
        check_vocabulary(request, N_VOCABULARY)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("stop_token_ids", (3, 10)),
        ("allowed_token_ids", (3, 10)),
        ("logit_bias", ((3, 1.0), (10, -1.0))),
        ("bad_words_ids", ((3,), (4, 10))),
    ],
)
def test_c21_c22_an_id_of_a_parameter_outside_the_vocabulary_is_refused(param: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"{param} holds token id 10; .* between 0 and 9") as caught:
        check_vocabulary(request_with(**{param: value}), N_VOCABULARY)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("params", "param", "message"),
    [
        ({"stop_token_ids": WHOLE, "min_tokens": 1}, "stop_token_ids", r"before min_tokens \(1\).*has 10"),
        (
            {"stop_token_ids": WHOLE[1:], "bad_words_ids": ((0,),), "min_tokens": 2},
            "stop_token_ids",
            "bans 1 of 10 tokens, stop_token_ids has 9",
        ),
        (
            {"allowed_token_ids": (3, 4), "stop_token_ids": (3, 4, 5), "min_tokens": 1},
            "allowed_token_ids",
            "stop_token_ids has 3, allowed_token_ids has 2",
        ),
        (
            {"allowed_token_ids": (3,), "bad_words_ids": ((3,),)},
            "allowed_token_ids",
            "no token would be left to draw: bad_words_ids bans 1",
        ),
        ({"bad_words_ids": tuple((id_,) for id_ in WHOLE)}, "bad_words_ids", "bans 10 of 10 tokens"),
    ],
)
def test_parameters_that_leave_no_token_are_refused(params: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        check_vocabulary(request_with(**params), N_VOCABULARY)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": WHOLE},
        {"stop_token_ids": WHOLE, "min_tokens": 0, "max_tokens": 0},
        {"allowed_token_ids": (3,), "bad_words_ids": ((3,),), "max_tokens": 0},
        {"allowed_token_ids": (3,), "bad_words_ids": ((3,),), "stop_token_ids": (4,)},
        {"allowed_token_ids": (3,), "bad_words_ids": ((3, 3),)},
        {"allowed_token_ids": (3, 4), "stop_token_ids": (4,), "min_tokens": 5},
        {"logit_bias": tuple((id_, -100.0) for id_ in WHOLE)},
    ],
)
def test_parameters_that_leave_a_token_pass(params: dict[str, object]) -> None:
    check_vocabulary(request_with(**params), N_VOCABULARY)
