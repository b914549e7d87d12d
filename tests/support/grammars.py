"""A small vocabulary and what walks it through grammars: one token per byte, some words, special ones, padding."""

from collections.abc import Iterator, Mapping, Sequence
from random import Random

import torch
from bakehouse_replica.core.sampling import Grammar, GrammarKind, SamplingParams
from bakehouse_replica.core.types import Sample
from bakehouse_replica.grammar_compiler import LIMITS, GrammarCompiler
from bakehouse_replica.model.constraint import Constraint
from bakehouse_replica.model.grammar import GrammarStore
from bakehouse_replica.vocabulary import Vocabulary
from llguidance import LLParserLimits

WORDS = ("ab", "abc", "true", '{"', '":', '": ', '", "', '"}', "  ", " \n", "red", "green", "blue", "re", "12")
EOS_ID, TOOL_ID = 256 + len(WORDS), 257 + len(WORDS)
SPECIAL_NAMES = {EOS_ID: "<|end|>", TOOL_ID: "[TOOL]"}
N_TEXT = 256 + len(WORDS)
N_VOCABULARY = N_TEXT + len(SPECIAL_NAMES) + 3  # the last three are padding


def small_vocabulary() -> Vocabulary:
    """Id b is the byte b; then the words, the special tokens."""
    spelled = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS]
    return Vocabulary(dict(enumerate(spelled)) | dict.fromkeys(SPECIAL_NAMES, b""), SPECIAL_NAMES)


def small_store(
    *, max_grammars: int = 64, max_matchers: int = 1024, limits: LLParserLimits = LIMITS
) -> GrammarStore:
    """A store over the small vocabulary."""
    compiler = GrammarCompiler(small_vocabulary, N_VOCABULARY, limits=limits)
    return GrammarStore(compiler, max_grammars=max_grammars, max_matchers=max_matchers)


def schema(text: str) -> Grammar:
    """A JSON schema."""
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=text)


def regex(text: str) -> Grammar:
    """A regular expression."""
    return Grammar(kind=GrammarKind.REGEX, text=text)


def lark(text: str) -> Grammar:
    """A Lark grammar."""
    return Grammar(kind=GrammarKind.LARK, text=text)


def sample_after(
    grammar: Grammar | None, output_ids: Sequence[int] = (), *, stop_token_ids: tuple[int, ...] = (EOS_ID,)
) -> Sample:
    """What the scheduler asks for after these ids."""
    params = SamplingParams(grammar=grammar, stop_token_ids=stop_token_ids, seed=0)
    return Sample(params=params, seeds=(0,), output_index=len(output_ids), output_ids=tuple(output_ids))


def constraint_after(
    store: GrammarStore,
    grammar: Grammar,
    output_ids: Sequence[int] = (),
    *,
    sequence_id: int = 0,
    stop_token_ids: tuple[int, ...] = (EOS_ID,),
) -> Constraint:
    """The constraint of a sequence that has put out these ids."""
    constraint = store.constraint(sequence_id, sample_after(grammar, output_ids, stop_token_ids=stop_token_ids))
    assert constraint is not None
    return constraint


def allowed_ids(constraint: Constraint) -> list[int]:
    """In rising order."""
    return torch.nonzero(constraint.allowed(N_VOCABULARY)).flatten().tolist()


def walk(
    store: GrammarStore, grammar: Grammar, random: Random, *, sequence_id: int = 0, max_tokens: int = 100
) -> Iterator[int]:
    """Random allowed tokens until the output is complete or a stop id is drawn."""
    yield from preferring(store, grammar, {}, random, sequence_id=sequence_id, max_tokens=max_tokens)


def preferring(
    store: GrammarStore,
    grammar: Grammar,
    weights: Mapping[int, float],
    random: Random,
    *,
    sequence_id: int = 0,
    max_tokens: int = 100,
) -> Iterator[int]:
    """As `walk`; of the allowed tokens one of the heaviest (0 where not given), at random among equals."""
    output_ids: list[int] = []
    while len(output_ids) < max_tokens:
        constraint = constraint_after(store, grammar, output_ids, sequence_id=sequence_id)
        allowed = allowed_ids(constraint)
        heaviest = max(weights.get(token_id, 0.0) for token_id in allowed)
        token_id = random.choice([id_ for id_ in allowed if weights.get(id_, 0.0) == heaviest])
        yield token_id
        if constraint.is_complete_after(token_id):
            return
        output_ids.append(token_id)


def text_of(token_ids: Sequence[int]) -> str:
    """What the ids read as."""
    vocabulary = small_vocabulary()
    return b"".join(map(vocabulary.bytes_of, token_ids)).decode(errors="replace")
