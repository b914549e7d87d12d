"""What becomes of a call: requests in token ids, with everything filled in that the core relies on."""

import secrets
from collections.abc import Sequence
from typing import TypeVar

from bakehouse_replica.core.errors import ContextTooLong, InvalidRequest
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import ReplicaCard, Request

from bakehouse_router.calls import GenerationOptions

Given = TypeVar("Given")


def scoped_salt(tenant: str, salt: str) -> str:
    """What separates this tenant's cached blocks, under its own salt, from everybody else's.

    Both parts are length-prefixed, so no two pairs read alike; neither of them is no salt at all.
    """
    return f"tenant:{len(tenant)}:{tenant}salt:{len(salt)}:{salt}" if tenant or salt else ""


def check_token_ids(token_ids: Sequence[int], param: str, n_vocabulary: int) -> None:
    """Raises `InvalidRequest` for ids that the model does not have."""
    if set(map(type, token_ids)) - {int}:
        wrong = next(token_id for token_id in token_ids if type(token_id) is not int)
        raise InvalidRequest(f"{param} contains {str(wrong)[:60]!r}, which is not a token id", param)
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < n_vocabulary):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < n_vocabulary)
        raise InvalidRequest(
            f"{param} contains the token id {wrong}; it must be between 0 and {n_vocabulary - 1}", param
        )


def _check_listed_ids(options: GenerationOptions, n_vocabulary: int) -> None:
    check_token_ids(options.stop_token_ids, "stop_token_ids", n_vocabulary)
    check_token_ids([token_id for token_id, _ in options.logit_bias], "logit_bias", n_vocabulary)
    check_token_ids(options.allowed_token_ids or (), "allowed_token_ids", n_vocabulary)
    for word in options.bad_words_ids:
        check_token_ids(word, "bad_words_ids", n_vocabulary)


def _n_output_tokens(options: GenerationOptions, n_prompt: int, prompt_field: str, limit: int) -> int:
    check_prompt_length(n_prompt, prompt_field, limit, options)
    if options.max_tokens is None:
        return limit - n_prompt
    if n_prompt + options.max_tokens > limit:
        raise ContextTooLong(
            f"this model's context is {limit} tokens; the prompt has {n_prompt} and {options.max_tokens_field} is "
            f"{options.max_tokens}, {n_prompt + options.max_tokens} together",
            options.max_tokens_field,
        )
    return options.max_tokens


def check_prompt_length(n_prompt: int, prompt_field: str, limit: int, options: GenerationOptions) -> None:
    """Raises `ContextTooLong` where no output of the least length asked for would fit after the prompt."""
    n_least = 0 if options.max_tokens == 0 else 1
    if n_prompt + n_least > limit:
        raise ContextTooLong(
            f"the prompt has {n_prompt} tokens; this model's context of {limit} tokens must hold it"
            + (" and at least one more" if n_least else ""),
            prompt_field,
        )


def _given(value: Given | None, default: Given) -> Given:
    return default if value is None else value


def _sampling_params(
    options: GenerationOptions,
    n_output: int,
    defaults: SamplingParams,
    card: ReplicaCard,
    bad_words_ids: tuple[tuple[int, ...], ...],
) -> SamplingParams:
    top_k = options.top_k if options.top_k is not None else defaults.top_k
    keeps_all = not top_k or top_k >= card.vocabulary_size
    eos_ids = () if options.ignore_eos else defaults.stop_token_ids
    return SamplingParams(
        n=_given(options.n, 1),
        max_tokens=n_output,
        min_tokens=_given(options.min_tokens, 0),
        temperature=_given(options.temperature, defaults.temperature),
        top_k=None if keeps_all else top_k,
        top_p=_given(options.top_p, defaults.top_p),
        min_p=_given(options.min_p, defaults.min_p),
        presence_penalty=_given(options.presence_penalty, defaults.presence_penalty),
        frequency_penalty=_given(options.frequency_penalty, defaults.frequency_penalty),
        repetition_penalty=_given(options.repetition_penalty, defaults.repetition_penalty),
        seed=_given(options.seed, secrets.randbits(63)),
        stop_token_ids=tuple(dict.fromkeys((*eos_ids, *options.stop_token_ids))),
        logprobs=options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
        logit_bias=options.logit_bias,
        allowed_token_ids=options.allowed_token_ids,
        bad_words_ids=(*options.bad_words_ids, *bad_words_ids),
        grammar=options.grammar,
    )


def build_request(
    *,
    request_id: str,
    prompt_ids: tuple[int, ...],
    prompt_field: str,
    options: GenerationOptions,
    defaults: SamplingParams,
    card: ReplicaCard,
    bad_words_ids: tuple[tuple[int, ...], ...] = (),
    timeout_s: float | None = None,
) -> Request:
    """The request for one prompt. Raises `InvalidRequest` naming the field that is wrong.

    `defaults`: the model's own sampling, its end-of-sequence ids among them as `stop_token_ids`. A request that
    gives no seed gets a random one, so that every replica would draw the same tokens for it. `timeout_s`: what is
    left of the options' own.
    """
    n_choices = _given(options.n, 1)
    if n_choices > card.max_sequences:  # the replica would say so too, but what each choice needs is made before
        raise InvalidRequest(f"n is {n_choices}; at most {card.max_sequences} sequences run at once here", "n")
    _check_listed_ids(options, card.vocabulary_size)
    n_output = _n_output_tokens(options, len(prompt_ids), prompt_field, card.max_model_len)
    return Request(
        request_id=request_id,
        prompt_ids=prompt_ids,
        params=_sampling_params(options, n_output, defaults, card, bad_words_ids),
        tenant=options.tenant,
        cache_salt=scoped_salt(options.tenant, options.cache_salt),
        priority=options.priority,
        timeout_s=timeout_s,
    )
