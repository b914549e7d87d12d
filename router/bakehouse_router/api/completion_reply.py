"""The replies of `/v1/completions`: text that continues a prompt."""

from typing import cast

from bakehouse_replica.core.types import FinishReason

from bakehouse_router.api.replies import ChoiceChunk
from bakehouse_router.api.token_json import Json, TokenReport, completion_logprobs, prompt_logprobs
from bakehouse_router.prompt_run import PromptReport, TextPiece
from bakehouse_router.text.stream import OutputToken


class CompletionChoiceWriter:
    """The chunks of one choice: its prompt where it is echoed, its text, its finish."""

    def __init__(self, index: int, prompt: PromptReport, report: TokenReport) -> None:
        self._index = index
        self._report = report
        self._awaits_echo = report.echoes
        self._prompt_json = _prompt_json(report, prompt)
        self._untold: list[OutputToken] = []
        self._untold_ids: list[int] = []

    def write(self, piece: TextPiece) -> list[ChoiceChunk]:
        is_prompt, self._awaits_echo = self._awaits_echo, False
        self._untold += piece.tokens
        if not is_prompt:
            self._untold_ids += [token.token_id for token in piece.tokens]
        chunks = []
        if piece.text:
            chunks.append(self._chunk(piece.text))
        if piece.finish is not None:
            chunks.append(self._chunk("", finish=piece.finish))
        return chunks

    def _chunk(self, text: str, *, finish: FinishReason | None = None) -> ChoiceChunk:
        tokens, self._untold = self._untold, []
        token_ids, self._untold_ids = self._untold_ids, []
        prompt_json, self._prompt_json = self._prompt_json, {}
        choice = {
            "index": self._index,
            "text": text,
            "logprobs": completion_logprobs(self._report, tokens),
            "finish_reason": finish,
        }
        if self._report.shows_ids:
            choice["token_ids"] = token_ids
        return ChoiceChunk(choice=choice | prompt_json, beside={})


class CompletionShape:
    """`/v1/completions`."""

    chunk_kind = whole_kind = "text_completion"

    def __init__(self, report: TokenReport) -> None:
        self._report = report

    def writer(self, choice: int, prompt: PromptReport) -> CompletionChoiceWriter:
        return CompletionChoiceWriter(choice, prompt, self._report)

    def merger(self) -> "CompletionMerger":
        return CompletionMerger()


class CompletionMerger:
    """Adds up the chunks of one choice."""

    def __init__(self) -> None:
        self._first: Json = {}
        self._texts: list[str] = []
        self._logprobs: dict[str, list[object]] = {}
        self._token_ids: list[object] = []
        self._finish: object = None

    def add(self, chunk: ChoiceChunk) -> None:
        choice = chunk.choice
        self._first = self._first or choice
        self._finish = choice["finish_reason"]
        self._texts.append(cast("str", choice["text"]))
        if choice["logprobs"] is not None:
            for name, entries in cast("dict[str, list[object]]", choice["logprobs"]).items():
                self._logprobs.setdefault(name, []).extend(entries)
        self._token_ids += cast("list[object]", choice.get("token_ids", ()))

    def whole(self) -> ChoiceChunk:
        choice = self._first | {
            "text": "".join(self._texts),
            "logprobs": self._logprobs or None,
            "finish_reason": self._finish,
        }
        if "token_ids" in self._first:
            choice["token_ids"] = self._token_ids
        return ChoiceChunk(choice=choice, beside={})


def _prompt_json(report: TokenReport, prompt: PromptReport) -> Json:
    told: Json = {}
    if report.n_prompt_top is not None:
        told["prompt_logprobs"] = prompt_logprobs(report, prompt.token_ids, prompt.logprobs)
    if report.shows_ids:
        told["prompt_token_ids"] = prompt.token_ids
    return told
