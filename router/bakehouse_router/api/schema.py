"""What a client may send: the OpenAI request bodies, strictly typed; every field here has an effect.

Ranges that belong to sampling are checked by `SamplingParams`, which every entry shares. The fields of
`AcceptedForClients` are those that clients send although they ask for what happens anyway.
"""

from typing import Annotated

from pydantic import Field

from bakehouse_router.api.conversation import ChatMessageBody, ToolBody, ToolChoiceField
from bakehouse_router.api.fields import (
    MAX_MESSAGES,
    BadWords,
    Count,
    JsonObject,
    LogitBias,
    Name,
    OneOrMore,
    Only,
    Prompts,
    SomeTokenIds,
    Stops,
    Strict,
    TokenIds,
)
from bakehouse_router.calls import MAX_TIMEOUT_S


class StreamOptions(Strict):
    """What a stream carries besides its text: token counts at its end, and with each chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class AcceptedForClients(Strict):
    """Fields that are accepted with the value that has no effect, and refused with any other."""

    store: Annotated[None, Only(False, because="it must be false: answers are not stored here")] = None
    metadata: Annotated[None, Only({}, because="it must be empty: answers are not stored here")] = None
    service_tier: Annotated[
        None, Only("auto", "default", because='it must be "auto" or "default": there is one tier')
    ] = None
    skip_special_tokens: Annotated[
        None, Only(True, because="it must be true: special tokens are no text; return_token_ids shows them")
    ] = None


class AnswerFields(Strict):
    """How an answer is generated; all routes that generate have these fields."""

    model: str
    min_tokens: Count | None = None
    temperature: float | None = None
    top_k: Count | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias | None = None
    bad_words: BadWords | None = None
    allowed_token_ids: SomeTokenIds | None = None
    seed: int | None = None
    stop: Stops | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    user: Name | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Name | None = None
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None


class GenerationBody(AcceptedForClients, AnswerFields):
    """The fields that chats and completions share."""

    max_tokens: OneOrMore | None = None
    n: OneOrMore | None = None
    best_of: OneOrMore | None = None
    prompt_logprobs: Count | None = None
    return_token_ids: bool | None = None
    response_format: JsonObject | None = None
    structured_outputs: JsonObject | None = None
    stream_options: StreamOptions | None = None


class ChatFields(Strict):
    """What a conversation consists of."""

    messages: Annotated[list[ChatMessageBody], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: Annotated[list[ToolBody], Field(fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None


class ChatBody(ChatFields, GenerationBody):
    """The body of `/v1/chat/completions`."""

    max_completion_tokens: OneOrMore | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    modalities: Annotated[None, Only(["text"], because='it must be ["text"]: answers are text')] = None
    verbosity: Annotated[None, Only("medium", because='it must be "medium": nothing else is known here')] = None
    reasoning_effort: Annotated[
        None, Only(because="it must be null; a template that knows it is given it by chat_template_kwargs")
    ] = None
    functions: Annotated[None, Only(because="this older form is not supported; use tools")] = None
    function_call: Annotated[None, Only(because="this older form is not supported; use tool_choice")] = None
    audio: Annotated[None, Only(because="it must be null: answers are text")] = None
    prediction: Annotated[None, Only(because="it must be null: predicted outputs are not supported")] = None
    web_search_options: Annotated[None, Only(because="it must be null: nothing is searched here")] = None


class CompletionBody(GenerationBody):
    """The body of `/v1/completions`. `max_tokens` may be 0 where `echo` or `prompt_logprobs` shows the prompt."""

    prompt: Prompts
    max_tokens: Count | None = None
    logprobs: Count | None = None
    echo: bool | None = None
    suffix: Annotated[None, Only("", because="it must be null: text is not inserted between two others")] = None


class TokenizeTextBody(Strict):
    """The body of `/tokenize` for a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(ChatFields):
    """The body of `/tokenize` for a conversation, whose special tokens come from the template alone."""

    model: str | None = None
    add_special_tokens: Annotated[
        None, Only(False, because="it must be false: the chat template writes the special tokens")
    ] = None
    return_token_strs: bool | None = None


class DetokenizeBody(Strict):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: TokenIds
