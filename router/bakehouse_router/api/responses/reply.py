"""The response object: what the body asked for, what has come of it so far, and its status."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bakehouse_replica.core.sampling import SamplingParams

from bakehouse_router.api.conversation import ToolChoice
from bakehouse_router.api.errors import Problem
from bakehouse_router.api.responses.body import ResponseBody, TextFormatBody
from bakehouse_router.api.token_json import Json
from bakehouse_router.generation import CallUsage

Status = Literal["in_progress", "completed", "incomplete", "failed"]

_TOO_LONG = {"reason": "max_output_tokens"}


def _tool_choice_json(choice: ToolChoice) -> Json | str:
    return {"type": "function", "name": choice.name} if choice.kind == "named" else choice.kind


def echo_of(body: ResponseBody) -> Json:
    """The fields of the body that its reply repeats, with what they mean where they were not given."""
    text_format = body.text.format if body.text else None
    if text_format is None:
        text_format = TextFormatBody(type="text")
    return {
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "text": {
            "format": text_format.model_dump(by_alias=True, exclude_none=True),
            "verbosity": "medium",
        },
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "tool_choice": _tool_choice_json(body.tool_choice or ToolChoice("auto")),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "max_output_tokens": body.max_output_tokens,
        "top_logprobs": body.top_logprobs or 0,
        "user": body.user,
    }


def usage_json(usage: CallUsage) -> Json:
    """Token counts as this API gives them. Reasoning is not told apart, writing to the cache not counted."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def error_json(problem: Problem) -> Json:
    """An error as part of a response, which knows a few codes only; the event before it has ours."""
    match problem.status:
        case 429:
            code = "rate_limit_exceeded"
        case 400 | 413:
            code = "invalid_prompt"
        case _:
            code = "server_error"
    return {"code": code, "message": problem.message}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """What a response says of itself from its beginning to its end. `echo`: what its body asked for."""

    response_id: str
    created_at: int
    model: str
    temperature: float
    top_p: float
    echo: Json

    def response(
        self,
        status: Status,
        output: Sequence[Json],
        *,
        usage: CallUsage | None = None,
        completed_at: int | None = None,
        problem: Problem | None = None,
    ) -> Json:
        """The object, with the items so far."""
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "background": False,
            "completed_at": completed_at,
            "error": None if problem is None else error_json(problem),
            "incomplete_details": _TOO_LONG if status == "incomplete" else None,
            "model": self.model,
            "output": list(output),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else usage_json(usage),
            **self.echo,
        }


def head_of(
    body: ResponseBody, echo: Json, defaults: SamplingParams, *, response_id: str, created_at: int, model: str
) -> ResponseHead:
    """The head of a body's response; `defaults`: how the model samples where the body does not say."""
    return ResponseHead(
        response_id=response_id,
        created_at=created_at,
        model=model,
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        echo=echo,
    )
