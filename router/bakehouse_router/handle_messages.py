"""What the faces over Ray and gRPC answer with: plain frozen values, small, as many cross processes a second."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from bakehouse_router.generation import CallUsage
from bakehouse_router.prompt_run import PromptReport
from bakehouse_router.text.messages import ToolCall
from bakehouse_router.text.stream import OutputToken
from bakehouse_router.text.tools.parser import CallDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """News of one choice; the last delta of a call belongs to none (`choice` None) and carries the final `usage`.

    `tokens`: where token ids or logprobs were asked for. `is_prompt`: this is the echoed prompt. `finish_reason`:
    `stop`, `length` or `tool_calls`, in a choice's last delta. `prompt`: where the prompt's ids or logprobs were
    asked for, with the first delta of its first choice. `usage` in all deltas where it was asked for.
    """

    call_id: str
    choice: int | None = None
    text: str = ""
    tokens: tuple[OutputToken, ...] = ()
    is_prompt: bool = False
    tool_calls: tuple[CallDelta, ...] = ()
    finish_reason: str | None = None
    prompt: PromptReport | None = None
    usage: CallUsage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyChoice:
    """One whole answer; `text` and `tokens` begin with the prompt where it is echoed.

    `prompt`: with the first choice of each prompt, where its ids or logprobs were asked for.
    """

    text: str
    finish_reason: str
    tokens: tuple[OutputToken, ...] = ()
    prompt: PromptReport | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """All choices of a call; `text`, `finish_reason` and `tool_calls` are those of the first."""

    call_id: str
    choices: tuple[ReplyChoice, ...]
    usage: CallUsage

    @property
    def text(self) -> str:
        """The first choice's text, without the stop string that ended it."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> str:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls that the first choice makes."""
        return self.choices[0].tool_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A served model; `max_model_len` is its context in tokens, None where no replica serves."""

    name: str
    max_model_len: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenized:
    """A prompt as the model is given it; `token_strs` where they were asked for, one for each id."""

    token_ids: tuple[int, ...]
    token_strs: tuple[str, ...]
    max_model_len: int


@dataclass(slots=True)
class _OpenCall:
    call_id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def take(self, delta: CallDelta) -> None:
        self.call_id = delta.call_id or self.call_id
        self.name = delta.name or self.name
        self.arguments.append(delta.arguments)

    def whole(self) -> ToolCall:
        return ToolCall(call_id=self.call_id, name=self.name, arguments="".join(self.arguments))


@dataclass(slots=True)
class _OpenChoice:
    texts: list[str] = field(default_factory=list)
    tokens: list[OutputToken] = field(default_factory=list)
    calls: dict[int, _OpenCall] = field(default_factory=dict)
    finish_reason: str = ""
    prompt: PromptReport | None = None

    def take(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.tokens.extend(delta.tokens)
        for call in delta.tool_calls:
            self.calls.setdefault(call.index, _OpenCall()).take(call)
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.prompt = delta.prompt or self.prompt

    def whole(self) -> ReplyChoice:
        return ReplyChoice(
            text="".join(self.texts),
            finish_reason=self.finish_reason,
            tokens=tuple(self.tokens),
            prompt=self.prompt,
            tool_calls=tuple(self.calls[index].whole() for index in sorted(self.calls)),
        )


def whole_reply(deltas: Iterable[Delta]) -> Reply:
    """The reply that a call's deltas, all of them, add up to."""
    choices: dict[int, _OpenChoice] = {}
    end: Delta | None = None
    for delta in deltas:
        if delta.choice is None:
            end = delta
        else:
            choices.setdefault(delta.choice, _OpenChoice()).take(delta)
    assert end is not None, "a call's last delta belongs to no choice"
    assert end.usage is not None, "the last delta carries the usage"
    whole = tuple(choices[index].whole() for index in sorted(choices))
    return Reply(call_id=end.call_id, choices=whole, usage=end.usage)
