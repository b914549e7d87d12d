"""Request bodies to the gateway's own words."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bakehouse_replica.core.errors import InvalidRequest

from bakehouse_router.api.conversation import ToolChoice
from bakehouse_router.api.schema import (
    AnswerFields,
    ChatBody,
    ChatFields,
    CompletionBody,
    GenerationBody,
    TokenizeChatBody,
    TokenizeTextBody,
)
from bakehouse_router.calls import ChatCall, CompletionCall, GenerationOptions, ToolUse
from bakehouse_router.settings import GatewaySettings
from bakehouse_router.structured import grammar_field, grammar_of
from bakehouse_router.text.messages import Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a request says outside its body: `tenant`, by its key, and `timeout_s`, in a header."""

    tenant: str = ""
    timeout_s: float | None = None


NOWHERE = Origin()


def answer_options(
    body: AnswerFields, origin: Origin, *, max_tokens: int | None, max_tokens_field: str, logprobs: int | None
) -> GenerationOptions:
    """What the fields ask for that all routes share."""
    limits_s = [limit_s for limit_s in (body.timeout_s, origin.timeout_s) if limit_s is not None]
    return GenerationOptions(
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        stops=body.stop or (),
        stop_token_ids=body.stop_token_ids or (),
        keeps_stop=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        logit_bias=body.logit_bias or (),
        allowed_token_ids=body.allowed_token_ids,
        bad_words=body.bad_words or (),
        timeout_s=min(limits_s, default=None),
        user=body.user or "",
        tenant=origin.tenant,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )


def _options(
    body: GenerationBody,
    settings: GatewaySettings,
    origin: Origin,
    *,
    max_tokens: int | None,
    max_tokens_field: str,
    logprobs: int | None,
) -> GenerationOptions:
    _check_streaming(body)
    _check_best_of(body)
    shared = answer_options(
        body, origin, max_tokens=max_tokens, max_tokens_field=max_tokens_field, logprobs=logprobs
    )
    return replace(
        shared,
        n=body.n,
        prompt_logprobs=body.prompt_logprobs,
        grammar=grammar_of(body.response_format, body.structured_outputs, settings),
        grammar_field=grammar_field(body.structured_outputs),
        reports_tokens=bool(body.return_token_ids),
    )


def _check_streaming(body: GenerationBody) -> None:
    options = body.stream_options
    if options is None:
        return
    if not body.stream:
        raise InvalidRequest("stream_options is given; it is allowed only where stream is true", "stream_options")
    if options.continuous_usage_stats and not options.include_usage:
        raise InvalidRequest(
            "stream_options.continuous_usage_stats is true; it is allowed only where include_usage is true",
            "stream_options.continuous_usage_stats",
        )


def _check_best_of(body: GenerationBody) -> None:
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise InvalidRequest(
            f"best_of is {body.best_of} and n is {n}; they must be equal, as all answers are returned", "best_of"
        )


def _chat_max_tokens(body: ChatBody) -> tuple[int | None, str]:
    """`max_completion_tokens` is the newer name of `max_tokens`."""
    newer, older = body.max_completion_tokens, body.max_tokens
    if newer is not None and older is not None and newer != older:
        raise InvalidRequest(
            f"max_completion_tokens is {newer} and max_tokens is {older}; give one of them",
            "max_completion_tokens",
        )
    return (older, "max_tokens") if newer is None else (newer, "max_completion_tokens")


def logprobs_asked_for(top_logprobs: int | None, limit: int, *, are_shown: bool, shown_where: str) -> int | None:
    """The alternatives at each token, None where no log-probabilities are shown; `shown_where`: where they are."""
    n_top = top_logprobs or 0
    if n_top > limit:
        raise InvalidRequest(f"top_logprobs is {n_top}; it must be at most {limit}", "top_logprobs")
    if are_shown:
        return n_top
    if n_top:
        raise InvalidRequest(f"top_logprobs is {n_top}; it is allowed only where {shown_where}", "top_logprobs")
    return None


def tool_use_of(tools: Sequence[Tool], choice: ToolChoice | None, is_parallel: bool | None) -> ToolUse | None:
    """How the tools may be used; None where there are none. Raises `InvalidRequest` on contradictions."""
    names = Counter(tool.name for tool in tools)
    for name, count in names.items():
        if count > 1:
            raise InvalidRequest(f"tools has {count} functions of the name {name!r}; names must differ", "tools")
    chosen = choice or ToolChoice("auto")
    if not tools:
        if chosen.kind in ("required", "named"):
            raise InvalidRequest("tool_choice asks for a call; tools must be given then", "tool_choice")
        return None
    return ToolUse(
        tools=tuple(tools),
        choice=chosen.kind,
        name=chosen.name,
        is_parallel=is_parallel is not False,
    )


def _tools(body: ChatFields) -> tuple[Tool, ...]:
    return tuple(tool.tool() for tool in body.tools or ())


def _check_turns(body: ChatFields) -> None:
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt are both true; an answer either continues the last "
            "message or begins a new one",
            "continue_final_message",
        )


def _chat(body: ChatFields, model: str, options: GenerationOptions, tool_use: ToolUse | None) -> ChatCall:
    _check_turns(body)
    return ChatCall(
        model=model,
        messages=tuple(message.message() for message in body.messages),
        options=options,
        tool_use=tool_use,
        opens_answer=body.add_generation_prompt is not False and not body.continue_final_message,
        continues_last=bool(body.continue_final_message),
        template_variables=body.chat_template_kwargs or {},
    )


def chat_call(body: ChatBody, settings: GatewaySettings, origin: Origin = NOWHERE) -> ChatCall:
    """The call that a chat body asks for. Raises `InvalidRequest` where two of its fields contradict."""
    max_tokens, max_tokens_field = _chat_max_tokens(body)
    options = _options(
        body,
        settings,
        origin,
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        logprobs=logprobs_asked_for(
            body.top_logprobs,
            settings.max_logprobs,
            are_shown=bool(body.logprobs),
            shown_where="logprobs is true",
        ),
    )
    tool_use = tool_use_of(_tools(body), body.tool_choice, body.parallel_tool_calls)
    return _chat(body, body.model, options, tool_use)


def completion_call(body: CompletionBody, settings: GatewaySettings, origin: Origin = NOWHERE) -> CompletionCall:
    """The call that a completion body asks for. Raises `InvalidRequest` where two of its fields contradict."""
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise InvalidRequest(
            "max_tokens is 0; it must be at least 1 unless echo or prompt_logprobs ask for the prompt",
            "max_tokens",
        )
    options = _options(
        body,
        settings,
        origin,
        max_tokens=body.max_tokens,
        max_tokens_field="max_tokens",
        logprobs=body.logprobs,
    )
    return CompletionCall(model=body.model, prompts=body.prompt, options=options, echoes=bool(body.echo))


def tokenize_call(body: TokenizeTextBody | TokenizeChatBody, model: str) -> ChatCall | CompletionCall:
    """The call whose prompt is to be tokenised; `model` where the body names none."""
    model = body.model or model
    if isinstance(body, TokenizeChatBody):
        return _chat(body, model, GenerationOptions(), tool_use_of(_tools(body), None, None))
    return CompletionCall(model=model, prompts=(body.prompt,), options=GenerationOptions())
