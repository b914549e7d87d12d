"""The ids of prompts that a trace gives as text or as messages, by the model's own tokenizer and template."""

from functools import cached_property
from typing import TypeGuard, get_args

from bakehouse_replica.core.errors import InvalidRequest, StartupError
from bakehouse_replica.core.types import ModelSource
from bakehouse_replica.source import open_source
from bakehouse_router.text.messages import ChatMessage, Role
from bakehouse_router.text.model_text import ModelText, load_model_text

from bakehouse_cluster.bench.workloads import Messages


class PromptEncoder:
    """Loads the tokenizer at the first prompt, for most traces need none."""

    def __init__(self, source: ModelSource, *, chat_template: str | None = None) -> None:
        self._source = source
        self._chat_template = chat_template

    def encode(self, given: str | Messages) -> tuple[int, ...]:
        """As a gateway would. Raises `StartupError` where the model has no template for such messages."""
        if isinstance(given, str):
            return self._text.tokenizer.encode_raw(given)
        messages = [ChatMessage(role=_known(role), content=content) for role, content in given.turns]
        try:
            return self._text.chat_template.encode(messages)
        except InvalidRequest as error:
            raise StartupError(error.message) from error

    @cached_property
    def _text(self) -> ModelText:
        return load_model_text(open_source(self._source), template_override=self._chat_template)


def _known(role: str) -> Role:
    if not _is_role(role):
        raise StartupError(f"messages have the role {role!r}; there are {', '.join(get_args(Role))}")
    return role


def _is_role(role: str) -> TypeGuard[Role]:
    return role in get_args(Role)
