"""Prints what a grammar costs: to compile, and in each step of a batch of constrained sequences.

A step asks, for each sequence, what may follow and whether the drawn token completes its output, as the sampler
does. Tokens are drawn at random from what is allowed.

.venv/bin/python replica/benchmarks/grammar.py [--model smollm2] [--sequences 32] [--steps 100]
"""

import argparse
import json
from collections.abc import Sequence
from itertools import count
from random import Random
from statistics import mean
from time import perf_counter

import torch
from bakehouse_replica.core.sampling import Grammar, GrammarKind, SamplingParams
from bakehouse_replica.core.types import ModelSource, Sample
from bakehouse_replica.grammar_compiler import GrammarCompiler
from bakehouse_replica.model.grammar import GrammarStore
from bakehouse_replica.source import open_source
from bakehouse_replica.tokenizer_files import load_tokenizer
from bakehouse_replica.vocabulary import Vocabulary, vocabulary_of

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "blue"]}, "maxItems": 5},
        "address": {"type": "object", "properties": {"street": {"type": "string"}}, "required": ["street"]},
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
_WORDS = " | ".join(f'"word {index * 7919:x}"' for index in range(1_000))

GRAMMARS = {
    "any JSON object": Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type": "object"}'),
    "JSON of a person": Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(_PERSON)),
    "date by regex": Grammar(kind=GrammarKind.REGEX, text=r"[0-9]{4}-[0-9]{2}-[0-9]{2}( [a-z]+)*"),
    "one of 1,000 texts": Grammar(kind=GrammarKind.LARK, text=f"start: A\nA: {_WORDS}"),
    "ambiguous sums": Grammar(kind=GrammarKind.LARK, text='start: s\ns: s "+" s | /[0-9]+/'),
}


class _Sequences:
    """Sequences of one grammar that go on for ever: what is complete begins again under a new id."""

    def __init__(self, store: GrammarStore, grammar: Grammar, n_sequences: int, n_vocabulary: int) -> None:
        self._store = store
        self._params = SamplingParams(grammar=grammar, stop_token_ids=(2,), seed=0)
        self._n_vocabulary = n_vocabulary
        self._new_ids = count()
        self._outputs: dict[int, tuple[int, ...]] = {next(self._new_ids): () for _ in range(n_sequences)}
        self._random = Random(1)

    def step(self) -> float:
        """Seconds that a step of all sequences takes, drawing left out."""
        elapsed_s = 0.0
        for sequence_id, output_ids in list(self._outputs.items()):
            sample = Sample(params=self._params, seeds=(0,), output_index=len(output_ids), output_ids=output_ids)
            begun_at = perf_counter()
            constraint = self._store.constraint(sequence_id, sample)
            assert constraint is not None
            allowed_V = constraint.allowed(self._n_vocabulary)
            elapsed_s += perf_counter() - begun_at
            token_id = self._random.choice(torch.nonzero(allowed_V).flatten().tolist())
            begun_at = perf_counter()
            is_complete = constraint.is_complete_after(token_id)
            elapsed_s += perf_counter() - begun_at
            if is_complete:
                del self._outputs[sequence_id]
                self._outputs[next(self._new_ids)] = ()
            else:
                self._outputs[sequence_id] = (*output_ids, token_id)
        return elapsed_s


def _measure(vocabulary: Vocabulary, n_vocabulary: int, name: str, n_sequences: int, n_steps: int) -> str:
    compiler = GrammarCompiler(lambda: vocabulary, n_vocabulary)
    compiler.compile(Grammar(kind=GrammarKind.REGEX, text="warm"))  # loads the vocabulary
    store = GrammarStore(compiler)
    begun_at = perf_counter()
    store.prepare(SamplingParams(grammar=GRAMMARS[name]))
    compile_ms = 1e3 * (perf_counter() - begun_at)
    sequences = _Sequences(store, GRAMMARS[name], n_sequences, n_vocabulary)
    steps_ms = [1e3 * sequences.step() for _ in range(n_steps)]
    return f"{name:20} {compile_ms:10.1f} {mean(steps_ms):10.2f} {max(steps_ms):10.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one line for each grammar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(arguments)
    begun_at = perf_counter()
    vocabulary = vocabulary_of(load_tokenizer(open_source(ModelSource(model=options.model))).backend_tokenizer)
    loaded_at = perf_counter()
    n_vocabulary = vocabulary.n_tokens
    GrammarCompiler(lambda: vocabulary, n_vocabulary).compile(GRAMMARS["date by regex"])
    print(
        f"{n_vocabulary} tokens: tokenizer loaded in {loaded_at - begun_at:.2f} s, first grammar in "
        f"{perf_counter() - loaded_at:.2f} s; {options.sequences} sequences, {options.steps} steps"
    )
    print(f"{'grammar':20} {'compile ms':>10} {'step ms':>10} {'worst ms':>10}")
    for name in GRAMMARS:
        print(_measure(vocabulary, n_vocabulary, name, options.sequences, options.steps))


if __name__ == "__main__":
    main()
