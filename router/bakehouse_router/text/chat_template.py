"""Renders a conversation with the model's chat template and encodes it.

What a template does not know is refused rather than dropped in silence: tools, calls, what tools returned,
variables. Whether it knows them is read off its text, as it has no other way to say so.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from inspect import signature
from types import MappingProxyType
from typing import cast

import jinja2
from bakehouse_replica.core.errors import InvalidRequest, StartupError
from jinja2 import meta
from jinja2.defaults import DEFAULT_NAMESPACE
from transformers.utils.chat_template_utils import render_jinja_template

from bakehouse_router.text.messages import ChatMessage, Tool
from bakehouse_router.text.template_input import disguised, template_messages, template_tools
from bakehouse_router.text.tokenizer import TextEncoder

logger = logging.getLogger(__name__)

_NO_VARIABLES: Mapping[str, object] = MappingProxyType({})

# Annotated as returning a text, it returns the texts and something else.
_render_all = cast("Callable[..., tuple[list[str], object]]", render_jinja_template)

# What a template raises by `raise_exception`, and what Python raises out of an expression in it.
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
# transformers quotes the whole conversation in some of its errors.
_MAX_ERROR_CHARS = 500

# Names that every template is given: by transformers, by its globals, by Jinja.
_GIVEN_NAMES = frozenset(
    {"messages", "self", "raise_exception", "strftime_now", *DEFAULT_NAMESPACE}
    | signature(render_jinja_template).parameters.keys()
)


class ChatTemplate:
    """A chat template, rendered in transformers' Jinja sandbox.

    `text` is its source, None where the model has none. `special_tokens` are the names by which a template writes
    them, say `bos_token`. Raises `StartupError` where the template is not valid Jinja.
    """

    def __init__(
        self, tokenizer: TextEncoder, text: str | None, *, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self.text = text
        self._tokenizer = tokenizer
        self.special_tokens = dict(special_tokens or {})
        if text is not None:
            self._check_syntax(text)

    @property
    def knows_tools(self) -> bool:
        """Whether the template tells the model about tools."""
        return self.text is not None and _mentions(self.text, "tools")

    def encode(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Tool] = (),
        opens_answer: bool = True,
        continues_last: bool = False,
        variables: Mapping[str, object] = _NO_VARIABLES,
    ) -> tuple[int, ...]:
        """The ids of the conversation, the model's cue to answer included.

        `opens_answer`: the template begins the assistant's turn. `continues_last`: the last message, which must be
        the assistant's, is left open instead. `variables` are JSON values that the template reads by name.

        Raises `InvalidRequest` where there is no template, where it refuses the messages, or where it does not
        know what it is given; names `messages`, `tools`, or `chat_template_kwargs`.
        """
        if self.text is None:
            raise InvalidRequest(
                "this model has no chat template, so it cannot chat; use /v1/completions", "messages"
            )
        if tools and not self.knows_tools:
            raise InvalidRequest("this model's chat template has no tools, so it cannot call any", "tools")
        _check_messages(messages, self.text, continues_last)
        self._check_variables(variables, self.text)
        disguises = self._tokenizer.disguises()
        turns = template_messages(messages, disguises, knows_developer="developer" in self.text)
        given = {
            name: disguised(value, disguises, f"chat_template_kwargs.{name}") for name, value in variables.items()
        }
        given["tools"] = template_tools(tools, disguises) or None
        given["add_generation_prompt"] = opens_answer and not continues_last
        given["continue_final_message"] = continues_last
        try:
            rendered = self._render(self.text, turns, given)
        except _TEMPLATE_FAILURES as error:
            reason = disguises.remove(str(error))[:_MAX_ERROR_CHARS]
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {reason}", "messages"
            ) from error
        return self._tokenizer.encode_rendered(rendered, disguises)

    def _render(self, template: str, turns: list[dict[str, object]], given: Mapping[str, object]) -> str:
        rendered, _ = _render_all(conversations=[turns], chat_template=template, **self.special_tokens, **given)
        return rendered[0]

    def _check_syntax(self, template: str) -> None:
        try:
            self._render(template, [{"role": "user", "content": "Hello"}], {"add_generation_prompt": True})
        except jinja2.TemplateSyntaxError as error:
            raise StartupError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
            ) from error
        except _TEMPLATE_FAILURES as error:  # valid Jinja, but it wants other messages, say a system prompt
            logger.info("the chat template refuses a single user message: %s", error)

    def _check_variables(self, variables: Mapping[str, object], template: str) -> None:
        for name in variables:
            param = f"chat_template_kwargs.{name}"
            if name in _GIVEN_NAMES or name in self.special_tokens:
                raise InvalidRequest(f"{param} is a name that the template is given by the server", param)
            if not _reads(template, name):
                raise InvalidRequest(f"{param} has no effect: this model's chat template does not read it", param)


def _reads(template: str, name: str) -> bool:
    """Whether a template looks `name` up, rather than having a word or a variable of its own like it."""
    names = _names_read(template)
    return _mentions(template, name) if names is None else name in names


@lru_cache(maxsize=8)
def _names_read(template: str) -> frozenset[str] | None:
    """None where only transformers can parse the template."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])  # nothing is rendered by it
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(template)))
    except jinja2.TemplateError:
        return None


def _mentions(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _check_messages(messages: Sequence[ChatMessage], template: str, continues_last: bool) -> None:
    if not messages:
        raise InvalidRequest("messages is empty; it must have at least one message", "messages")
    for index, message in enumerate(messages):
        if message.tool_calls and "tool_calls" not in template:
            param = f"messages[{index}].tool_calls"
            raise InvalidRequest(f"{param}: this model's chat template cannot show calls of tools", param)
        if message.role == "tool" and "tool" not in template:
            param = f"messages[{index}].role"
            raise InvalidRequest(f"{param}: this model's chat template cannot show what a tool returned", param)
    last = messages[-1]
    if continues_last and last.role != "assistant":
        raise InvalidRequest(
            f"only an assistant's message can be continued; the last one is of the role {last.role!r}", "messages"
        )
    if continues_last and last.tool_calls:
        raise InvalidRequest("the last message calls tools, so it cannot be continued", "messages")
