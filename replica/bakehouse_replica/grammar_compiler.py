r"""Compiles grammars over the bytes of a model's tokens, with limits on what a grammar may cost.

llguidance does the work. Routers compile to refuse a bad grammar before anything is queued, replicas to keep to a
good one; both by this module, so that they agree. No tensors here.

The end of an output is a token of its own behind the vocabulary, so that a matcher's states do not depend on which
ids a request stops at. No token is ever forced: a forced text would come out in one particular tokenization.

A Lark grammar with inline JSON schemas, as forced tool calls are written:

    start: "<tool_call>" call "</tool_call>"
    call: "{\"name\": \"add\", \"arguments\": " add "}"
    add: %json {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

Strings are quoted and escaped as in JSON. Special tokens, which no string produces, are `<[id]>`, or `<name>`
where their name has angle brackets.
"""

import logging
import re
from collections.abc import Callable
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from numpy.typing import NDArray

from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.sampling import Grammar, GrammarKind
from bakehouse_replica.grammar_text import LarkGrammar, read_lark, read_schema
from bakehouse_replica.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

# What a grammar may cost before it counts as broken. Measured with hostile grammars on one busy core, V = 49,152:
# compiling stays below 0.3 s, a mask below 0.25 s (`s: s s s | s s | "a" | "b"` after 90 tokens; 0.5 s by
# llguidance's own limits), and 20,000 lexer states take 8 MB. An object may have 500 optional properties.
LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    step_max_items=10_000,
    step_lexer_fuel=200_000,
    initial_lexer_fuel=1_000_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
# A grammar whose limits show after a few tokens is refused at once rather than in the middle of an answer.
_N_PROBED_TOKENS = 4
_MAX_REASON_CHARS = 300

# Set at the end, where it overrides what the grammar sets.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
_SPECIAL_MARKER = b"\xff"  # llguidance's: such tokens match no text
_MATCHES_NOTHING = "NoExtensionBias"  # llguidance's, where a grammar is empty from its first token on
_PLACE = re.compile(r"^at \d+\(\d+\): ")


class CompiledGrammar:
    """A grammar over one vocabulary. `producible`: bool[V], the tokens that it may use at all; read-only."""

    def __init__(self, template: LLMatcher, producible: NDArray[np.bool_]) -> None:
        self._template = template
        self.producible = producible

    def matcher(self) -> LLMatcher:
        """A matcher at the beginning of an output; it shares what it learns with the others of this grammar.

        Not to be called by two threads at once.
        """
        return self._template.deep_copy()


class GrammarCompiler:
    """Compiles for one model of `n_vocabulary` ids; safe in any number of threads.

    `load_vocabulary` is called at the first grammar. Ids without bytes there (special, or padding) are not text.
    `limits`: what compiling, a step, or the automaton of a grammar may cost.
    """

    def __init__(
        self, load_vocabulary: Callable[[], Vocabulary], n_vocabulary: int, *, limits: LLParserLimits = LIMITS
    ) -> None:
        self._limits = limits
        self.n_vocabulary = n_vocabulary
        self._load_vocabulary = load_vocabulary
        self._loading = Lock()
        self._loaded: _Tokens | None = None

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Takes milliseconds, for a hostile grammar up to a second. Raises `InvalidRequest` with the reason."""
        lark = _as_lark(grammar)
        tokens = self._tokens()
        template = LLMatcher(tokens.for_matchers, lark.text + _NO_FORCING, log_level=0, limits=self._limits)
        if template.is_error():
            raise InvalidRequest(explain(template, has_place=grammar.kind is GrammarKind.LARK))
        compiled = CompiledGrammar(template, tokens.producible(lark))
        self._probe(compiled)
        return compiled

    def _probe(self, compiled: CompiledGrammar) -> None:
        """Raises `InvalidRequest` where a grammar matches no text but the empty one, or breaks in a few tokens."""
        matcher = compiled.matcher()
        for n_tokens in range(_N_PROBED_TOKENS):
            usable = np.flatnonzero(
                unpack_mask(matcher.compute_bitmask(), self.n_vocabulary) & compiled.producible
            )
            if matcher.is_error():
                raise InvalidRequest(explain(matcher))
            if not len(usable):
                if n_tokens and matcher.is_accepting():
                    return
                raise InvalidRequest(
                    "the grammar matches no text that this model can write, or the empty one only"
                )
            matcher.consume_token(int(usable[len(usable) // 2]))

    def _tokens(self) -> "_Tokens":
        with self._loading:
            if self._loaded is None:
                self._loaded = _Tokens(self._load_vocabulary(), self.n_vocabulary)
            return self._loaded


def unpack_mask(packed: bytes, n_vocabulary: int) -> NDArray[np.bool_]:
    """bool[V] of a matcher's bitmask; without the token that stands for the end."""
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=n_vocabulary, bitorder="little")
    return bits.view(np.bool_)


