"""Turns the texts of a call into token ids: the prompts, the words it must not say, and what an echo shows.

Encoding costs 0.4 s a megabyte. So what cannot fit the context is refused by bounds that cost next to
nothing, and what is long is encoded in a thread, where other calls' streams go on.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

from bakehouse_replica.core.errors import ContextTooLong, InvalidRequest
from bakehouse_replica.core.types import ReplicaCard
from bakehouse_replica.vocabulary import Vocabulary

from bakehouse_router.calls import Call, ChatCall, GenerationOptions
from bakehouse_router.prompt_run import Echo
from bakehouse_router.requests import check_prompt_length, check_token_ids
from bakehouse_router.text.model_text import ModelText

# Encoding takes about 1 ms per 3,000 characters; longer prompts go to a thread so that streams do not stall.
_MAX_INLINE_CHARS = 16_384
# A template takes about 10 µs a message.
_MAX_INLINE_MESSAGES = 256
# Finding the places of an echo's tokens takes 1.3 µs each.
_MAX_INLINE_ECHO_TOKENS = 1024

_CONTINUING_BYTES = bytes(range(0x80, 0xC0))


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedCall:
    """The ids of each prompt, the echo of each where one is asked for, and the sequences not to be put out."""

    prompts: tuple[tuple[int, ...], ...]
    echoes: tuple[Echo, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()


def prompt_field(call: Call) -> str:
    """What the client calls the prompt."""
    return "messages" if isinstance(call, ChatCall) else "prompt"


class PromptEncoder:
    """Encodes for the model whose text side is `text`."""

    def __init__(self, text: ModelText) -> None:
        self._text = text

    async def encode(self, call: Call, card: ReplicaCard, *, adds_special_tokens: bool = True) -> EncodedCall:
        """The call in token ids. `adds_special_tokens`: to prompts that are texts, as the tokenizer does.

        Raises `ContextTooLong` where a prompt certainly does not fit, `InvalidRequest` where one is wrong.
        """
        self._check_sizes(call, card.max_model_len)
        if _is_long(call):
            return await asyncio.to_thread(self._encode, call, card, adds_special_tokens)
        return self._encode(call, card, adds_special_tokens)

    def _check_sizes(self, call: Call, limit: int) -> None:
        """Refuses by lower bounds of the number of tokens."""
        if isinstance(call, ChatCall):
            # Each turn has a marker of its own; the past turns of the assistant may be cut by the template.
            self._check_bound(len(call.messages), f"messages has {len(call.messages)} messages", "messages", limit)
            asked = "".join(message.content.strip() for message in call.messages if message.role != "assistant")
            self._check_text(asked, "messages", limit)
            return
        for prompt in call.prompts:
            if isinstance(prompt, str):
                self._check_text(prompt, "prompt", limit)
            else:
                check_prompt_length(len(prompt), "prompt", limit, call.options)

    def _check_text(self, text: str, param: str, limit: int) -> None:
        n_tokens = self._text.tokenizer.min_tokens(text)
        self._check_bound(n_tokens, f"{param} has {len(text)} characters", param, limit)

    def _check_bound(self, n_tokens: int, what: str, param: str, limit: int) -> None:
        if n_tokens > limit:
            raise ContextTooLong(
                f"{what}, which are at least {n_tokens} tokens; this model's context is {limit} tokens", param
            )

    def _encode(self, call: Call, card: ReplicaCard, adds_special_tokens: bool) -> EncodedCall:
        echoes: tuple[Echo, ...] = ()
        try:
            bad_words = self._bad_words(call.options.bad_words)
            if isinstance(call, ChatCall):
                prompts = [self._chat_ids(call)]
            else:
                prompts = [self._prompt_ids(prompt, card, adds_special_tokens) for prompt in call.prompts]
                if call.echoes:
                    echoes = tuple(map(self._echo, call.prompts, prompts, repeat(call.options)))
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{prompt_field(call)} contains half of a surrogate pair, which is not text", prompt_field(call)
            ) from error
        return EncodedCall(prompts=tuple(prompts), echoes=echoes, bad_words=bad_words)

    def _chat_ids(self, call: ChatCall) -> tuple[int, ...]:
        tool_use = call.tool_use
        return self._text.chat_template.encode(
            call.messages,
            tools=() if tool_use is None or tool_use.choice == "none" else tool_use.tools,
            opens_answer=call.opens_answer,
            continues_last=call.continues_last,
            variables=call.template_variables,
        )

    def _prompt_ids(
        self, prompt: str | tuple[int, ...], card: ReplicaCard, adds_special_tokens: bool
    ) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self._text.tokenizer.encode_raw(prompt, add_special_tokens=adds_special_tokens)
        check_token_ids(prompt, "prompt", card.vocabulary_size)
        return prompt

    def _echo(
        self, prompt: str | tuple[int, ...], prompt_ids: tuple[int, ...], options: GenerationOptions
    ) -> Echo:
        vocabulary = self._text.tokenizer.vocabulary
        text = prompt if isinstance(prompt, str) else decoded(prompt_ids, vocabulary)
        offsets = token_offsets(prompt_ids, text, vocabulary) if options.shows_tokens else ()
        return Echo(text=text, offsets=offsets, n_top=options.logprobs)

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it begins a text and as it follows a space, which are different tokens in most models."""
        spellings = [spelling for word in words for spelling in (word.lstrip(), " " + word.lstrip())]
        encoded = [self._text.tokenizer.encode_raw(text, add_special_tokens=False) for text in spellings]
        return tuple(dict.fromkeys(filter(None, encoded)))


