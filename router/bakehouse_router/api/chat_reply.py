"""The replies of `/v1/chat/completions`: messages, and the tool calls in them."""

from collections.abc import Callable
from typing import cast

from bakehouse_router.api.parsed_answer import finish_reason, parsed_deltas
from bakehouse_router.api.replies import ChoiceChunk
from bakehouse_router.api.token_json import Json, TokenReport, chat_logprobs, prompt_logprobs
from bakehouse_router.prompt_run import PromptReport, TextPiece
from bakehouse_router.text.stream import OutputToken
from bakehouse_router.text.tools.parser import CallDelta, ContentDelta, ParsedDelta, ToolCallParser


def _call_json(call: CallDelta) -> Json:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.call_id, "type": "function", "function": function}


def _said(parsed: ParsedDelta) -> Json:
    if isinstance(parsed, ContentDelta):
        return {"content": parsed.text}
    return {"tool_calls": [_call_json(parsed)]}


class ChatChoiceWriter:
    """The chunks of one choice: its role, then content and calls, then its finish.

    Tokens are told in the first chunk that follows them: a parser may hold back the text of some.
    """

    def __init__(
        self, index: int, prompt: PromptReport, report: TokenReport, parser: ToolCallParser | None
    ) -> None:
        self._index = index
        self._prompt = prompt
        self._report = report
        self._parser = parser
        self._has_begun = False
        self._untold: list[OutputToken] = []

    def write(self, piece: TextPiece) -> list[ChoiceChunk]:
        chunks = []
        if not self._has_begun:
            self._has_begun = True
            chunks.append(self._chunk({"role": "assistant", "content": ""}, beside=self._beside()))
        self._untold += piece.tokens
        chunks += [self._chunk(_said(parsed)) for parsed in parsed_deltas(self._parser, piece)]
        if piece.finish is not None:
            chunks.append(self._chunk({}, finish=finish_reason(self._parser, piece.finish)))
        return chunks

    def _chunk(self, delta: Json, *, finish: str | None = None, beside: Json | None = None) -> ChoiceChunk:
        tokens, self._untold = self._untold, []
        choice = {
            "index": self._index,
            "delta": delta,
            "logprobs": chat_logprobs(self._report, tokens),
            "finish_reason": finish,
        }
        if self._report.shows_ids:
            choice["token_ids"] = [token.token_id for token in tokens]
        return ChoiceChunk(choice=choice, beside=beside or {})

    def _beside(self) -> Json:
        """All choices of a chat have one prompt, which is told with the first."""
        if self._index != 0:
            return {}
        beside: Json = {}
        if self._report.n_prompt_top is not None:
            beside["prompt_logprobs"] = prompt_logprobs(
                self._report, self._prompt.token_ids, self._prompt.logprobs
            )
        if self._report.shows_ids:
            beside["prompt_token_ids"] = self._prompt.token_ids
        return beside


class ChatShape:
    """`/v1/chat/completions`; `new_parser` where calls are to be found in the answers."""

    chunk_kind = "chat.completion.chunk"
    whole_kind = "chat.completion"

    def __init__(self, report: TokenReport, new_parser: Callable[[], ToolCallParser] | None = None) -> None:
        self._report = report
        self._new_parser = new_parser

    def writer(self, choice: int, prompt: PromptReport) -> ChatChoiceWriter:
        parser = None if self._new_parser is None else self._new_parser()
        return ChatChoiceWriter(choice, prompt, self._report, parser)

    def merger(self) -> "ChatMerger":
        return ChatMerger()


class ChatMerger:
    """Adds up the chunks of one choice."""

    def __init__(self) -> None:
        self._first: ChoiceChunk | None = None
        self._content: list[str] = []
        self._calls: dict[object, _OpenCall] = {}
        self._logprobs: list[object] = []
        self._token_ids: list[object] = []
        self._finish: object = None

    def add(self, chunk: ChoiceChunk) -> None:
        choice = chunk.choice
        self._first = self._first or chunk
        self._finish = choice["finish_reason"]
        delta = cast("Json", choice["delta"])
        self._content.append(cast("str", delta.get("content", "")))
        for call in cast("list[Json]", delta.get("tool_calls", ())):
            if call["index"] not in self._calls:
                self._calls[call["index"]] = _OpenCall(call)
            self._calls[call["index"]].add(call)
        if choice["logprobs"] is not None:
            self._logprobs += cast("list[object]", cast("Json", choice["logprobs"])["content"])
        self._token_ids += cast("list[object]", choice.get("token_ids", ()))

    def whole(self) -> ChoiceChunk:
        assert self._first is not None, "a choice has one chunk at least"
        content = "".join(self._content)
        message: Json = {
            "role": "assistant",
            "content": content if content or not self._calls else None,
            "refusal": None,
        }
        if self._calls:
            message["tool_calls"] = [call.whole() for call in self._calls.values()]
        choice = {
            "index": self._first.choice["index"],
            "message": message,
            "logprobs": {"content": self._logprobs, "refusal": None} if self._logprobs else None,
            "finish_reason": self._finish,
        }
        if "token_ids" in self._first.choice:
            choice["token_ids"] = self._token_ids
        return ChoiceChunk(choice=choice, beside=self._first.beside)


class _OpenCall:
    """A call whose arguments are still coming."""

    def __init__(self, opening: Json) -> None:
        self._opening = opening
        self._arguments: list[str] = []

    def add(self, call: Json) -> None:
        self._arguments.append(cast("str", cast("Json", call["function"])["arguments"]))

    def whole(self) -> Json:
        function = cast("Json", self._opening["function"]) | {"arguments": "".join(self._arguments)}
        return {"id": self._opening["id"], "type": self._opening["type"], "function": function}
