"""Answers of the HTTP face as tests read them: one record, whether streamed or whole, of whichever route."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DONE = "[DONE]"

Json = dict[str, object]


@dataclass(slots=True)
class Choice:
    """One choice. `pieces`: the text of each chunk that had any. `finishes`: every finish reason it was given."""

    pieces: list[str] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    chunk_ids: list[list[int]] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    tool_calls: list[Json] = field(default_factory=list)
    prompt_logprobs: list[Json | None] | None = None

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self.pieces)

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Its tool calls, by name and arguments."""
        names: dict[object, str] = {}
        arguments: dict[object, str] = {}
        for position, call in enumerate(self.tool_calls):
            index = call.get("index", position)
            function = cast("dict[str, str]", call["function"])
            names.setdefault(index, function.get("name", ""))
            arguments[index] = arguments.get(index, "") + function["arguments"]
        return [(names[index], arguments[index]) for index in names]

    @property
    def finish(self) -> str | None:
        """The one reason why it ended, None where it did not."""
        assert len(self.finishes) <= 1, f"it ended {len(self.finishes)} times: {self.finishes}"
        return self.finishes[0] if self.finishes else None


@dataclass(slots=True)
class Answer:
    """A whole answer. `usages`: all token counts, in order. `error`: the envelope's content."""

    status: int
    choices: dict[int, Choice] = field(default_factory=dict)
    usages: list[Json] = field(default_factory=list)
    error: Json | None = None
    is_done: bool = False
    headers: httpx.Headers = field(default_factory=httpx.Headers)

    @property
    def choice(self) -> Choice:
        """The only one."""
        assert list(self.choices) == [0], f"status {self.status}, error {self.error}, choices {list(self.choices)}"
        return self.choices[0]

    @property
    def usage(self) -> Json:
        """The final counts."""
        assert self.usages, f"status {self.status}, error {self.error}: no usage"
        return self.usages[-1]

    def count(self, name: str) -> int:
        """One of the final counts, by its name."""
        return cast("int", self.usage[name])

    def complaint(self) -> str:
        """An error's message."""
        assert self.error is not None, f"status {self.status} without an error"
        return str(self.error["message"])


async def ask(client: httpx.AsyncClient, body: Json, *, headers: dict[str, str] | None = None) -> Answer:
    """The answer to a body, which goes to the chat route where it has `messages`."""
    path = CHAT if "messages" in body else COMPLETIONS
    reply = await client.post(path, json={"model": "scripted", **body}, headers=headers)
    return read(reply.status_code, reply.text, reply.headers)


class OpenStream:
    """A stream that is read as far as a test wants."""

    def __init__(self, reply: httpx.Response) -> None:
        self.answer = Answer(status=reply.status_code, headers=reply.headers)
        self._parts = reply.aiter_text()
        self._buffered = ""

    async def advance(self) -> None:
        """Read up to the next event."""
        while "\n\n" not in self._buffered:
            self._buffered += await anext(self._parts)
        frame, self._buffered = self._buffered.split("\n\n", 1)
        take_frame(self.answer, frame)

    async def rest(self) -> Answer:
        """Read to the end."""
        while not self.answer.is_done:
            await self.advance()
        return self.answer


@asynccontextmanager
async def opened(client: httpx.AsyncClient, body: Json) -> AsyncGenerator[OpenStream, None]:
    """The stream that a body asks for; leaving it early hangs up."""
    path = CHAT if "messages" in body else COMPLETIONS
    async with client.stream("POST", path, json={"model": "scripted", "stream": True, **body}) as reply:
        yield OpenStream(reply)


def read(status: int, content: str, headers: httpx.Headers | None = None) -> Answer:
    """The answer in a body of JSON or of server-sent events."""
    answer = Answer(status=status, headers=headers or httpx.Headers())
    if content.startswith(("data:", ":")):
        for frame in content.split("\n\n")[:-1]:
            take_frame(answer, frame)
    else:
        _take(answer, json.loads(content))
    return answer


def take_frame(answer: Answer, frame: str) -> None:
    """Add one event to an answer."""
    assert not answer.is_done, f"{frame!r} after the end"
    if frame.startswith(":"):
        return
    assert frame.startswith("data: "), frame
    payload = frame.removeprefix("data: ")
    if payload == DONE:
        answer.is_done = True
    else:
        _take(answer, json.loads(payload))


def _take(answer: Answer, body: Json) -> None:
    if "error" in body:
        assert answer.error is None, "two errors"
        answer.error = cast("Json", body["error"])
        assert set(answer.error) == {"message", "type", "param", "code"}
    if body.get("usage") is not None:
        answer.usages.append(cast("Json", body["usage"]))
    for told in cast("list[Json]", body.get("choices", [])):
        choice = answer.choices.setdefault(cast("int", told["index"]), Choice())
        _take_choice(choice, told)
        if "prompt_logprobs" in body:
            choice.prompt_logprobs = cast("list[Json | None]", body["prompt_logprobs"])


def _take_choice(choice: Choice, told: Json) -> None:
    said = cast("Json", told.get("delta") or told.get("message") or {"content": told.get("text")})
    if said.get("content"):
        choice.pieces.append(str(said["content"]))
    choice.tool_calls += cast("list[Json]", said.get("tool_calls") or [])
    if told.get("finish_reason") is not None:
        choice.finishes.append(str(told["finish_reason"]))
    if told.get("token_ids"):
        choice.chunk_ids.append(cast("list[int]", told["token_ids"]))
        choice.token_ids += choice.chunk_ids[-1]
    if told.get("prompt_logprobs") is not None:
        choice.prompt_logprobs = cast("list[Json | None]", told["prompt_logprobs"])
    if told.get("logprobs") is not None:
        choice.logprobs += _logprobs(cast("Json", told["logprobs"]))


def _logprobs(told: Json) -> list[Json]:
    """One record for each token, in either route's shape."""
    if "content" in told:
        return cast("list[Json]", told["content"])
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    rows = zip(*(cast("list[object]", told[column]) for column in columns), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]
