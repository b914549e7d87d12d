"""Tokens and their log-probabilities as the two OpenAI routes, and vLLM's extensions of them, show them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bakehouse_replica.core.types import TokenLogprob

from bakehouse_router.text.stream import OutputToken

Json = dict[str, object]

# What OpenAI writes for a token that cannot be; JSON has no infinity.
_LEAST_LOGPROB = -9999.0


class TokenNames(Protocol):
    """How token ids read; a `Vocabulary` is one."""

    def bytes_of(self, token_id: int) -> bytes:
        """What the token adds to a text; nothing where it is special."""
        ...

    def name_of(self, token_id: int) -> str:
        """How a token that adds nothing to a text is called."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReport:
    """What a client wants to see of the tokens.

    `n_top`: the alternatives at each token of the answer, None where no log-probabilities are asked for;
    `n_prompt_top` likewise for the prompt. `shows_ids`: token ids, of the prompt too. `echoes`: each choice's
    first piece is its prompt.
    """

    names: TokenNames
    n_top: int | None = None
    n_prompt_top: int | None = None
    shows_ids: bool = False
    echoes: bool = False

    def text_of(self, token_id: int) -> str:
        """A token by itself: bytes that are no character alone read as replacement characters."""
        spelled = self.names.bytes_of(token_id)
        return spelled.decode("utf-8", "replace") if spelled else self.names.name_of(token_id)


def _told(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def _chat_token(report: TokenReport, token_id: int, logprob: float) -> Json:
    spelled = report.names.bytes_of(token_id)
    return {"token": report.text_of(token_id), "logprob": _told(logprob), "bytes": list(spelled)}


def chat_logprobs(report: TokenReport, tokens: Sequence[OutputToken]) -> Json | None:
    """`logprobs` of a chat choice or of one of its chunks; None where none are asked for or there is no token."""
    if report.n_top is None or not tokens:
        return None
    content = []
    for token in tokens:
        if token.logprob is not None:
            top = [_chat_token(report, token_id, logprob) for token_id, logprob in token.logprob.top]
            content.append(_chat_token(report, token.token_id, token.logprob.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(report: TokenReport, tokens: Sequence[OutputToken]) -> Json | None:
    """`logprobs` of a completion choice or of one of its chunks, None as above.

    The alternatives are keyed by text: of several that read alike the likeliest is shown. The token itself is
    always among them.
    """
    if report.n_top is None or not tokens:
        return None
    return {
        "tokens": [report.text_of(token.token_id) for token in tokens],
        "token_logprobs": [None if token.logprob is None else _told(token.logprob.logprob) for token in tokens],
        "top_logprobs": [_alternatives(report, token.token_id, token.logprob) for token in tokens],
        "text_offset": [token.text_offset for token in tokens],
    }


def _alternatives(report: TokenReport, token_id: int, logprob: TokenLogprob | None) -> dict[str, float] | None:
    if logprob is None:
        return None
    by_text: dict[str, float] = {}
    for other_id, other in (*logprob.top, (token_id, logprob.logprob)):
        by_text.setdefault(report.text_of(other_id), _told(other))
    return by_text


def prompt_logprobs(
    report: TokenReport, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> list[Json | None]:
    """vLLM's `prompt_logprobs`: an entry for each prompt token, null for the first, by token id."""
    assert len(logprobs) == len(token_ids) - 1, "one for each prompt token but the first"
    rows: list[Json | None] = [None]
    for token_id, logprob in zip(token_ids[1:], logprobs, strict=True):
        row = {str(token_id): _prompt_token(report, token_id, logprob.logprob, logprob.rank)}
        for rank, (other_id, other) in enumerate(logprob.top, start=1):
            row.setdefault(str(other_id), _prompt_token(report, other_id, other, rank))
        rows.append(dict(row))
    return rows


def _prompt_token(report: TokenReport, token_id: int, logprob: float, rank: int) -> Json:
    return {"logprob": _told(logprob), "rank": rank, "decoded_token": report.text_of(token_id)}
