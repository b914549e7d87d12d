"""Penalties, bias and masks of a row, through the sampler; a row that has no token left harms nobody."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from bakehouse_kernels.reference import ReferenceOps
from bakehouse_replica.core.sampling import Grammar, GrammarKind, SamplingParams
from bakehouse_replica.core.types import Draw, Sample
from bakehouse_replica.model.adjust import adjusted
from bakehouse_replica.model.constraint import Constraint, ConstraintFailure, constraint_of
from bakehouse_replica.model.sampler import draw
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

VOCABULARY = 50
GREEDY = SamplingParams(temperature=0.0)
RANKED = {7: 5.0, 8: 4.0, 9: 3.0, 10: 2.0}  # the four best tokens and their logits


@dataclass(frozen=True)
class Only:
    """A constraint that allows some tokens, and is complete after some."""

    allowed_ids: tuple[int, ...]
    last_ids: tuple[int, ...] = ()

    def allowed(self, n_vocabulary: int) -> Tensor:
        mask_V = torch.zeros(n_vocabulary, dtype=torch.bool)
        mask_V[list(self.allowed_ids)] = True
        return mask_V

    def is_complete_after(self, token_id: int) -> bool:
        assert token_id in self.allowed_ids
        return token_id in self.last_ids


@dataclass
class BrokenSource:
    """Cannot make the constraint of any sequence."""

    prepared: list[SamplingParams] = field(default_factory=list)

    def prepare(self, params: SamplingParams) -> None:
        self.prepared.append(params)

    def constraint(self, sequence_id: int, sample: Sample) -> Constraint | None:
        raise ConstraintFailure(f"the grammar of sequence {sequence_id} ran out of fuel")


def sample_of(params: SamplingParams, *output_ids: int, seeds: tuple[int, ...] = (0,)) -> Sample:
    return Sample(params=params, seeds=seeds, output_index=len(output_ids), output_ids=output_ids)


def logits_with(logits: dict[int, float]) -> Tensor:
    logits_V = torch.full((VOCABULARY,), -20.0)
    for token_id, value in logits.items():
        logits_V[token_id] = value
    return logits_V


def drawn(logits: dict[int, float], sample: Sample, constraint: Constraint | None = None) -> Draw:
    (draws,) = draw(ReferenceOps(), logits_with(logits)[None], [sample], [0], [constraint])
    return draws[0]


def greedy(logits: dict[int, float], sample: Sample, constraint: Constraint | None = None) -> int:
    (token_id,) = drawn(logits, sample, constraint).token_ids
    return token_id


def test_repetition_penalty_counts_prompt_and_output_as_transformers_does() -> None:
    logits_V = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    prompt_ids, output_ids = (3, 4, 4, 30), (6, 30)
    penalised = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([prompt_ids + output_ids]), logits_V[None])[0]
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, repetition_penalty=1.8)
        sample = replace(sample_of(params, *output_ids, seeds=(9,)), prompt_ids=prompt_ids)
        plain = sample_of(SamplingParams(temperature=temperature), seeds=(9,))
        assert draw(ReferenceOps(), logits_V[None], [sample], [6]) == draw(
            ReferenceOps(), penalised[None], [plain], [6]
        )
        torch.testing.assert_close(adjusted(logits_V, sample, None), penalised)


def test_presence_penalty_is_paid_once_and_frequency_penalty_per_occurrence() -> None:
    def best_of(logits: dict[int, float], params: SamplingParams) -> int:
        return greedy(logits, replace(sample_of(params, 1, 1, 1), prompt_ids=(2, 2, 2)))

    logits = {1: 10.0, 2: 9.5}
    assert best_of(logits, replace(GREEDY, presence_penalty=0.4)) == 1  # 9.6: the prompt is free
    assert best_of(logits, replace(GREEDY, frequency_penalty=0.4)) == 2  # 8.8
    assert best_of({1: 8.0, 2: 9.5}, replace(GREEDY, presence_penalty=-2.0)) == 1


def test_a_bias_is_added_to_the_logit_of_its_token() -> None:
    assert greedy(RANKED, sample_of(replace(GREEDY, logit_bias=((9, 1.9),)))) == 7
    assert greedy(RANKED, sample_of(replace(GREEDY, logit_bias=((9, 2.1),)))) == 9
    assert greedy(RANKED, sample_of(replace(GREEDY, logit_bias=((7, -100.0), (8, -100.0))))) == 9


def test_a_bias_is_added_after_penalties_and_before_temperature() -> None:
    params = replace(GREEDY, repetition_penalty=2.0, logit_bias=((7, 1.7),))
    assert greedy(RANKED, sample_of(params, 7)) == 7  # 5 / 2 + 1.7 is above 4, (5 + 1.7) / 2 is not
    params = SamplingParams(temperature=100.0, allowed_token_ids=(7, 8), logit_bias=((7, 10.0),))
    (draws,) = draw(ReferenceOps(), logits_with({})[None], [sample_of(params, seeds=tuple(range(2000)))], [0])
    # 10 / 100 makes it 1,050 of 2,000; were it added after temperature, 8 would never come.
    assert 900 < sum(one.token_ids == (7,) for one in draws) < 1200  # 6 sigma: a false alarm in 1e-9


def test_no_stop_id_is_drawn_before_min_tokens() -> None:
    params = replace(GREEDY, min_tokens=2, stop_token_ids=(7, 8))
    assert [greedy(RANKED, sample_of(params, *range(n))) for n in range(4)] == [9, 9, 7, 7]


def test_only_allowed_ids_are_drawn_whatever_the_bias() -> None:
    params = SamplingParams(allowed_token_ids=(20, 30), logit_bias=((7, 100.0),))
    draws = draw(ReferenceOps(), logits_with(RANKED)[None], [sample_of(params, seeds=tuple(range(200)))], [0])[0]
    assert {one.token_ids for one in draws} == {(20,), (30,)}


def test_stop_ids_stay_allowed_once_min_tokens_are_out() -> None:
    params = replace(GREEDY, allowed_token_ids=(8, 9), stop_token_ids=(7,), min_tokens=1)
    assert [greedy(RANKED, sample_of(params, *range(n))) for n in range(2)] == [8, 7]


@pytest.mark.parametrize(
    ("output_ids", "expected"),
    [((), 8), ((1,), 8), ((1, 2), 9), ((1, 2, 3), 8), ((2, 1, 2), 9), ((2,), 8)],
)
def test_a_token_that_would_complete_a_bad_word_is_not_drawn(output_ids: tuple[int, ...], expected: int) -> None:
    params = replace(GREEDY, bad_words_ids=((7,), (1, 2, 8)))
    assert greedy(RANKED, sample_of(params, *output_ids)) == expected


def test_what_a_constraint_rules_out_is_not_drawn_and_its_end_is_told() -> None:
    only = Only(allowed_ids=(9, 10), last_ids=(10,))
    assert drawn(RANKED, sample_of(GREEDY), only) == Draw(token_ids=(9,))
    assert drawn({10: 9.0}, sample_of(GREEDY), only) == Draw(token_ids=(10,), is_complete=True)


def test_each_draw_of_a_fork_is_told_its_own_end() -> None:
    sample = sample_of(SamplingParams(temperature=1.0), seeds=tuple(range(50)))
    (draws,) = draw(ReferenceOps(), logits_with({9: 1.0, 10: 1.0})[None], [sample], [0], [Only((9, 10), (10,))])
    assert {(one.token_ids, one.is_complete) for one in draws} == {((9,), False), ((10,), True)}


@pytest.mark.parametrize("only", [Only(()), Only((7, 8))], ids=["nothing may follow", "only an end may follow"])
def test_a_constraint_that_is_at_its_end_ends_the_output_before_min_tokens(only: Only) -> None:
    params = replace(GREEDY, min_tokens=9, stop_token_ids=(7, 8))
    assert drawn(RANKED, sample_of(params), only) == Draw(token_ids=(), is_complete=True)


def test_stop_ids_that_a_constraint_allows_wait_for_min_tokens_while_others_may_follow() -> None:
    params = replace(GREEDY, min_tokens=9, stop_token_ids=(7, 8))
    assert greedy(RANKED, sample_of(params), Only((7, 8, 10))) == 10


@pytest.mark.parametrize(
    ("params", "only", "said"),
    [
        (
            replace(GREEDY, min_tokens=1, stop_token_ids=tuple(range(VOCABULARY))),
            None,
            "min_tokens forbids all of them; loosen it",
        ),
        (
            replace(GREEDY, allowed_token_ids=(3,), bad_words_ids=((3,),)),
            None,
            "allowed_token_ids and bad_words together forbid all of them; loosen one of these",
        ),
        # Not the field of the grammar: it may be any of several.
        (
            replace(GREEDY, allowed_token_ids=(3,), bad_words_ids=((3,),)),
            Only((3,)),
            "allowed_token_ids, bad_words and the grammar together forbid all of them; loosen one of these",
        ),
    ],
)
def test_masks_that_leave_no_token_fail_that_row_and_say_what_forbids_and_what_helps(
    params: SamplingParams, only: Only | None, said: str
) -> None:
    logits_RV = logits_with(RANKED).expand(3, -1)
    plain = sample_of(GREEDY)
    found = draw(
        ReferenceOps(), logits_RV, [plain, sample_of(params, seeds=(1, 2)), plain], [0] * 3, [None, only, None]
    )
    failed = Draw(token_ids=(), failure=f"after 0 output tokens no token may follow: {said}")
    assert found == [(Draw(token_ids=(7,)),), (failed, failed), (Draw(token_ids=(7,)),)]


def test_a_constraint_that_breaks_fails_its_row_only() -> None:
    params = replace(GREEDY, grammar=Grammar(kind=GrammarKind.REGEX, text="a"))
    sample = sample_of(params, seeds=(1, 2))
    constraints = [None, constraint_of(BrokenSource(), 31, sample)]
    found = draw(
        ReferenceOps(), logits_with(RANKED).expand(2, -1), [sample_of(GREEDY), sample], [0, 0], constraints
    )
    failed = Draw(token_ids=(), failure="the grammar of sequence 31 ran out of fuel")
    assert found == [(Draw(token_ids=(7,)),), (failed, failed)]


def test_no_source_is_asked_for_a_sample_without_grammar() -> None:
    assert constraint_of(BrokenSource(), 0, sample_of(GREEDY)) is None
    assert constraint_of(None, 0, sample_of(GREEDY)) is None
