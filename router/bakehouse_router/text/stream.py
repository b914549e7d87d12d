"""Turns one choice's token ids into text as they come: a pure state machine, ids in and text out.

The invariant: however the ids are cut into calls of `feed`, the joined pieces are the same, namely the UTF-8 of
all ids' bytes (see `bakehouse_replica.vocabulary`) up to the first stop string that completes, or up to a stop
id. Held back are only the bytes of an unfinished character and a tail that is a proper prefix of a stop string;
where tokens are reported, also the rest of the tokens in which these begin.
"""

import codecs
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bakehouse_replica.core.types import TokenLogprob
from bakehouse_replica.vocabulary import Vocabulary

from bakehouse_router.text.stops import StopMatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputToken:
    """One token of an answer. `text_offset`: characters of the answer before it, an echoed prompt included.

    A token that goes on with an unfinished character, or lies in a stop that was cut off, has the offset of what
    is shown before it. `logprob` None: not asked for, or the first token of a prompt, which nothing predicts.
    """

    token_id: int
    text_offset: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """A token that is not through, although it is whole; `end` counts characters."""

    token: OutputToken
    end: int


class _TokenBorders:
    """Holds one choice's text back to its last token border, and knows which tokens stand before it.

    A token is through once its own bytes are whole characters and none of them is held back. What is released is
    the text of exactly the tokens that are through by then; tokens that share a character come through together.
    `first_offset` characters are shown before them all.
    """

    def __init__(self, first_offset: int = 0) -> None:
        self._first_offset = first_offset
        self._n_decoded = 0
        self._n_released = 0
        self._text = ""  # let through, but its token is not
        self._unfinished: list[OutputToken] = []  # since the last border between characters
        self._finished: deque[_Waiting] = deque()
        self._through: list[OutputToken] = []

    def add(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """The next token, before its bytes are decoded."""
        offset = self._first_offset + self._n_decoded
        self._unfinished.append(OutputToken(token_id=token_id, text_offset=offset, logprob=logprob))

    def part(self, n_replacements: int) -> None:
        """The tokens so far end with a character that the next one breaks off: replacements, once decoded."""
        self._finish_all(self._n_decoded + n_replacements)

    def advance(self, *, n_decoded: int, is_whole: bool, text: str) -> str:
        """The text to release after a token that brought `n_decoded` characters.

        `is_whole`: it ends with a character; `text` has just been let through.
        """
        self._n_decoded += n_decoded
        self._text += text
        if is_whole:
            self._finish_all(self._n_decoded)
        border, n_known = self._n_released, self._n_released + len(self._text)
        while self._finished and self._finished[0].end <= n_known:
            waiting = self._finished.popleft()
            self._through.append(waiting.token)
            border = waiting.end
        return self._release(border - self._n_released)

    def finish(self, text: str) -> str:
        """All that is left, at the end of the answer; `text` is the last that was let through."""
        self._text += text
        released = self._release(len(self._text))
        end = self._first_offset + self._n_released
        for token in (*(waiting.token for waiting in self._finished), *self._unfinished):
            self._through.append(replace(token, text_offset=min(token.text_offset, end)))
        self._finished.clear()
        self._unfinished.clear()
        return released

    def take(self) -> tuple[OutputToken, ...]:
        """The tokens that came through since the last time."""
        taken = tuple(self._through)
        self._through.clear()
        return taken

    def _finish_all(self, end: int) -> None:
        self._finished += [_Waiting(token=token, end=end) for token in self._unfinished]
        self._unfinished.clear()

    def _release(self, n_chars: int) -> str:
        released, self._text = self._text[:n_chars], self._text[n_chars:]
        self._n_released += n_chars
        return released


class TextStream:
    """The text of one choice.

    `n_tokens` counts the ids taken so far, up to and including the one in which a stop completed; ids after it
    are ignored. A stop id ends the text wherever it stands, as in the replica; no stop string completes within
    the first `min_tokens - 1` ids: there its text is text like any other. The text of what ended it is left out
    unless `keeps_stop`. `continues_text`: the ids continue a given text, so that a first space belongs to the
    output. `reports_tokens`: text is released at token borders, with the tokens it is the text of; their offsets
    count from `first_offset`. `is_over` is asked after each token, with the text that it let through, whether
    nothing more is wanted: no id after that token counts then.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        stops: tuple[str, ...] = (),
        stop_token_ids: tuple[int, ...] = (),
        keeps_stop: bool = False,
        min_tokens: int = 0,
        continues_text: bool = False,
        reports_tokens: bool = False,
        first_offset: int = 0,
        is_over: Callable[[str], bool] | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(stops, keeps_stop=keeps_stop) if stops else None
        self._stop_ids = frozenset(stop_token_ids)
        self._keeps_stop = keeps_stop
        self._min_tokens = min_tokens
        self._strips_space = vocabulary.strips_first_space and not continues_text
        self._borders = _TokenBorders(first_offset) if reports_tokens else None
        self._has_stop_id = False
        self._is_over = is_over
        self._has_enough = False
        self._is_plain = self._matcher is None and self._borders is None and is_over is None
        self.n_tokens = 0

    @property
    def is_stopped(self) -> bool:
        """Whether a stop has completed, a stop id has come or enough was said; no further id counts then."""
        return self._has_stop_id or self._is_cut or self._has_enough

    @property
    def _is_cut(self) -> bool:
        return self._matcher is not None and self._matcher.is_stopped

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> str:
        """The text released by these ids; may be empty. `logprobs`: one for each id, or none at all."""
        if self._is_plain and self._stop_ids.isdisjoint(token_ids) and not self._has_stop_id:
            self.n_tokens += len(token_ids)
            return self._decode(b"".join(map(self._vocabulary.bytes_of, token_ids)))
        released = []
        known: Sequence[TokenLogprob | None] = logprobs or [None] * len(token_ids)
        for token_id, logprob in zip(token_ids, known, strict=True):
            if self.is_stopped:
                break
            released.append(self._take(token_id, logprob))
        return "".join(released)

    def finish(self) -> str:
        """What was held back, at the end of the ids; an unfinished character becomes one replacement character."""
        rest = ""
        if not self._is_cut:
            rest = self._match(self._decode(b"", final=True))
            if self._matcher is not None and not self._is_cut:
                rest += self._let_through(self._matcher.flush())
        return rest if self._borders is None else self._borders.finish(rest)

    def take_tokens(self) -> tuple[OutputToken, ...]:
        """The tokens whose text has been released since the last time; none unless the stream reports them."""
        return () if self._borders is None else self._borders.take()

    def _take(self, token_id: int, logprob: TokenLogprob | None) -> str:
        self.n_tokens += 1
        self._has_stop_id = token_id in self._stop_ids
        is_hidden = self._has_stop_id and not self._keeps_stop
        piece = b"" if is_hidden else self._vocabulary.bytes_of(token_id)
        if self._borders is None:
            return self._match(self._decode(piece))
        unfinished = self._decoder.getstate()[0]
        if unfinished and not _goes_on(unfinished, piece[:1]):
            # One replacement, or two: those of half a surrogate pair wait as if a third byte could mend them.
            self._borders.part(len(unfinished.decode("utf-8", "replace")))
        self._borders.add(token_id, logprob)
        decoded = self._decode(piece)
        text = self._match(decoded)
        if self._is_cut:
            return self._borders.finish(text)
        is_whole = not self._decoder.getstate()[0]
        return self._borders.advance(n_decoded=len(decoded), is_whole=is_whole, text=text)

    def _match(self, text: str) -> str:
        if self._matcher is not None:
            text = self._matcher.feed(text, may_stop=self.n_tokens >= self._min_tokens)
        return self._let_through(text)

    def _let_through(self, text: str) -> str:
        if self._is_over is not None and text:
            self._has_enough = self._is_over(text)
        return text

    def _decode(self, piece: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(piece, final)
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text


def _goes_on(unfinished: bytes, byte: bytes) -> bool:
    """Whether an unfinished character may have this byte next."""
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(unfinished + byte)
    except UnicodeDecodeError:
        return False
    return True
