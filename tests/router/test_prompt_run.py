"""One prompt's deltas to pieces, for any deltas: each choice ends once, and what is told adds up."""

from collections.abc import Sequence

import pytest
from bakehouse_replica.core.errors import DeadlineExceeded, EngineDead, InvalidRequest, Unavailable
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Delivery, Failure, FailureKind, FinishReason, Request, TokenDelta
from bakehouse_replica.vocabulary import Vocabulary
from bakehouse_router.prompt_run import Echo, PromptJob, PromptRun, TextPiece
from bakehouse_router.text.stream import TextStream
from gateways import logprob_of
from hypothesis import given
from hypothesis import strategies as st

# Tokens a, b, two halves of a character, and a special one.
VOCABULARY = Vocabulary({0: b"a", 1: b"b", 2: b"\xc3", 3: b"\xa9", 4: b""}, {4: "<end>"})
PROMPT_IDS = (0, 1)
ECHO = Echo(text="ab", offsets=(0, 1), n_top=0)

Parts = list[list[int]]


def _run(
    n: int, *, reports_tokens: bool = True, stops: tuple[str, ...] = (), echo: Echo | None = None
) -> PromptRun:
    params = SamplingParams(n=n, seed=0, max_tokens=100, logprobs=0, prompt_logprobs=0)
    request = Request(request_id="call", prompt_ids=PROMPT_IDS, params=params)
    first_offset = 0 if echo is None else len(echo.text)
    streams = tuple(
        TextStream(VOCABULARY, stops=stops, reports_tokens=True, first_offset=first_offset) for _ in range(n)
    )
    return PromptRun(PromptJob(request=request, streams=streams, echo=echo), 10)


def _deltas(parts: Sequence[Parts]) -> list[TokenDelta]:
    """The parts of each choice in turn, the first of choice 0 in front; each choice ends by length."""
    deltas = []
    for index in range(max(map(len, parts), default=0)):
        for choice, own in enumerate(parts):
            if index < len(own):
                deltas.append(_delta(choice, own, index))
    return deltas


def _delta(choice: int, parts: Parts, index: int) -> TokenDelta:
    token_ids = tuple(parts[index])
    is_first = choice == 0 and index == 0
    return TokenDelta(
        request_id="call",
        choice=choice,
        start=sum(map(len, parts[:index])),
        token_ids=token_ids,
        logprobs=tuple(logprob_of(token_id, 0) for token_id in token_ids),
        prompt_logprobs=tuple(logprob_of(token_id, 0) for token_id in PROMPT_IDS[1:]) if is_first else (),
        finish=FinishReason.LENGTH if index == len(parts) - 1 else None,
    )


def _taken(run: PromptRun, deltas: Sequence[TokenDelta]) -> list[TextPiece]:
    return [piece for delta in deltas for piece in run.take(Delivery(replica_id="r", deltas=(delta,)))]


part_lists = st.lists(
    st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=5), min_size=1, max_size=3
)


@given(part_lists, st.sampled_from([(), ("ba",), ("é", "aab")]), st.booleans())
def test_i5_each_choice_ends_once_and_what_is_told_adds_up(
    parts: list[Parts], stops: tuple[str, ...], has_echo: bool
) -> None:
    run = _run(len(parts), stops=stops, echo=ECHO if has_echo else None)
    pieces = _taken(run, _deltas(parts))
    assert run.is_over
    assert not run.is_running
    n_told = 0
    for choice in range(len(parts)):
        own = [piece for piece in pieces if piece.choice == 10 + choice]
        assert [piece.finish is not None for piece in own] == [False] * (len(own) - 1) + [True]
        tokens = [token for piece in own for token in piece.tokens]
        assert all(token.logprob == logprob_of(token.token_id, 0) for token in tokens[1:])
        offsets = [token.text_offset for token in tokens]
        assert offsets == sorted(offsets)
        assert max(offsets, default=0) <= len("".join(piece.text for piece in own))
        if has_echo:
            assert (own[0].text, [token.token_id for token in own[0].tokens]) == ("ab", [0, 1])
            tokens = tokens[2:]
        n_told += len(tokens)
    assert n_told == run.completion_tokens


@given(part_lists, st.sampled_from([(), ("ba",), ("é", "aab")]))
def test_i2_how_deltas_are_gathered_into_deliveries_changes_nothing(
    parts: list[Parts], stops: tuple[str, ...]
) -> None:
    deltas = _deltas(parts)
    single = _taken(_run(len(parts), stops=stops), deltas)
    together = _run(len(parts), stops=stops).take(Delivery(replica_id="r", deltas=tuple(deltas)))
    assert tuple(single) == together


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (FailureKind.DEADLINE, DeadlineExceeded),
        (FailureKind.NO_ROOM, InvalidRequest),
        (FailureKind.DRAW, InvalidRequest),
        (FailureKind.ENGINE, EngineDead),
    ],
)
def test_a_failed_choice_is_an_error_of_its_kind(kind: FailureKind, error: type[Exception]) -> None:
    failure = Failure(kind=kind, message="no more flour")
    delta = TokenDelta(
        request_id="call", choice=0, start=0, token_ids=(), finish=FinishReason.ERROR, failure=failure
    )
    with pytest.raises(error, match="no more flour"):
        _taken(_run(1, echo=ECHO), [delta])


def test_a_choice_that_a_stop_has_ended_fails_no_more() -> None:
    failure = Failure(kind=FailureKind.ENGINE, message="too late")
    delta = TokenDelta(
        request_id="call",
        choice=0,
        start=0,
        token_ids=(1, 0),
        logprobs=(logprob_of(1, 0), logprob_of(0, 0)),
        finish=FinishReason.ERROR,
        failure=failure,
    )
    (piece,) = _taken(_run(1, stops=("ba",)), [delta])
    assert piece.finish is FinishReason.STOP


def test_a_request_that_the_replica_cancelled_is_unavailable() -> None:
    delta = TokenDelta(request_id="call", choice=0, start=0, token_ids=(), finish=FinishReason.CANCELLED)
    with pytest.raises(Unavailable, match="going down"):
        _taken(_run(1), [delta])
