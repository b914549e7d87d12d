"""The deltas of an answer as messages of the gRPC face."""

from bakehouse_replica.core.types import TokenLogprob

from bakehouse_router.generation import CallUsage
from bakehouse_router.handle_messages import Delta
from bakehouse_router.prompt_run import PromptReport
from bakehouse_router.proto import inference_pb2 as pb


def generate_reply(delta: Delta, request: pb.GenerateRequest) -> pb.GenerateReply:
    """The message that tells a delta, as much of it as the request asks for."""
    shows_ids = request.return_token_ids and not delta.is_prompt
    return pb.GenerateReply(
        id=delta.call_id,
        choice=delta.choice,
        text=delta.text,
        tool_calls=[
            pb.ToolCallDelta(index=call.index, id=call.call_id, name=call.name, arguments=call.arguments)
            for call in delta.tool_calls
        ],
        token_ids=[token.token_id for token in delta.tokens] if shows_ids else (),
        logprobs=[
            _logprob(token.token_id, token.logprob, token.text_offset)
            for token in delta.tokens
            if token.logprob is not None
        ],
        finish_reason=delta.finish_reason,
        usage=None if delta.usage is None else _usage(delta.usage),
        prompt=None if delta.prompt is None else _prompt(delta.prompt, request),
    )


def _usage(usage: CallUsage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _prompt(report: PromptReport, request: pb.GenerateRequest) -> pb.PromptReport:
    logprobs = zip(report.token_ids[1:], report.logprobs, strict=True) if report.logprobs else ()
    return pb.PromptReport(
        token_ids=report.token_ids if request.return_token_ids else (),
        logprobs=[_logprob(token_id, logprob) for token_id, logprob in logprobs],
    )


def _logprob(token_id: int, logprob: TokenLogprob, text_offset: int = 0) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=token_id,
        logprob=logprob.logprob,
        rank=logprob.rank,
        top=[pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in logprob.top],
        text_offset=text_offset,
    )
