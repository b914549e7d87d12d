"""Requests that can never be served are refused with the field, the value and the limit."""

from dataclasses import replace

import pytest
from bakehouse_replica.core.admission import output_limit
from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Capacity, Request
from driving import make_request

CAPACITY = Capacity(n_blocks=10, block_size=4, max_step_tokens=16, max_sequences=4)
MAX_MODEL_LEN = 60


@pytest.mark.parametrize(
    ("request_", "param", "message"),
    [
        (make_request("r", range(60), max_tokens=None), "prompt", "prompt has 60 tokens.*limit is 59"),
        (make_request("r", range(60), max_tokens=1), "prompt", r"60 tokens\) plus max_tokens \(1\) is 61.*is 60"),
        (make_request("r", range(61), max_tokens=0), "prompt", r"61 tokens\) plus max_tokens \(0\) is 61.*is 60"),
        (make_request("r", range(41), max_tokens=0), "max_tokens", "41 tokens.*need 11 KV blocks"),
        (make_request("r", [1], max_tokens=0, prior_output=(1,)), "prior_output", "1 tokens; the limit is 0"),
        (make_request("r", range(50), max_tokens=11), "max_tokens", r"max_tokens \(11\) is 61.*limit is 60"),
        (make_request("r", range(30), max_tokens=12), "max_tokens", "41 tokens.*need 11 KV blocks of 4.*has 10"),
        (make_request("r", range(41), max_tokens=None), "prompt", "41 tokens.*need 11 KV blocks"),
        (make_request("r", [1], n=5), "n", "n is 5; at most 4"),
        (make_request("r", [1, 2**31]), "prompt", f"from 1 to {2**31}"),
        (make_request("r", [-1]), "prompt", "from -1 to -1"),
        (make_request("r", [1], prior_output=(-5,)), "prior_output", "from -5 to -5"),
        (make_request("r", [1], prior_output=(1,) * 9, max_tokens=8), "prior_output", "9 tokens; the limit is 8"),
        (Request(request_id="r", prompt_ids=(1,), params=SamplingParams()), "seed", "seed is None"),
    ],
)
def test_an_impossible_request_is_refused_by_name(request_: Request, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        output_limit(request_, CAPACITY, MAX_MODEL_LEN)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("request_", "n_limit"),
    [
        (make_request("r", range(30), max_tokens=11), 11),  # 40 tokens are computed: 10 blocks of 4, all there are
        (make_request("r", range(40), max_tokens=None), 20),  # may grow beyond the pool; fails only if it does
        (make_request("r", range(30), max_tokens=11, prior_output=(1,) * 10), 11),  # prior output is part of it
        (make_request("r", range(30), max_tokens=11, prior_output=(1,) * 11), 11),
        (make_request("r", [1], n=4, max_tokens=8), 8),
        (make_request("r", range(40), max_tokens=0), 0),
    ],
)
def test_what_fits_exactly_is_accepted(request_: Request, n_limit: int) -> None:
    assert output_limit(request_, CAPACITY, MAX_MODEL_LEN) == n_limit


def test_more_sequences_than_tokens_in_a_step_do_not_run_at_once() -> None:
    with pytest.raises(InvalidRequest, match="n is 4; at most 3"):
        output_limit(make_request("r", [1], n=4), replace(CAPACITY, max_step_tokens=3), MAX_MODEL_LEN)