class _Tokens:
    """A vocabulary as llguidance wants it."""

    def __init__(self, vocabulary: Vocabulary, n_vocabulary: int) -> None:
        spelled = [vocabulary.bytes_of(token_id) for token_id in range(n_vocabulary)]
        self._is_text = np.array([bool(content) for content in spelled])
        # Distinct names, as llguidance takes tokens of equal bytes for one.
        names = {token_id: vocabulary.name_of(token_id) for token_id in np.flatnonzero(~self._is_text).tolist()}
        self.for_matchers = LLTokenizer(TokenizerWrapper(_TokenBytes(spelled, names)))
        self._special_ids = {
            name: token_id for token_id, name in names.items() if vocabulary.special_id(name) == token_id
        }

    def producible(self, lark: LarkGrammar) -> NDArray[np.bool_]:
        """All text, and the special tokens that the grammar names; never padding.

        Not left to llguidance: there, the complement of a regex (`~`) matches special tokens too.
        """
        producible = self._is_text.copy()
        for name, token_id in self._special_ids.items():
            producible[token_id] = (
                lark.names_any_token
                or name in lark.special_names
                or any(token_id in token_ids for token_ids in lark.special_ids)
            )
        return producible


class _TokenBytes:
    """What `TokenizerWrapper` asks of a tokenizer. It makes the end's id itself where there is none."""

    eos_token_id = None
    bos_token_id = None

    def __init__(self, spelled: list[bytes], names: dict[int, str]) -> None:
        self.tokens = [
            _SPECIAL_MARKER + names[token_id].encode() if token_id in names else content
            for token_id, content in enumerate(spelled)
        ]
        self.special_token_ids = list(names)

    def __call__(self, text: bytes) -> list[int]:
        """Only needed to force text."""
        raise NotImplementedError("nothing is forced here")


def _as_lark(grammar: Grammar) -> LarkGrammar:
    match grammar.kind:
        case GrammarKind.LARK:
            return read_lark(grammar.text)
        case GrammarKind.JSON_SCHEMA:
            text = read_schema(grammar.text)
        case GrammarKind.REGEX:
            text = f"start: /{regex_to_lark(grammar.text, '')}/" if grammar.text else 'start: ""'
    return LarkGrammar(text=text, special_names=frozenset(), special_ids=(), names_any_token=False)


def explain(matcher: LLMatcher, *, has_place: bool = False) -> str:
    """Why a matcher has failed, in one line; `has_place`: its lines and columns are the client's own."""
    lines = matcher.get_error().splitlines()
    reason = lines[0] if lines else "unknown"
    if reason.endswith("parse error:"):  # the regex follows, and then what is wrong with it
        reason += next((line.removeprefix("error:") for line in lines if line.startswith("error:")), "")
    if reason == _MATCHES_NOTHING:
        reason = "it matches no text"
    elif reason.startswith("panic"):
        logger.warning("llguidance has panicked over a grammar: %s", reason)
        reason = "it uses what is not supported here"
    elif not has_place:
        reason = _PLACE.sub("", reason)
    return f"the grammar cannot be used: {reason[:_MAX_REASON_CHARS]}"
