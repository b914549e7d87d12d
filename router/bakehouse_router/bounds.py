"""How much a call may ask for: every list and number of it against this gateway's settings, before any work."""

from collections.abc import Sequence

from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.sampling import MAX_BIAS
from bakehouse_replica.grammar_text import OPTIONS_KEY

from bakehouse_router.calls import MAX_TIMEOUT_S, Call, ChatCall, CompletionCall, GenerationOptions, ToolUse
from bakehouse_router.settings import GatewaySettings
from bakehouse_router.structured import schema_text
from bakehouse_router.text.messages import Tool

_MAX_LABEL_CHARS = 256
_PRIORITY_LIMIT = 2**31
# Tokens and alternatives of prompts that one reply may show: 16 MB of JSON in an echo, 41 MB as `prompt_logprobs`
# (SmolLM2), all made at once. A prompt of 131,072 tokens with two alternatives to each has fewer.
MAX_PROMPT_ENTRIES = 500_000


def check_bounds(call: Call, settings: GatewaySettings) -> None:
    """Raises `InvalidRequest` where the call asks for more than this gateway allows; names field, value, limit."""
    options = call.options
    _check_numbers(options, settings)
    _check_stops(options, settings)
    _check_listed_tokens(options, settings)
    _check_labels(options)
    if isinstance(call, CompletionCall):
        if not call.prompts or not all(call.prompts):
            raise InvalidRequest("prompt is empty; it must have at least one token", "prompt")
        _check_count(len(call.prompts), settings.max_prompts, "prompt", "prompts")
    elif not call.messages:
        raise InvalidRequest("messages is empty; it must have at least one message", "messages")
    elif call.tool_use is not None:
        _check_tools(call, call.tool_use, settings)


def check_bad_words(bad_words: Sequence[Sequence[int]], settings: GatewaySettings) -> None:
    """Raises `InvalidRequest` where the words, once encoded, are more than this gateway allows."""
    n_tokens = sum(map(len, bad_words))
    if n_tokens > settings.max_listed_tokens:
        raise InvalidRequest(
            f"bad_words are {n_tokens} tokens, each word by itself and after a space; the limit is "
            f"{settings.max_listed_tokens}",
            "bad_words",
        )


def check_prompt_report(call: Call, prompts: Sequence[Sequence[int]]) -> None:
    """Raises `InvalidRequest` where the reply would show more of the prompts, once encoded, than any may.

    Each choice of a completion shows its prompt anew, those of a chat have one in common.
    """
    options, is_completion = call.options, isinstance(call, CompletionCall)
    per_token = {"return_token_ids": int(options.reports_tokens)}
    if options.prompt_logprobs is not None:
        per_token["prompt_logprobs"] = 1 + options.prompt_logprobs
    if isinstance(call, CompletionCall) and call.echoes:
        per_token["echo"] = 1 if options.logprobs is None else 1 + options.logprobs
    n_tokens, n_times = sum(map(len, prompts)), (options.n or 1) if is_completion else 1
    n_entries = n_tokens * n_times * sum(per_token.values())
    if n_entries > MAX_PROMPT_ENTRIES:
        param = max(per_token, key=per_token.__getitem__)
        raise InvalidRequest(
            f"{param}: the reply would show {n_entries} tokens and alternatives of prompts ({n_tokens} tokens, "
            f"{n_times} times); the limit is {MAX_PROMPT_ENTRIES}",
            param,
        )


def _check_count(n_given: int, limit: int, param: str, what: str) -> None:
    if n_given > limit:
        raise InvalidRequest(f"{param} has {n_given} {what}; the limit is {limit}", param)


def _check_between(value: float, least: float, most: float, param: str) -> None:
    if not least <= value <= most:  # also where it is no number
        raise InvalidRequest(f"{param} is {value}; it must be between {least:g} and {most:g}", param)


def _check_text(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param} contains half of a surrogate pair, which is not text", param) from error