def decoded(token_ids: Sequence[int], vocabulary: Vocabulary) -> str:
    """The text of ids, as an answer of these would read: special tokens have none."""
    text = b"".join(map(vocabulary.bytes_of, token_ids)).decode("utf-8", "replace")
    return text.removeprefix(" ") if vocabulary.strips_first_space else text


def token_offsets(token_ids: Sequence[int], text: str, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Where in `text`, whose ids these are, each token begins, counted in complete characters before it.

    Special tokens begin where they stand, if the text spells them. Where a tokenizer changes what it reads, the
    offsets are those in the changed text.
    """
    spelled = text.encode("utf-8", "replace")
    pieces = [vocabulary.bytes_of(token_id) for token_id in token_ids]
    # A space that the tokenizer put before the text stands in the first token, but not in the text.
    begin = -1 if _n_first_spaces(b"".join(pieces)) > _n_first_spaces(spelled) else 0
    offsets, n_chars, n_counted = [], 0, 0
    for token_id, piece in zip(token_ids, pieces, strict=True):
        n_chars += _n_first_bytes(spelled[n_counted : max(begin, 0)])
        n_counted = max(begin, n_counted)
        is_inside = _n_first_bytes(spelled[n_counted : n_counted + 1]) == 0 and n_counted < len(spelled)
        offsets.append(n_chars - 1 if is_inside else n_chars)
        name = b"" if piece else vocabulary.name_of(token_id).encode()
        begin += len(piece) or (len(name) if spelled.startswith(name, n_counted) else 0)
    return tuple(offsets)


def _n_first_spaces(text: bytes) -> int:
    return len(text) - len(text.lstrip(b" "))


def _n_first_bytes(text: bytes) -> int:
    """How many characters begin in `text`: all bytes of UTF-8 but those that continue one."""
    return len(text.translate(None, _CONTINUING_BYTES))


def _is_long(call: Call) -> bool:
    if isinstance(call, ChatCall):
        if call.tool_use is not None or call.template_variables:  # nested values of any size
            return True
        n_chars = sum(len(message.content) for message in call.messages)
        return n_chars > _MAX_INLINE_CHARS or len(call.messages) > _MAX_INLINE_MESSAGES
    if call.echoes and sum(map(len, call.prompts)) > _MAX_INLINE_ECHO_TOKENS:
        return True
    n_chars = sum(len(prompt) for prompt in call.prompts if isinstance(prompt, str))
    return n_chars + sum(map(len, call.options.bad_words)) > _MAX_INLINE_CHARS
