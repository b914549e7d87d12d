"""Turns one choice's token ids into text as they come: a pure state machine, ids in and text out.

The invariant: however the ids are cut into calls of `feed`, the joined pieces are the same, namely the UTF-8 of
all ids' bytes (see `bakehouse_router.text.vocabulary`) up to the first stop string that completes. Held back are
only the bytes of an unfinished character and a tail that is a proper prefix of a stop string.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from bakehouse_replica.core.types import TokenLogprob

from bakehouse_router.text.stops import StopMatcher
from bakehouse_router.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputToken:
    """One token of an answer. `text_offset`: characters of the answer before it, an echoed prompt included.

    `logprob` None: not asked for, or the first token of a prompt, which nothing predicts.
    """

    token_id: int
    text_offset: int
    logprob: TokenLogprob | None = None


class TextStream:
    """The text of one choice.

    `n_tokens` counts the ids taken so far, up to and including the one in which a stop completed; ids after it
    are ignored. No stop completes within the first `min_tokens - 1` ids: there its text is text like any other.
    `continues_text`: the ids continue a given text, so that a first space belongs to the output.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        stops: tuple[str, ...] = (),
        min_tokens: int = 0,
        continues_text: bool = False,
    ) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self._strips_space = vocabulary.strips_first_space and not continues_text
        self.n_tokens = 0

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has completed; nothing follows then."""
        return self._matcher is not None and self._matcher.is_stopped

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text released by these ids; may be empty."""
        bytes_of = self._vocabulary.bytes_of
        if self._matcher is None:
            self.n_tokens += len(token_ids)
            return self._decode(b"".join([bytes_of(token_id) for token_id in token_ids]))
        released = []
        for token_id in token_ids:
            if self._matcher.is_stopped:
                break
            self.n_tokens += 1
            released.append(self._match(self._matcher, self._decode(bytes_of(token_id))))
        return "".join(released)

    def finish(self) -> str:
        """What was held back, at the end of the ids; an unfinished character becomes one replacement character."""
        if self.is_stopped:
            return ""
        rest = self._decode(b"", final=True)
        if self._matcher is None:
            return rest
        released = self._match(self._matcher, rest)
        return released if self._matcher.is_stopped else released + self._matcher.flush()

    def _match(self, matcher: StopMatcher, text: str) -> str:
        return matcher.feed(text, may_stop=self.n_tokens >= self._min_tokens)

    def _decode(self, piece: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(piece, final)
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text
