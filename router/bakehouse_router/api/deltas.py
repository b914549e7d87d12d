"""A call from a face that is not HTTP: the fields of an HTTP body in, the same checks, the answer's deltas out."""

import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Literal

from bakehouse_router.api.bodies import Origin, chat_call, completion_call
from bakehouse_router.api.parse import parse_body
from bakehouse_router.api.parsed_answer import finish_reason, parsed_deltas
from bakehouse_router.api.schema import ChatBody, CompletionBody, GenerationBody
from bakehouse_router.calls import Call, CompletionCall
from bakehouse_router.gateway import Gateway
from bakehouse_router.generation import Generation
from bakehouse_router.handle_messages import Delta
from bakehouse_router.prompt_run import PromptReport, TextPiece
from bakehouse_router.request_record import RequestRecord
from bakehouse_router.text.tools.parser import CallDelta, ContentDelta, ToolCallParser

Kind = Literal["completion", "chat"]
Fields = Mapping[str, object]


async def stream_deltas(
    gateway: Gateway, kind: Kind, fields: Fields, *, origin: Origin, record: RequestRecord | None = None
) -> AsyncGenerator[Delta, None]:
    """The answer to a body of `/v1/completions` or `/v1/chat/completions`, by `kind`; its last delta is the usage.

    Raises on the first step what HTTP would answer with a status, later what it would end its stream with. Closing
    the generator cancels the call. `record`: of the request, whose end is the caller's.
    """
    has_begun = False
    try:
        body, call = _parsed(gateway, kind, fields, origin)
        call_id = f"{kind}-{secrets.token_hex(16)}"
        generation = await gateway.start(call, call_id, record=record)
        writers = _Writers(gateway, call, call_id, generation)
        counts_along = bool(body.stream_options and body.stream_options.continuous_usage_stats)
        async with aclosing(generation.pieces()) as pieces:
            async for arrived in pieces:
                for piece in arrived:
                    delta = writers.write(piece, counts_along)
                    if delta is not None:
                        has_begun = True
                        yield delta
        yield Delta(call_id=call_id, usage=generation.usage)
    except Exception as error:
        if not has_begun:
            gateway.metrics.reject(error)
        raise


def _parsed(gateway: Gateway, kind: Kind, fields: Fields, origin: Origin) -> tuple[GenerationBody, Call]:
    if kind == "chat":
        chat = parse_body(ChatBody, fields)
        return chat, chat_call(chat, gateway.settings, origin)
    completion = parse_body(CompletionBody, fields)
    return completion, completion_call(completion, gateway.settings, origin)


class _Writers:
    """Turns text pieces into deltas; where tools may be called, each choice's text goes through a parser."""

    def __init__(self, gateway: Gateway, call: Call, call_id: str, generation: Generation) -> None:
        self._new_parser = gateway.new_parser(call)
        self._call = call
        self._call_id = call_id
        self._generation = generation
        self._parsers: dict[int, ToolCallParser | None] = {}

    def write(self, piece: TextPiece, counts_along: bool) -> Delta | None:
        """The news in a piece; None where a parser holds back all of it."""
        is_first = piece.choice not in self._parsers
        if is_first:
            self._parsers[piece.choice] = self._new_parser() if self._new_parser is not None else None
        parser = self._parsers[piece.choice]
        parsed = list(parsed_deltas(parser, piece))
        text = "".join(delta.text for delta in parsed if isinstance(delta, ContentDelta))
        calls = tuple(delta for delta in parsed if isinstance(delta, CallDelta))
        prompt = self._prompt(piece.choice) if is_first else None
        if not (text or calls or piece.tokens or piece.finish or prompt):
            return None
        return Delta(
            call_id=self._call_id,
            choice=piece.choice,
            text=text,
            tokens=piece.tokens,
            is_prompt=is_first and isinstance(self._call, CompletionCall) and self._call.echoes,
            tool_calls=calls,
            finish_reason=None if piece.finish is None else finish_reason(parser, piece.finish),
            prompt=prompt,
            usage=self._generation.usage if counts_along else None,
        )

    def _prompt(self, choice: int) -> PromptReport | None:
        """What was asked for of the prompt, with the first of its choices."""
        options = self._call.options
        if choice % (options.n or 1) or not (options.reports_tokens or options.prompt_logprobs is not None):
            return None
        return self._generation.prompt_of(choice)
