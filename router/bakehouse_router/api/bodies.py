"""Request bodies to the gateway's own words."""

from bakehouse_replica.core.errors import InvalidRequest

from bakehouse_router.api.schema import ChatBody, CompletionBody, GenerationBody
from bakehouse_router.calls import ChatCall, CompletionCall, GenerationOptions
from bakehouse_router.text.messages import ChatMessage


def _options(body: GenerationBody, max_tokens: int | None, max_tokens_field: str) -> GenerationOptions:
    return GenerationOptions(
        n=body.n,
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
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        user=body.user or "",
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )


def chat_call(body: ChatBody) -> ChatCall:
    """The call that a chat body asks for; `max_completion_tokens` is the newer name of `max_tokens`."""
    newer, older = body.max_completion_tokens, body.max_tokens
    if newer is not None and older is not None and newer != older:
        raise InvalidRequest(
            f"max_completion_tokens is {newer} and max_tokens is {older}; give one of them",
            "max_completion_tokens",
        )
    field = "max_tokens" if newer is None else "max_completion_tokens"
    return ChatCall(
        model=body.model,
        messages=tuple(ChatMessage(role=message.role, content=message.content) for message in body.messages),
        options=_options(body, older if newer is None else newer, field),
    )


def completion_call(body: CompletionBody) -> CompletionCall:
    """The call that a completion body asks for."""
    return CompletionCall(
        model=body.model, prompts=body.prompt, options=_options(body, body.max_tokens, "max_tokens")
    )
