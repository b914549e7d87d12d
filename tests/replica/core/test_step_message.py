"""Step messages: what goes in comes out, through pickle, whatever deltas carry."""

import pickle
from typing import Any

import pytest
from bakehouse_replica.core.step_message import pack, unpack
from bakehouse_replica.core.types import Failure, FailureKind, FinishReason, TokenDelta, TokenLogprob, Usage
from hypothesis import given
from hypothesis import strategies as st

COUNTS = st.integers(0, 2**31)
USAGES = st.builds(Usage, prompt_tokens=COUNTS, cached_tokens=COUNTS, completion_tokens=COUNTS)
LOGPROBS = st.lists(
    st.builds(
        TokenLogprob, logprob=st.floats(-99, 0), rank=st.integers(1, 9), top=st.just(((3, -0.5), (4, -1.5)))
    ),
    max_size=3,
).map(tuple)
DELTAS = st.builds(
    TokenDelta,
    request_id=st.sampled_from(["a", "b"]),
    choice=st.integers(0, 15),
    start=COUNTS,
    token_ids=st.lists(st.integers(0, 200_000), max_size=4).map(tuple),
    logprobs=LOGPROBS,
    prompt_logprobs=LOGPROBS,
    finish=st.none() | st.sampled_from(FinishReason),
    usage=st.none() | USAGES,
    failure=st.none() | st.builds(Failure, kind=st.sampled_from(FailureKind), message=st.just("why")),
)


@given(st.dictionaries(COUNTS, DELTAS, max_size=5))
def test_deltas_arrive_as_they_left(deltas: dict[int, TokenDelta]) -> None:
    arrived = pickle.loads(pickle.dumps(pack(deltas.items())))

    choices = {stream: (delta.request_id, delta.choice) for stream, delta in deltas.items()}

    assert dict(unpack(arrived, choices.get)) == deltas


def test_streams_that_nobody_waits_for_are_left_out() -> None:
    plain = TokenDelta(request_id="a", choice=0, start=5, token_ids=(1,))
    last = TokenDelta(request_id="b", choice=1, start=5, token_ids=(1,), finish=FinishReason.STOP)
    message = pack([(0, plain), (1, plain), (2, last), (3, last)])

    assert dict(unpack(message, {0: ("a", 0), 2: ("b", 1)}.get)) == {0: plain, 2: last}


LOGPROB = TokenLogprob(logprob=-0.5, rank=1, top=())


@pytest.mark.parametrize(
    "more",
    [
        {"failure": Failure(kind=FailureKind.ENGINE, message="dead")},
        {"finish": FinishReason.STOP},
        {"usage": Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=0)},
        {"logprobs": (LOGPROB,)},
        {"prompt_logprobs": (LOGPROB,)},
    ],
    ids=lambda more: next(iter(more)),
)
def test_whatever_a_delta_has_besides_tokens_is_not_lost_alone(more: dict[str, Any]) -> None:
    delta = TokenDelta(request_id="a", choice=0, start=0, token_ids=(), **more)

    assert list(unpack(pack([(7, delta)]), {7: ("a", 0)}.get)) == [(7, delta)]
