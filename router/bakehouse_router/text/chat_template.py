"""Renders a conversation with the model's chat template and encodes it."""

import logging
from collections.abc import Sequence
from typing import cast

import jinja2
from bakehouse_replica.core.errors import InvalidRequest, StartupError
from transformers import PreTrainedTokenizerBase

from bakehouse_router.text.messages import ChatMessage
from bakehouse_router.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class ChatTemplate:
    """A chat template, rendered in transformers' Jinja sandbox; None where the model has none.

    Raises `StartupError` where the template is not valid Jinja.
    """

    def __init__(self, renderer: PreTrainedTokenizerBase, tokenizer: Tokenizer, template: str | None) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._template = template
        if template is not None:
            _check_syntax(renderer, template)

    def encode(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """The ids of the conversation up to where the assistant's answer begins.

        Raises `InvalidRequest` naming `messages` where the template refuses them, or where there is none.
        """
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template, so it cannot chat; use /v1/completions", "messages"
            )
        disguises = self._tokenizer.disguises()
        turns = [
            {"role": _role(message, self._template), "content": disguises.apply(message.content)}
            for message in messages
        ]
        try:
            rendered = _render(self._renderer, self._template, turns)
        except _TEMPLATE_FAILURES as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {disguises.remove(str(error))}", "messages"
            ) from error
        return self._tokenizer.encode_rendered(rendered, disguises)


# What a template raises by `raise_exception`, and what Python raises out of an expression in it.
_TEMPLATE_FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


def _role(message: ChatMessage, template: str) -> str:
    """`developer` is what newer clients call `system`; a template that does not know it is given the old name."""
    if message.role == "developer" and "developer" not in template:
        return "system"
    return message.role


def _render(renderer: PreTrainedTokenizerBase, template: str, turns: list[dict[str, str]]) -> str:
    rendered = renderer.apply_chat_template(
        turns, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    return cast("str", rendered)


def _check_syntax(renderer: PreTrainedTokenizerBase, template: str) -> None:
    try:
        _render(renderer, template, [{"role": "user", "content": "Hello"}])
    except jinja2.TemplateSyntaxError as error:
        raise StartupError(
            f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
        ) from error
    except _TEMPLATE_FAILURES as error:  # valid Jinja, but it wants other messages, say a system prompt
        logger.info("the chat template refuses a single user message: %s", error)
