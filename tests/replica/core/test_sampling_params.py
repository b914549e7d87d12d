"""What sampling parameters may be: each refusal names the field, the value and the limit."""

import pytest
from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.sampling import SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("n", 0, "at least 1"),
        ("n", None, "an integer"),
        ("n", True, "an integer"),
        ("n", 1.0, "an integer"),
        ("max_tokens", -1, "at least 0"),
        ("max_tokens", "5", "an integer"),
        ("min_tokens", -1, "at least 0"),
        ("min_tokens", None, "an integer"),
        ("temperature", "1", "a number"),
        ("temperature", True, "a number"),
        ("temperature", -0.1, "between 0 and 100"),
        ("temperature", float("nan"), "between 0 and 100"),
        ("temperature", float("inf"), "between 0 and 100"),
        ("top_k", 0, "at least 1"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", None, "a number"),
        ("min_p", 1.1, "between 0 and 1"),
        ("presence_penalty", 2.1, "between -2 and 2"),
        ("frequency_penalty", -2.1, "between -2 and 2"),
        ("repetition_penalty", 0, "between 0.01 and 10"),
        ("seed", 2**63, "a signed 64-bit integer"),
        ("logprobs", -1, "at least 0"),
        ("prompt_logprobs", True, "an integer"),
        ("stop_token_ids", (-1,), "non-negative token ids"),
        ("stop_token_ids", ("a",), "non-negative token ids"),
        ("logit_bias", ((1, 101.0),), "between -100 and 100"),
        ("logit_bias", ((-1, 1.0),), "between -100 and 100"),
        ("allowed_token_ids", (), "at least one"),
        ("allowed_token_ids", (1.5,), "at least one"),
        ("bad_words_ids", ((),), "non-empty sequences"),
        ("logit_bias", {1: 5}, "a tuple"),
        ("logit_bias", (5,), "pairs of a token id"),
        ("logit_bias", ((5, "a"),), "between -100 and 100"),
        ("stop_token_ids", [5], "a tuple"),
        ("grammar", "x", "a Grammar"),
    ],
)
def test_a_wrong_value_is_refused_with_its_limit(field: str, value: object, limit: str) -> None:
    with pytest.raises(InvalidRequest, match=limit) as refused:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert refused.value.param == field
    assert str(value) in refused.value.message or repr(value) in refused.value.message


def test_min_tokens_above_max_tokens_is_refused_with_both() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens is 5; it must be at most max_tokens \(4\)"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_integers_are_numbers_too() -> None:
    assert SamplingParams(temperature=1, top_p=1, presence_penalty=-2).temperature == 1