def _check_numbers(options: GenerationOptions, settings: GatewaySettings) -> None:
    if options.n is not None and options.n > settings.max_choices:
        raise InvalidRequest(f"n is {options.n}; it must be at most {settings.max_choices}", "n")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(options, name)
        if value is not None:
            _check_between(value, 0, settings.max_logprobs, name)
    if options.timeout_s is not None and not 0 < options.timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequest(
            f"timeout_s is {options.timeout_s}; it must be above 0 and at most {MAX_TIMEOUT_S:g}", "timeout_s"
        )
    if not -_PRIORITY_LIMIT <= options.priority < _PRIORITY_LIMIT:
        raise InvalidRequest(f"priority is {options.priority}; it must be a signed 32-bit integer", "priority")


def _check_stops(options: GenerationOptions, settings: GatewaySettings) -> None:
    _check_count(len(options.stops), settings.max_stops, "stop", "strings")
    for param, texts in (("stop", options.stops), ("bad_words", options.bad_words)):
        if not all(text.strip() if param == "bad_words" else text for text in texts):
            least = "one character that is no white space" if param == "bad_words" else "one character"
            raise InvalidRequest(f"{param} has an empty string; each must have at least {least}", param)
        for text in texts:
            _check_text(text, param)
        longest = max(map(len, texts), default=0)
        if longest > settings.max_stop_chars:
            raise InvalidRequest(
                f"{param} has a string of {longest} characters; the limit is {settings.max_stop_chars}", param
            )


def _check_listed_tokens(options: GenerationOptions, settings: GatewaySettings) -> None:
    limit = settings.max_listed_tokens
    _check_count(len(options.logit_bias), limit, "logit_bias", "tokens")
    _check_count(len(options.stop_token_ids), limit, "stop_token_ids", "tokens")
    _check_count(len(options.bad_words), limit, "bad_words", "strings")
    if options.allowed_token_ids is not None:
        _check_count(len(options.allowed_token_ids), limit, "allowed_token_ids", "tokens")
        if not options.allowed_token_ids:
            raise InvalidRequest(
                "allowed_token_ids is empty; it must have at least one token", "allowed_token_ids"
            )
    for token_id, bias in options.logit_bias:
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidRequest(
                f"logit_bias of the token {token_id} is {bias}; it must be between {-MAX_BIAS:g} and {MAX_BIAS:g}",
                "logit_bias",
            )


def _check_labels(options: GenerationOptions) -> None:
    for param, label in (("user", options.user), ("cache_salt", options.cache_salt)):
        _check_text(label, param)
        if len(label) > _MAX_LABEL_CHARS:
            raise InvalidRequest(f"{param} has {len(label)} characters; the limit is {_MAX_LABEL_CHARS}", param)


def _check_tools(call: ChatCall, tool_use: ToolUse, settings: GatewaySettings) -> None:
    if not tool_use.tools:
        raise InvalidRequest("tools is empty; it must have at least one tool", "tools")
    _check_count(len(tool_use.tools), settings.max_tools, "tools", "tools")
    for index, tool in enumerate(tool_use.tools):
        _check_parameters(tool, f"tools[{index}].function.parameters", settings)
    names = {tool.name for tool in tool_use.tools}
    if tool_use.choice == "named" and tool_use.name not in names:
        raise InvalidRequest(f"tool_choice names {tool_use.name!r}, which is not among the tools", "tool_choice")
    if call.options.grammar is not None and tool_use.choice != "none":
        raise InvalidRequest(
            f"{call.options.grammar_field} and tools are both given; a constrained answer cannot call tools: "
            f"leave one of them out, or say tool_choice 'none'",
            call.options.grammar_field,
        )


def _check_parameters(tool: Tool, param: str, settings: GatewaySettings) -> None:
    schema_text(tool.parameters, param, settings)
    if OPTIONS_KEY in tool.parameters:
        raise InvalidRequest(f"{param} has {OPTIONS_KEY!r}, which is set here", f"{param}.{OPTIONS_KEY}")
    kind = tool.parameters.get("type", "object")
    if kind != "object":
        raise InvalidRequest(f"{param} has the type {kind!r}; arguments are always an 'object'"[:300], param)
