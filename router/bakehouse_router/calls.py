"""What a gateway is asked for, in its own words, and what becomes of it: requests in token ids.

Every entry (HTTP today) speaks in `Call`s, so that all of them check and fill in the same way.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from bakehouse_replica.core.errors import ContextTooLong, InvalidRequest
from bakehouse_replica.core.types import Grammar, ReplicaCard, Request, SamplingParams

from bakehouse_router.settings import GatewaySettings
from bakehouse_router.text.messages import ChatMessage, Tool

Given = TypeVar("Given")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How to generate; None takes the model's default. `top_k` 0 keeps the whole vocabulary.

    `max_tokens_field`: what the client called it, for error messages. `keeps_stop`: the text that ended a choice
    (stop string or the text of a stop id) stays in its output. `bad_words` are texts; the gateway encodes them.
    `reports_tokens`: the client wants to see token ids, so text is released token by token. `timeout_s` counts
    from the moment the call was received. `tenant` is who pays, by the key; `user` is what the client says.
    """

    n: int | None = None
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    keeps_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    grammar: Grammar | None = None
    reports_tokens: bool = False
    timeout_s: float | None = None
    user: str = ""
    tenant: str = ""
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a chat and which of them must be called.

    `choice`: `none`, `auto`, `required` (at least one of them), or `named` (the one tool `name`).
    """

    tools: tuple[Tool, ...]
    choice: Literal["none", "auto", "required", "named"] = "auto"
    name: str | None = None
    is_parallel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """Answer the last of these messages, or go on writing it where `continues_last`.

    `opens_answer`: the template writes the beginning of the assistant's turn. `template_variables` are passed to
    the template by name.
    """

    model: str
    messages: tuple[ChatMessage, ...]
    options: GenerationOptions
    tool_use: ToolUse | None = None
    opens_answer: bool = True
    continues_last: bool = False
    template_variables: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """Continue each of these prompts: text, or token ids. `echoes`: the answer begins with the prompt."""

    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    options: GenerationOptions
    echoes: bool = False


Call = ChatCall | CompletionCall


def check_bounds(call: Call, settings: GatewaySettings) -> None:
    """Raises `InvalidRequest` where the call asks for more than this gateway allows."""
    options = call.options
    if options.n is not None and options.n > settings.max_choices:
        raise InvalidRequest(f"n is {options.n}; it must be at most {settings.max_choices}", "n")
    if isinstance(call, CompletionCall) and len(call.prompts) > settings.max_prompts:
        raise InvalidRequest(
            f"prompt has {len(call.prompts)} prompts; the limit is {settings.max_prompts}", "prompt"
        )
    if len(options.stops) > settings.max_stops:
        raise InvalidRequest(f"stop has {len(options.stops)} strings; the limit is {settings.max_stops}", "stop")
    longest = max(map(len, options.stops), default=0)
    if longest > settings.max_stop_chars:
        raise InvalidRequest(
            f"stop has a string of {longest} characters; the limit is {settings.max_stop_chars}", "stop"
        )


def check_token_ids(token_ids: Sequence[int], param: str, n_vocabulary: int) -> None:
    """Raises `InvalidRequest` for ids that the model does not have."""
    for token_id in token_ids:
        if not 0 <= token_id < n_vocabulary:
            raise InvalidRequest(
                f"{param} contains the token id {token_id}; it must be between 0 and {n_vocabulary - 1}", param
            )


def _n_output_tokens(options: GenerationOptions, n_prompt: int, prompt_field: str, limit: int) -> int:
    if n_prompt >= limit:
        raise ContextTooLong(
            f"the prompt has {n_prompt} tokens; this model's context of {limit} tokens must hold it and at least "
            f"one more",
            prompt_field,
        )
    if options.max_tokens is None:
        return limit - n_prompt
    if n_prompt + options.max_tokens > limit:
        raise ContextTooLong(
            f"this model's context is {limit} tokens; the prompt has {n_prompt} and {options.max_tokens_field} is "
            f"{options.max_tokens}, {n_prompt + options.max_tokens} together",
            options.max_tokens_field,
        )
    return options.max_tokens


def _given(value: Given | None, default: Given) -> Given:
    return default if value is None else value


def _sampling_params(
    options: GenerationOptions, n_output: int, defaults: SamplingParams, card: ReplicaCard
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
    )


def build_request(
    *,
    request_id: str,
    prompt_ids: tuple[int, ...],
    prompt_field: str,
    options: GenerationOptions,
    defaults: SamplingParams,
    card: ReplicaCard,
) -> Request:
    """The request for one prompt. Raises `InvalidRequest` naming the field that is wrong.

    `defaults`: the model's own sampling, its end-of-sequence ids among them as `stop_token_ids`. A request that
    gives no seed gets a random one, so that every replica would draw the same tokens for it.
    """
    check_token_ids(options.stop_token_ids, "stop_token_ids", card.vocabulary_size)
    n_output = _n_output_tokens(options, len(prompt_ids), prompt_field, card.max_model_len)
    return Request(
        request_id=request_id,
        prompt_ids=prompt_ids,
        params=_sampling_params(options, n_output, defaults, card),
        tenant=options.tenant,
        cache_salt=options.cache_salt,
        priority=options.priority,
    )
