"""What `bakehouse.LLM` takes and gives: prompts in whatever form users have them, whole outputs."""

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.types import FinishReason, TokenLogprob, Usage
from bakehouse_router.generation import Generation

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One continuation. `finish_reason`: `stop` (a stop id or string, or a complete grammar) or `length`.

    `logprobs`: one entry for each of `token_ids` where they were asked for, else none.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """All choices of one prompt; `text`, `token_ids`, `finish_reason` and `usage` are those of the first.

    `prompt_logprobs`: one entry for each prompt token but the first where they were asked for, else none.
    """

    prompt_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """The first choice's text, without the stop string that ended it."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first choice's ids."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def usage(self) -> Usage:
        """The first choice's token counts."""
        return self.choices[0].usage


async def collect(generation: Generation) -> Output:
    """The output of a call with one prompt that reports its tokens; cancelling this cancels the call."""
    texts: dict[int, list[str]] = {}
    token_ids: dict[int, list[int]] = {}
    logprobs: dict[int, list[TokenLogprob]] = {}
    finish: dict[int, FinishReason] = {}
    async with aclosing(generation.pieces()) as pieces:
        async for arrived in pieces:
            for piece in arrived:
                texts.setdefault(piece.choice, []).append(piece.text)
                token_ids.setdefault(piece.choice, []).extend(token.token_id for token in piece.tokens)
                known = (token.logprob for token in piece.tokens if token.logprob is not None)
                logprobs.setdefault(piece.choice, []).extend(known)
                if piece.finish is not None:
                    finish[piece.choice] = piece.finish
    prompt, usage = generation.prompt_of(0), generation.usage
    choices = tuple(
        Choice(
            text="".join(texts[choice]),
            token_ids=tuple(token_ids[choice]),
            finish_reason=finish[choice],
            usage=Usage(
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=len(token_ids[choice]),
            ),
            logprobs=tuple(logprobs[choice]),
        )
        for choice in sorted(finish)
    )
    return Output(prompt_ids=prompt.token_ids, choices=choices, prompt_logprobs=prompt.logprobs)


def as_prompts(prompts: object) -> list[Prompt]:
    """The prompts in `prompts`: a text, token ids, or a sequence of either. Raises `InvalidRequest`."""
    if isinstance(prompts, str) or _is_ids(prompts):
        return [_as_prompt(prompts)]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise InvalidRequest(
            f"prompts is {_shown(prompts)}; it must be a text, token ids, or a list of them", "prompts"
        )
    return [_as_prompt(prompt) for prompt in prompts]


def as_conversations(messages: object) -> list[Sequence[object]]:
    """The conversations in `messages`: one list of messages, or a list of such lists. Raises `InvalidRequest`."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes | bytearray):
        raise InvalidRequest(f"messages is {_shown(messages)}; it must be a list of messages", "messages")
    if not messages or isinstance(messages[0], Mapping):
        return [messages]
    wrong = [turns for turns in messages if not isinstance(turns, Sequence) or isinstance(turns, str | bytes)]
    if wrong:
        raise InvalidRequest(
            f"messages holds {_shown(wrong[0])}; it must hold messages, or lists of them", "messages"
        )
    return list(messages)


def as_stops(stop: object) -> tuple[str, ...]:
    """The stop strings in `stop`: None, one, or several. Raises `InvalidRequest`."""
    stops = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or not all(isinstance(text, str) for text in stops):
        raise InvalidRequest(f"stop is {_shown(stop)}; it must be a string or a list of strings", "stop")
    return tuple(stops)


def _as_prompt(prompt: object) -> Prompt:
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise InvalidRequest("prompts holds half of a surrogate pair, which is not text", "prompts") from None
        return prompt
    if _is_ids(prompt) or prompt in ([], ()):  # what is empty is refused by name where all prompts are checked
        assert isinstance(prompt, Sequence), "token ids are a sequence"
        return tuple(prompt)
    raise InvalidRequest(f"prompts holds {_shown(prompt)}; each must be a text or a list of token ids", "prompts")


def _is_ids(prompt: object) -> bool:
    """Whether this is a list of token ids; an empty one is a list of no prompts."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes | bytearray):
        return False
    return bool(prompt) and all(isinstance(part, int) and not isinstance(part, bool) for part in prompt)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
