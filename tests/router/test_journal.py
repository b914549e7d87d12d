"""The journal: what has been emitted, once, and how it would go on elsewhere."""

from dataclasses import replace

import pytest
from bakehouse_replica.core.hashing import choice_seed
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import FinishReason, Request, TokenDelta, TokenLogprob, Usage
from bakehouse_router.journal import Journal


def request(*, n: int = 1, prior: tuple[int, ...] = ()) -> Request:
    return Request(
        request_id="r", prompt_ids=(1, 2), params=SamplingParams(n=n, seed=5, max_tokens=9), prior_output=prior
    )


def delta(start: int, *token_ids: int, choice: int = 0, finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(request_id="r", choice=choice, start=start, token_ids=token_ids, finish=finish)


@pytest.mark.parametrize(
    ("start", "token_ids", "new"),
    [
        pytest.param(2, (12, 13), (2, (12, 13)), id="what follows is new"),
        pytest.param(0, (10, 11, 12), (2, (12,)), id="a repeated beginning is dropped"),
        pytest.param(1, (11,), None, id="a mere repetition is nothing"),
        pytest.param(2, (), None, id="an empty delta is nothing"),
    ],
)
def test_a_delta_is_cut_to_what_is_new(
    start: int, token_ids: tuple[int, ...], new: tuple[int, tuple[int, ...]] | None
) -> None:
    journal = Journal(request())
    journal.accept(delta(0, 10, 11))

    accepted = journal.accept(delta(start, *token_ids))

    assert (accepted and (accepted.start, accepted.token_ids)) == new


def scores(*ranks: int) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(logprob=-float(rank), rank=rank) for rank in ranks)


def test_log_probabilities_are_cut_with_their_ids() -> None:
    journal = Journal(request())
    journal.accept(replace(delta(0, 10, 11), logprobs=scores(1, 2)))

    accepted = journal.accept(replace(delta(1, 11, 12, 13), logprobs=scores(2, 3, 4)))

    assert accepted == replace(delta(2, 12, 13), logprobs=scores(3, 4))


def test_the_prompt_s_log_probabilities_pass_once() -> None:
    journal = Journal(request(n=2))
    first = replace(delta(0, 10), prompt_logprobs=scores(1))

    assert journal.accept(first) == first
    accepted = journal.accept(replace(delta(0, 10, 11), prompt_logprobs=scores(1)))

    assert accepted == delta(1, 11)


@pytest.mark.parametrize(("choice", "wanted"), [(0, 3), (1, None)])
def test_only_the_first_choice_asks_for_the_prompt_s_log_probabilities_again(
    choice: int, wanted: int | None
) -> None:
    asked = request(n=2)
    journal = Journal(replace(asked, params=replace(asked.params, prompt_logprobs=3)))

    assert dict(journal.resume_requests())[choice].params.prompt_logprobs == wanted


def test_what_has_been_delivered_of_the_prompt_is_not_asked_for_again() -> None:
    asked = request()
    journal = Journal(replace(asked, params=replace(asked.params, prompt_logprobs=3)))
    journal.accept(replace(delta(0, 10), prompt_logprobs=scores(1)))

    ((_, resumed),) = journal.resume_requests()

    assert resumed == request(prior=(10,))


def test_a_gap_is_refused_and_changes_nothing() -> None:
    journal = Journal(request())
    journal.accept(delta(0, 10))

    with pytest.raises(AssertionError, match="continues at 2, but only 1 ids"):
        journal.accept(delta(2, 12))

    assert journal.accept(delta(1, 11)) == delta(1, 11)


def test_nothing_follows_the_end_of_a_choice() -> None:
    journal = Journal(request(n=2))
    journal.accept(delta(0, 10, finish=FinishReason.STOP))

    with pytest.raises(AssertionError, match="choice 0 of r has ended already"):
        journal.accept(delta(1, finish=FinishReason.STOP))

    assert not journal.is_finished
    journal.accept(delta(0, 20, choice=1, finish=FinishReason.LENGTH))
    assert journal.is_finished


def test_an_end_without_new_ids_passes() -> None:
    journal = Journal(request())
    journal.accept(delta(0, 10))

    ending = delta(0, 10, finish=FinishReason.STOP)

    assert journal.accept(ending) == delta(1, finish=FinishReason.STOP)


def test_only_new_output_counts_as_emitted() -> None:
    journal = Journal(request(prior=(7, 8)))
    assert journal.n_emitted == 0

    assert journal.accept(delta(0, 7, 8)) is None
    assert journal.n_emitted == 0

    journal.accept(delta(2, 9))
    assert journal.n_emitted == 1


def test_an_end_counts_as_emitted_too() -> None:
    journal = Journal(request())
    journal.accept(delta(0, finish=FinishReason.STOP))

    assert journal.n_emitted == 1


def test_how_much_of_the_prompt_was_cached_is_what_the_first_replica_said() -> None:
    journal = Journal(request())
    usage = Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=1)
    journal.accept(replace(delta(0, 10), usage=usage))

    elsewhere = Usage(prompt_tokens=9, cached_tokens=8, completion_tokens=2)
    found = journal.accept(replace(delta(1, 11, finish=FinishReason.STOP), usage=elsewhere))

    assert found is not None
    assert found.usage == replace(elsewhere, cached_tokens=4)


def test_a_single_choice_resumes_as_itself_with_what_it_has_said() -> None:
    journal = Journal(request())
    journal.accept(delta(0, 10, 11))

    assert journal.resume_requests() == [(0, request(prior=(10, 11)))]


def test_each_unfinished_choice_resumes_alone_under_its_own_seed() -> None:
    journal = Journal(request(n=3))
    journal.accept(delta(0, 10))
    journal.accept(delta(0, 20, 21, choice=1, finish=FinishReason.STOP))

    resumed = journal.resume_requests()

    assert [choice for choice, _ in resumed] == [0, 2]
    assert [again.prior_output for _, again in resumed] == [(10,), ()]
    assert [again.params.seed for _, again in resumed] == [choice_seed(5, 0), choice_seed(5, 2)]
    assert {again.params.n for _, again in resumed} == {1}
    assert [again.first_choice for _, again in resumed] == [0, 2]
    assert len({again.request_id for _, again in resumed}) == 2
