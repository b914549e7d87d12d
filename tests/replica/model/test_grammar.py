"""Matchers that follow their sequences wherever scheduling takes them, and whose failures stay with one output."""

import json
from random import Random

import grammars
import pytest
import torch
from bakehouse_kernels.reference import ReferenceOps
from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.sampling import Grammar, SamplingParams
from bakehouse_replica.core.types import Sample
from bakehouse_replica.grammar_compiler import GrammarCompiler
from bakehouse_replica.model.constraint import ConstraintFailure, constraint_of
from bakehouse_replica.model.grammar import GrammarStore
from bakehouse_replica.model.sampler import draw
from grammars import (
    EOS_ID,
    N_TEXT,
    N_VOCABULARY,
    TOOL_ID,
    WORDS,
    allowed_ids,
    constraint_after,
    lark,
    preferring,
    regex,
    sample_after,
    schema,
    small_store,
    text_of,
    walk,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLParserLimits
from random_schemas import random_schema

OBJECT = schema(
    '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["red", "blue"]}}, '
    '"required": ["a", "b"], "additionalProperties": false}'
)
GRAMMARS = (
    OBJECT,
    regex("a*(12|é)?"),
    lark('start: s\ns: "a" s "b" | "ab"'),
    lark('start: b "y"\nb[max_tokens=2]: /x+/'),  # cannot be rolled back
)

COMPILER = GrammarCompiler(grammars.small_vocabulary, N_VOCABULARY)
WALKS = [
    (grammar, list(walk(GrammarStore(COMPILER), grammar, Random(seed), max_tokens=12)))
    for grammar in GRAMMARS
    for seed in (1, 2)
]


@pytest.fixture
def store() -> GrammarStore:
    return small_store()


def ids(text: str) -> tuple[int, ...]:
    """One id per byte."""
    return tuple(text.encode())


@settings(max_examples=60)
@given(st.data())
def test_c41_what_may_follow_depends_on_the_output_alone(data: st.DataObject) -> None:
    """Whatever was asked before, of whichever sequence, in whichever order: as preemption, forks, resumption and
    forgotten matchers make it."""
    store = GrammarStore(COMPILER, max_grammars=2, max_matchers=3)
    for _ in range(12):
        grammar, output_ids = data.draw(st.sampled_from(WALKS))
        n_tokens = data.draw(st.integers(0, len(output_ids) - 1))
        here = constraint_after(store, grammar, output_ids[:n_tokens], sequence_id=data.draw(st.integers(0, 4)))
        fresh = constraint_after(GrammarStore(COMPILER), grammar, output_ids[:n_tokens])
        allowed = allowed_ids(fresh)
        assert allowed_ids(here) == allowed
        next_id = data.draw(st.sampled_from(allowed))
        assert here.is_complete_after(next_id) == fresh.is_complete_after(next_id)
        assert allowed_ids(here) == allowed, "asking what a token would complete changes nothing"


@settings(max_examples=40)
@given(st.integers(0, 10_000))
def test_a_complete_output_matches(seed: int) -> None:
    output_ids = list(walk(small_store(), OBJECT, Random(seed), max_tokens=400))
    value = json.loads(text_of(output_ids))
    assert value["b"] in ("red", "blue")
    assert isinstance(value["a"], int)
    assert list(value) == ["a", "b"]


@pytest.mark.parametrize("seed", range(30))
def test_random_walks_through_random_schemas_are_valid(seed: int) -> None:
    wanted = random_schema(Random(seed))
    output_ids = walk(GrammarStore(COMPILER), schema(json.dumps(wanted)), Random(seed), max_tokens=5_000)
    Draft202012Validator(wanted).validate(json.loads(text_of(list(output_ids))))


def test_a_fork_may_draw_different_tokens_from_one_state(store: GrammarStore) -> None:
    constraint = constraint_after(store, regex("ab?|12"), sequence_id=7)
    assert constraint.is_complete_after(WORDS.index("12") + 256)
    assert not constraint.is_complete_after(ord("a"))
    assert constraint.is_complete_after(WORDS.index("ab") + 256)
    assert set(allowed_ids(constraint)) == {ord("a"), ord("1"), WORDS.index("ab") + 256, WORDS.index("12") + 256}


def test_all_stop_ids_are_allowed_where_the_output_may_end_and_nowhere_else(store: GrammarStore) -> None:
    stop_ids = (EOS_ID, TOOL_ID, ord("b"), ord("z"))
    grammar = regex("ab*c?")
    begun = constraint_after(store, grammar, stop_token_ids=stop_ids)
    assert allowed_ids(begun) == [ord("a"), 256, 257]
    after_a = constraint_after(store, grammar, ids("a"), stop_token_ids=stop_ids)
    assert allowed_ids(after_a) == [ord("b"), ord("c"), ord("z"), EOS_ID, TOOL_ID]
    assert after_a.is_complete_after(ord("z"))
    complete = constraint_after(store, grammar, ids("ac"), stop_token_ids=stop_ids)
    assert allowed_ids(complete) == sorted(stop_ids)


def test_a_grammar_that_only_a_stop_token_continues_is_the_outputs_failure(store: GrammarStore) -> None:
    constraint = constraint_after(store, regex("ab"), ids("a"), stop_token_ids=(ord("b"),))
    with pytest.raises(ConstraintFailure, match="stop tokens"):
        constraint.allowed(N_VOCABULARY)


@pytest.mark.parametrize(
    "grammar", [regex("(?s:.)*"), schema("{}"), lark("start: A\nA: ~/.*foo.*/"), lark('start: A\nA: "b" ~/x/')]
)
def test_no_text_produces_special_tokens_or_padding(store: GrammarStore, grammar: Grammar) -> None:
    for seed in range(5):
        output_ids = list(walk(store, grammar, Random(seed), sequence_id=seed, max_tokens=20))
        for n_tokens in range(len(output_ids)):
            constraint = constraint_after(store, grammar, output_ids[:n_tokens], sequence_id=seed)
            assert not [id_ for id_ in allowed_ids(constraint) if id_ >= N_TEXT and id_ != EOS_ID]


def test_without_a_grammar_there_is_no_constraint(store: GrammarStore) -> None:
    store.prepare(SamplingParams())
    assert store.constraint(0, sample_after(None)) is None


def test_a_bad_grammar_is_refused_when_it_is_prepared(store: GrammarStore) -> None:
    with pytest.raises(InvalidRequest, match="regex parse error"):
        store.prepare(SamplingParams(grammar=regex("(a")))


def test_c10_a_grammar_that_breaks_at_the_third_token_ends_its_choice_alone(store: GrammarStore) -> None:
    broken = sample_after(regex("[0-9]{5}"), (*ids("12"), ord("x")))
    sound = sample_after(regex("[0-9]{5}"), ids("345"))
    free = sample_after(None, ids("abc"))
    samples = [broken, sound, free]
    logits_RV = torch.randn(3, N_VOCABULARY, generator=torch.Generator().manual_seed(1))
    constraints = [constraint_of(store, index, sample) for index, sample in enumerate(samples)]
    ((failed,), (drawn,), (unconstrained,)) = draw(ReferenceOps(), logits_RV, samples, [10, 10, 10], constraints)
    assert failed.token_ids == ()
    assert failed.failure is not None
    assert "cannot be used" in failed.failure
    assert drawn.failure is None
    assert text_of(drawn.token_ids).isdigit()
    assert unconstrained.failure is None


_GROWING = regex("(?s:.)*a(?s:.){12}b")  # its automaton has 8,192 states, and meets new ones with each output


def _follow(store: GrammarStore, text: str, sequence_id: int) -> None:
    """Asks what may follow each beginning of a text, as it is done for a sequence that puts it out."""
    for n_tokens in range(len(text)):
        constraint_after(store, _GROWING, ids(text[:n_tokens]), sequence_id=sequence_id).allowed(N_VOCABULARY)


def test_an_automaton_that_others_have_used_up_fails_nobody_else() -> None:
    """Matchers of one grammar share an automaton whose size is limited; here it lasts for one output, or two."""
    store = small_store(limits=LLParserLimits(max_lexer_states=200))
    for sequence_id in range(10):
        _follow(store, "".join(Random(sequence_id).choices("ab", k=8)), sequence_id)


def test_a_grammar_beyond_its_limits_fails_its_output_and_the_next_is_served() -> None:
    store = small_store(limits=LLParserLimits(max_items_in_row=60))
    ambiguous = lark('start: s\ns: s s | "a"')
    constraint = constraint_after(store, ambiguous, ids("a" * 50))
    with pytest.raises(ConstraintFailure, match="max is 60"):
        constraint.allowed(N_VOCABULARY)
    assert allowed_ids(constraint_after(store, ambiguous, ids("a"), sequence_id=1))
    assert allowed_ids(constraint_after(store, regex("ok"), sequence_id=2)) == [ord("o")]


@pytest.mark.parametrize("seed", range(20))
def test_c27_a_model_that_prefers_spaces_still_writes_json(seed: int) -> None:
    spaces = {
        ord(" "): 2.0,
        ord("\n"): 2.0,
        ord("\t"): 2.0,
        256 + WORDS.index("  "): 3.0,
        256 + WORDS.index(" \n"): 3.0,
    }
    closers = dict.fromkeys(map(ord, '}"'), 1.0)
    grammar = schema(
        '{"type": "object", "patternProperties": {"^[a-z]{1,3}$": {"type": "integer"}}, '
        '"additionalProperties": false, "minProperties": 2}'
    )
    output_ids = list(preferring(small_store(), grammar, spaces | closers, Random(seed), max_tokens=100))
    assert len(output_ids) < 100
    assert all(isinstance(value, int) for value in json.loads(text_of(output_ids)).values())


def test_c28_two_choice_lists_in_one_batch_never_mix(store: GrammarStore) -> None:
    colours, words = ("red", "green", "blue", "re"), ("ab", "abc", "true", "b")
    lists = [
        lark("start: A\nA: " + " | ".join(json.dumps(choice) for choice in choices))
        for choices in (colours, words)
    ]
    for seed in range(200):
        outputs = _drawn_together(store, lists, seed)
        assert text_of(outputs[0]) in colours
        assert text_of(outputs[1]) in words


def _drawn_together(store: GrammarStore, lists: list[Grammar], seed: int) -> list[tuple[int, ...]]:
    """The outputs of sequences that share every batch, their stop ids left out."""
    outputs: list[tuple[int, ...]] = [() for _ in lists]
    open_rows = list(range(len(lists)))
    logits = torch.Generator().manual_seed(seed)
    while open_rows:
        samples = [_sample(lists[row], outputs[row], seed) for row in open_rows]
        constraints = [
            constraint_of(store, 2 * seed + row, sample) for row, sample in zip(open_rows, samples, strict=True)
        ]
        logits_RV = torch.randn(len(samples), N_VOCABULARY, generator=logits)
        drawn = draw(ReferenceOps(), logits_RV, samples, [len(outputs[row]) for row in open_rows], constraints)
        for row, (choice,) in zip(list(open_rows), drawn, strict=True):
            assert choice.failure is None
            outputs[row] += tuple(token_id for token_id in choice.token_ids if token_id != EOS_ID)
            if choice.is_complete or EOS_ID in choice.token_ids:
                open_rows.remove(row)
    return outputs


def _sample(grammar: Grammar, output_ids: tuple[int, ...], seed: int) -> Sample:
    params = SamplingParams(grammar=grammar, stop_token_ids=(EOS_ID,), seed=seed)
    return Sample(params=params, seeds=(seed,), output_index=len(output_ids), output_ids=output_ids)


def test_the_small_vocabulary_is_what_these_tests_think() -> None:
    assert grammars.small_vocabulary().n_tokens == N_VOCABULARY - 3
