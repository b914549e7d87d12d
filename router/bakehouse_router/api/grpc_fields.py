"""Requests of the gRPC face as the fields of the HTTP bodies that say the same: both are checked by one schema."""

from collections.abc import Iterable

from bakehouse_replica.core.errors import InvalidRequest
from google.protobuf.message import Message

from bakehouse_router.api.deltas import Kind
from bakehouse_router.api.json_body import parse_object
from bakehouse_router.proto.inference_pb2 import (
    Chat,
    ChatMessage,
    DetokenizeRequest,
    GenerateRequest,
    Prompt,
    TokenizeRequest,
    Tool,
)

Fields = dict[str, object]

# Fields of one name and type here and there.
_SCALARS = (
    "n", "best_of", "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "seed", "include_stop_str_in_output", "ignore_eos",
    "prompt_logprobs", "echo", "return_token_ids", "priority", "cache_salt", "user", "timeout_s",
)  # fmt: skip
_LISTS = ("stop", "stop_token_ids", "bad_words")
_JSON = ("response_format", "structured_outputs")
_CHAT_SCALARS = ("parallel_tool_calls", "add_generation_prompt", "continue_final_message")


def generate_fields(request: GenerateRequest) -> tuple[Kind, Fields]:
    """The body that asks for the same, and whose it is. Raises `InvalidRequest` where JSON text is not JSON.

    `logprobs` is what completions call it; of a chat it becomes `logprobs` and `top_logprobs`.
    """
    fields: Fields = _model(request.model) | {"stream": True, "stream_options": {"include_usage": True}}
    fields |= _given(request, _SCALARS) | _json_given(request, _JSON)
    fields |= {name: list(values) for name in _LISTS if (values := getattr(request, name))}
    if request.logit_bias:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in request.logit_bias.items()}
    if request.HasField("allowed_token_ids"):
        fields["allowed_token_ids"] = list(request.allowed_token_ids.ids)
    if request.HasField("continuous_usage_stats"):
        fields["stream_options"] = {
            "include_usage": True,
            "continuous_usage_stats": request.continuous_usage_stats,
        }
    if request.WhichOneof("input") == "chat":
        if request.HasField("logprobs"):
            fields |= {"logprobs": True, "top_logprobs": request.logprobs}
        return "chat", fields | _chat_fields(request.chat)
    if request.HasField("logprobs"):
        fields["logprobs"] = request.logprobs
    return "completion", fields | {"prompt": _prompt(request)}


def tokenize_fields(request: TokenizeRequest) -> tuple[Kind, Fields]:
    """The body of `/tokenize` that asks for the same."""
    fields = _model(request.model) | _given(request, ("add_special_tokens", "return_token_strs"))
    match request.WhichOneof("input"):
        case "text":
            return "completion", fields | {"prompt": request.text}
        case "chat":
            return "chat", fields | _chat_fields(request.chat)
    raise InvalidRequest("give one of text and chat", "input")


def detokenize_fields(request: DetokenizeRequest) -> Fields:
    """The body of `/detokenize` that asks for the same."""
    return _model(request.model) | {"tokens": list(request.token_ids)}


def _model(name: str) -> Fields:
    """Left out where it is not set: then it is the one that is served."""
    return {"model": name} if name else {}


def _given(message: Message, names: Iterable[str]) -> Fields:
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _json_given(message: Message, names: Iterable[str]) -> Fields:
    fields: Fields = {}
    for name in names:
        field = f"{name}_json"
        if message.HasField(field):
            try:
                fields[name] = parse_object(getattr(message, field).encode())
            except InvalidRequest as error:
                raise InvalidRequest(f"{field} cannot be read: {error.message}", field) from error
    return fields


def _prompt(request: GenerateRequest) -> object:
    match request.WhichOneof("input"):
        case "text":
            return request.text
        case "token_ids":
            return list(request.token_ids.ids)
        case "prompts":
            return [_one_prompt(prompt) for prompt in request.prompts.prompts]
    raise InvalidRequest("give one of text, token_ids, prompts and chat", "input")


def _one_prompt(prompt: Prompt) -> object:
    return prompt.text if prompt.WhichOneof("content") == "text" else list(prompt.token_ids.ids)


def _chat_fields(chat: Chat) -> Fields:
    fields: Fields = {"messages": [_message(message) for message in chat.messages]}
    fields |= _given(chat, _CHAT_SCALARS) | _json_given(chat, ("chat_template_kwargs",))
    if chat.tools:
        fields["tools"] = [_tool(tool) for tool in chat.tools]
    match chat.WhichOneof("tool_choice"):
        case "tool_choice_mode":
            fields["tool_choice"] = chat.tool_choice_mode
        case "tool_choice_function":
            fields["tool_choice"] = {"type": "function", "function": {"name": chat.tool_choice_function}}
    return fields


def _message(message: ChatMessage) -> Fields:
    fields: Fields = {"role": message.role} | _given(message, ("content", "name", "tool_call_id"))
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return fields


def _tool(tool: Tool) -> Fields:
    function = {"name": tool.name} | _given(tool, ("description", "strict")) | _json_given(tool, ("parameters",))
    return {"type": "function", "function": function}
