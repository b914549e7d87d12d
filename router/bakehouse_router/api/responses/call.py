"""From a response's body to the gateway's call, and from the gateway's complaints back to the body's fields."""

import re
from dataclasses import dataclass, replace

from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.sampling import Grammar, GrammarKind

from bakehouse_router.api.bodies import NOWHERE, Origin, answer_options, logprobs_asked_for, tool_use_of
from bakehouse_router.api.responses.body import LOGPROBS, ResponseBody, TextFormatBody
from bakehouse_router.api.responses.input_items import read_turns
from bakehouse_router.api.responses.reply import echo_of
from bakehouse_router.api.token_json import Json
from bakehouse_router.calls import ChatCall
from bakehouse_router.settings import GatewaySettings
from bakehouse_router.structured import schema_text

_ANY_OBJECT = {"type": "object"}
_MESSAGE_PARAM = re.compile(r"messages\[(\d+)\]")
_TOOL_PARAM = re.compile(r"(tools\[\d+\])\.function")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseCall:
    """A call. `sources`: the field of the body in which each of its messages begins; `echo`: see `echo_of`."""

    call: ChatCall
    sources: tuple[str, ...]
    echo: Json

    def in_body_terms(self, error: InvalidRequest) -> InvalidRequest:
        """A complaint of the gateway's, which knows messages, about the field of the body that it concerns."""
        if error.param is None:
            return error
        param = self._field_of(error.param)
        if param == error.param:
            return error
        rest = error.message.removeprefix(error.param)
        return type(error)(error.message if rest == error.message else param + rest, param)

    def _field_of(self, param: str) -> str:
        if param == "messages":
            return "input"
        if found := _MESSAGE_PARAM.match(param):
            return self.sources[int(found[1])]
        return _TOOL_PARAM.sub(r"\1", param)


def response_call(body: ResponseBody, settings: GatewaySettings, origin: Origin = NOWHERE) -> ResponseCall:
    """The call that a body asks for. Raises `InvalidRequest` where two of its fields contradict."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is given; it is allowed only where stream is true", "stream_options")
    shared = answer_options(
        body,
        origin,
        max_tokens=body.max_output_tokens,
        max_tokens_field="max_output_tokens",
        logprobs=logprobs_asked_for(
            body.top_logprobs,
            settings.max_logprobs,
            are_shown=bool(body.include),
            shown_where=f"include has {LOGPROBS!r}",
        ),
    )
    grammar = _grammar(body.text.format if body.text else None, settings)
    tools = [tool.tool() for tool in body.tools or ()]
    turns = read_turns(body.instructions, body.input)
    call = ChatCall(
        model=body.model,
        messages=tuple(turn.message for turn in turns),
        options=replace(shared, grammar=grammar, grammar_field="text.format"),
        tool_use=tool_use_of(tools, body.tool_choice, body.parallel_tool_calls),
        template_variables=body.chat_template_kwargs or {},
    )
    return ResponseCall(call=call, sources=tuple(turn.source for turn in turns), echo=echo_of(body))


def _grammar(text_format: TextFormatBody | None, settings: GatewaySettings) -> Grammar | None:
    if text_format is None or text_format.type == "text":
        return None
    schema = _ANY_OBJECT if text_format.schema_ is None else text_format.schema_
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=schema_text(schema, "text.format.schema", settings))
