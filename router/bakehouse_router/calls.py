"""What a gateway is asked for, in its own words: every entry speaks in `Call`s, so that all are checked alike."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from bakehouse_replica.core.sampling import Grammar

from bakehouse_router.text.messages import ChatMessage, Tool

MAX_TIMEOUT_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How to generate; None takes the model's default. `top_k` 0 keeps the whole vocabulary.

    `max_tokens_field` and `grammar_field`: what the client called these, for error messages. `keeps_stop`: the
    text that ended a choice (stop string or the text of a stop id) stays in its output. `bad_words` are texts
    that must not be put out, as they stand or after a space; `bad_words_ids` are such sequences of ids.
    `reports_tokens`: the client wants to see token ids, so text is released token by token. `timeout_s` counts
    from the moment the call was received. `tenant` is who pays, by the key; `user` is what the client says.
    """

    n: int | None = None
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    keeps_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    grammar_field: str = "structured_outputs"
    reports_tokens: bool = False
    timeout_s: float | None = None
    user: str = ""
    tenant: str = ""
    priority: int = 0
    cache_salt: str = ""

    @property
    def shows_tokens(self) -> bool:
        """Whether the client wants to see tokens beside the text."""
        return self.reports_tokens or self.logprobs is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a chat and which of them must be called.

    `choice`: `none`, `auto`, `required` (at least one of them), or `named` (the one tool `name`).
    """

    tools: tuple[Tool, ...]
    choice: Literal["none", "auto", "required", "named"] = "auto"
    name: str | None = None
    is_parallel: bool = True

    @property
    def allows_one_call(self) -> bool:
        """Whether the answer is over after its first call; a tool that is named is called once."""
        return self.choice == "named" or not self.is_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """Answer the last of these messages, or go on writing it where `continues_last`.

    `opens_answer`: the template writes the beginning of the assistant's turn. `template_variables` are passed to
    the template by name.
    """

    model: str
    messages: tuple[ChatMessage, ...]
    options: GenerationOptions
    tool_use: ToolUse | None = None
    opens_answer: bool = True
    continues_last: bool = False
    template_variables: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """Continue each of these prompts: text, or token ids. `echoes`: the answer begins with the prompt."""

    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    options: GenerationOptions
    echoes: bool = False


Call = ChatCall | CompletionCall
