"""How to choose output tokens, and what a whole output must match: checked, frozen, in token ids."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeGuard

from bakehouse_replica.core.errors import InvalidRequest


def require(condition: bool, param: str, value: object, limit: str) -> None:
    """Raises `InvalidRequest` that names parameter, value and limit unless the condition holds."""
    if not condition:
        raise InvalidRequest(f"{param} is {value!r}; it must be {limit}", param)


MAX_BIAS = 100.0  # of `logit_bias`, either way; OpenAI's limit
_INTEGERS = ("n", "min_tokens")
_OPTIONAL_INTEGERS = ("max_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")
_TUPLES = ("stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words_ids")
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def _check_types(params: "SamplingParams") -> None:
    for name in (*_INTEGERS, *_OPTIONAL_INTEGERS):
        value = getattr(params, name)
        is_right = _is_integer(value) or (value is None and name in _OPTIONAL_INTEGERS)
        require(is_right, name, value, "an integer")
    for name in _NUMBERS:
        value = getattr(params, name)
        require(_is_integer(value) or isinstance(value, float), name, value, "a number")
    for name in _TUPLES:
        value = getattr(params, name)
        is_left_out = value is None and name == "allowed_token_ids"
        require(isinstance(value, tuple) or is_left_out, name, value, "a tuple")
    are_pairs = all(isinstance(pair, tuple) and len(pair) == 2 for pair in params.logit_bias)
    require(are_pairs, "logit_bias", params.logit_bias, "pairs of a token id and a number")
    is_grammar = params.grammar is None or isinstance(params.grammar, Grammar)
    require(is_grammar, "grammar", params.grammar, "a Grammar")


def _check_ranges(params: "SamplingParams") -> None:
    require(params.n >= 1, "n", params.n, "at least 1")
    require(params.max_tokens is None or params.max_tokens >= 0, "max_tokens", params.max_tokens, "at least 0")
    require(params.min_tokens >= 0, "min_tokens", params.min_tokens, "at least 0")
    require(
        params.max_tokens is None or params.min_tokens <= params.max_tokens,
        "min_tokens",
        params.min_tokens,
        f"at most max_tokens ({params.max_tokens})",
    )
    require(0.0 <= params.temperature <= 100.0, "temperature", params.temperature, "between 0 and 100")
    require(params.top_k is None or params.top_k >= 1, "top_k", params.top_k, "at least 1")
    require(0.0 < params.top_p <= 1.0, "top_p", params.top_p, "above 0 and at most 1")
    require(0.0 <= params.min_p <= 1.0, "min_p", params.min_p, "between 0 and 1")
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        require(-2.0 <= value <= 2.0, name, value, "between -2 and 2")
    require(
        0.01 <= params.repetition_penalty <= 10.0,  # logits divided by less leave float32's range
        "repetition_penalty",
        params.repetition_penalty,
        "between 0.01 and 10",
    )
    is_seed = params.seed is None or -(2**63) <= params.seed < 2**63
    require(is_seed, "seed", params.seed, "a signed 64-bit integer")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        require(value is None or value >= 0, name, value, "at least 0")


def _check_token_ids(params: "SamplingParams") -> None:
    require(
        all(map(_is_token_id, params.stop_token_ids)),
        "stop_token_ids",
        params.stop_token_ids,
        "non-negative token ids",
    )
    require(
        all(_is_token_id(token) and _is_bias(bias) for token, bias in params.logit_bias),
        "logit_bias",
        params.logit_bias,
        f"non-negative token ids with numbers between {-MAX_BIAS:g} and {MAX_BIAS:g}",
    )
    allowed = params.allowed_token_ids
    require(
        allowed is None or (bool(allowed) and all(map(_is_token_id, allowed))),
        "allowed_token_ids",
        allowed,
        "at least one non-negative token id",
    )
    require(
        all(word and all(map(_is_token_id, word)) for word in params.bad_words_ids),
        "bad_words_ids",
        params.bad_words_ids,
        "non-empty sequences of non-negative token ids",
    )


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_bias(value: object) -> bool:
    return (_is_integer(value) or isinstance(value, float)) and -MAX_BIAS <= value <= MAX_BIAS


def _is_token_id(value: object) -> bool:
    return _is_integer(value) and value >= 0


class GrammarKind(StrEnum):
    """In what a grammar is written."""

    JSON_SCHEMA = "json_schema"  # a JSON schema, as JSON
    REGEX = "regex"
    LARK = "lark"  # llguidance's dialect of Lark


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What the whole output must match."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose output tokens. Raises `InvalidRequest` (a `ValueError`) naming the field and its limit.

    `temperature` 0 is greedy. `top_k` None and `top_p` 1 keep the whole vocabulary. `seed` is filled by
    whoever builds the `Request`, so it is always an int in the core. `stop_token_ids` end a choice and belong
    to its output ids; the model's end-of-sequence ids are merged in by whoever builds the `Request`, unless
    the user ignores them. No stop id is sampled before `min_tokens`. `repetition_penalty` counts prompt and
    output, the other two count output only. `max_tokens` 0 computes the prompt and draws nothing.

    `logprobs`: with each output token its log-probability, and those of so many best tokens; `prompt_logprobs`
    the same for each prompt token but the first. Both are the model's own, before any of the adjustments here.
    `logit_bias`: (token id, what is added to its logit). `allowed_token_ids`: nothing else is drawn, except stop
    ids. `bad_words_ids`: sequences of ids, the last of which is never drawn where it would complete one within
    the output. `grammar` constrains the output as a whole; where nothing may follow any more, the choice ends
    with `STOP`.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        _check_ranges(self)
        _check_token_ids(self)

    @property
    def has_penalties(self) -> bool:
        """Whether the sampler needs the ids of prompt and output."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def needs_output(self) -> bool:
        """Whether the sampler needs the ids generated so far."""
        return self.has_penalties or self.grammar is not None or bool(self.bad_words_ids)
