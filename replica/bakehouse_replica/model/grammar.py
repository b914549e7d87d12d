"""Keeps outputs to their grammars: one matcher for each running sequence, over grammars compiled beforehand.

A matcher's state follows from the output's token ids alone. It is moved to the ids that it is asked about: forward
where they go on, back where they fork off, from the beginning where nobody remembers it. So a sequence that has
been preempted, resumed, forked or forgotten goes on as any other.

Shape legend: V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.sampling import Grammar, SamplingParams
from bakehouse_replica.core.types import Sample
from bakehouse_replica.grammar_compiler import CompiledGrammar, GrammarCompiler, explain, unpack_mask
from bakehouse_replica.model.constraint import Constraint, ConstraintFailure
from bakehouse_replica.recently_used import RecentlyUsed

MAX_GRAMMARS = 64  # one of 20,000 lexer states takes 8 MB; most have some hundreds
MAX_MATCHERS = 1024  # more than a step has sequences, so that only what has ended is forgotten


class GrammarStore:
    """A `ConstraintSource`: `prepare` in any thread, `constraint` and what comes of it in one."""

    def __init__(
        self, compiler: GrammarCompiler, *, max_grammars: int = MAX_GRAMMARS, max_matchers: int = MAX_MATCHERS
    ) -> None:
        self._compiler = compiler
        self._grammars: RecentlyUsed[Grammar, CompiledGrammar] = RecentlyUsed(max_grammars)
        self._lock = Lock()
        self._runs: RecentlyUsed[int, _Run] = RecentlyUsed(max_matchers)

    def prepare(self, params: SamplingParams) -> None:
        """Compiles the grammar, unless it is compiled already. Raises `InvalidRequest`."""
        if params.grammar is not None:
            self._compiled(params.grammar)

    def constraint(self, sequence_id: int, sample: Sample) -> Constraint | None:
        """The constraint after `sample.output_ids`; None without a grammar. Raises `ConstraintFailure`."""
        grammar = sample.params.grammar
        if grammar is None:
            return None
        run = self._runs.find(sequence_id)
        if run is None or run.grammar != grammar:
            run = _Run(grammar, self._compiled)
            self._runs.keep(sequence_id, run)
        return _GrammarConstraint(run, sample)

    def _compiled(self, grammar: Grammar, broken: CompiledGrammar | None = None) -> CompiledGrammar:
        """The grammar, compiled now where it is not at hand, or is only as `broken`. Raises `InvalidRequest`."""
        with self._lock:
            compiled = self._grammars.find(grammar)
        if compiled is None or compiled is broken:
            compiled = self._compiler.compile(grammar)
            with self._lock:
                self._grammars.keep(grammar, compiled)
        return compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """What may follow an output: `usable_V` (bool[V]) to go on, and whether it may end here."""

    usable_V: NDArray[np.bool_]
    may_end: bool

    @property
    def is_complete(self) -> bool:
        return self.may_end and not self.usable_V.any()


class _Run:
    """One sequence's way through its grammar.

    `compiled(grammar, broken)`: the compiled grammar, a new one instead of `broken`.
    """

    def __init__(
        self, grammar: Grammar, compiled: Callable[[Grammar, CompiledGrammar | None], CompiledGrammar]
    ) -> None:
        self.grammar = grammar
        self._compile = compiled
        self._begin(None)

    def state_after(self, output_ids: tuple[int, ...]) -> _State:
        """What may follow these ids. Raises `ConstraintFailure`."""
        if self._state is not None and self._output_ids == output_ids:
            return self._state
        try:
            return self._look(output_ids)
        except ConstraintFailure:
            # The automaton grows as outputs of this grammar explore it, and its size is limited. So a failure may
            # be the others'; with a new automaton it is this output's own.
            self._begin(self._compiled)
            return self._look(output_ids)

    def _begin(self, broken: CompiledGrammar | None) -> None:
        try:
            self._compiled = self._compile(self.grammar, broken)
        except InvalidRequest as error:
            raise ConstraintFailure(str(error)) from error
        self._restart()

    def _restart(self) -> None:
        self._matcher = self._compiled.matcher()
        self._output_ids: tuple[int, ...] = ()
        self._state: _State | None = None

    def _look(self, output_ids: tuple[int, ...]) -> _State:
        self._move_to(output_ids)
        if self._matcher.is_stopped():
            self._state = _State(usable_V=np.zeros_like(self._compiled.producible), may_end=True)
            return self._state
        packed = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise ConstraintFailure(explain(self._matcher))
        usable_V = unpack_mask(packed, len(self._compiled.producible)) & self._compiled.producible
        self._state = _State(usable_V=usable_V, may_end=self._matcher.is_accepting())
        return self._state

    def _move_to(self, output_ids: tuple[int, ...]) -> None:
        n_common = _n_common(self._output_ids, output_ids)
        n_back = len(self._output_ids) - n_common
        if n_back and not self._matcher.rollback(n_back):  # a grammar with `max_tokens` cannot
            self._restart()
            n_common = 0
        self._output_ids, self._state = output_ids, None
        if not self._matcher.consume_tokens(list(output_ids[n_common:])):
            raise ConstraintFailure(explain(self._matcher))


class _GrammarConstraint:
    """A `Constraint`: one sequence's grammar after the output of one sample."""

    def __init__(self, run: _Run, sample: Sample) -> None:
        self._run = run
        self._output_ids = sample.output_ids
        self._stop_ids = list(sample.params.stop_token_ids)

    def allowed(self, n_vocabulary: int) -> Tensor:
        """bool[V]. A stop id is an end and nothing else, even where its text would match."""
        state = self._run.state_after(self._output_ids)
        assert len(state.usable_V) == n_vocabulary, f"a mask of {len(state.usable_V)} for {n_vocabulary} logits"
        allowed_V = state.usable_V.copy()
        allowed_V[self._stop_ids] = state.may_end
        if not state.may_end and not allowed_V.any():
            raise ConstraintFailure("the grammar allows no token here but stop tokens, and no end")
        return torch.from_numpy(allowed_V)

    def is_complete_after(self, token_id: int) -> bool:
        """Whether nothing but an end may follow. What is computed for the answer serves the next token."""
        if token_id in self._stop_ids:
            return True
        return self._run.state_after((*self._output_ids, token_id)).is_complete


def _n_common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """With how many equal ids both begin."""
    if left == right[: len(left)]:
        return len(left)
    return next((index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), len(right))
