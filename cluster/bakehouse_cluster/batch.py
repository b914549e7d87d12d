"""`bakehouse generate`: a file of prompts in, a file of answers out, in this process and without Ray.

A line is either *plain*, a JSON object with `prompt` or `messages` and any field of the HTTP request of that kind,
or an *OpenAI Batch* line, `{"custom_id", "method", "url", "body"}`. Plain lines are answered by
`{"line", "text", "finish_reason", "usage"}`, Batch lines by OpenAI's Batch output lines. A line that cannot be
served is answered by its error, and the others go on.

Answers are written as they come, so the output's order is not the input's: a line is known by its `custom_id`
where it has one (plain lines may), else by its number, from 1. The output file is also the record of what is done:
a second run skips what it holds, and takes away a last line that was cut off in the middle.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, cast

from bakehouse_replica.core.errors import InvalidRequest, StartupError
from bakehouse_router.api.answers import whole_reply
from bakehouse_router.api.bodies import chat_call, completion_call
from bakehouse_router.api.chat_reply import ChatShape
from bakehouse_router.api.completion_reply import CompletionShape
from bakehouse_router.api.errors import problem_of
from bakehouse_router.api.generating import token_report
from bakehouse_router.api.json_body import parse_object
from bakehouse_router.api.parse import parse_body
from bakehouse_router.api.replies import ReplyHead, ReplyShape
from bakehouse_router.api.schema import ChatBody, CompletionBody
from bakehouse_router.api.token_json import Json
from bakehouse_router.calls import Call
from bakehouse_router.gateway import Gateway

CHAT_URL = "/v1/chat/completions"
COMPLETION_URL = "/v1/completions"
HTTP_OK = 200
# How each line of an output begins, as `json.dumps` writes it: a torn last line is known by it.
ANSWER_BEGINNINGS = (b'{"line": ', b'{"custom_id": ', b'{"id": "batch-')
Key = str | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the input. `custom_id` None: the line is known by its number."""

    number: int
    custom_id: str | None
    content: bytes

    @property
    def key(self) -> Key:
        """What its answer is found by."""
        return self.number if self.custom_id is None else self.custom_id


def read_lines(path: Path) -> Iterator[Line]:
    """The lines that are not blank, in order."""
    with path.open("rb") as file:
        for number, content in enumerate(file, start=1):
            if content.strip():
                yield Line(number=number, custom_id=_custom_id(content), content=content)


def _custom_id(content: bytes) -> str | None:
    """The line's own id, as far as it can be read: what is wrong with a line is told when it is its turn."""
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        return None
    custom_id = fields.get("custom_id") if isinstance(fields, dict) else None
    return custom_id if isinstance(custom_id, str) else None


def count_lines(path: Path) -> int:
    """How many answers `path` asks for. Raises `StartupError` where it cannot be read or an id stands twice."""
    seen: dict[str, int] = {}
    n_lines = 0
    try:
        for line in read_lines(path):
            n_lines += 1
            if line.custom_id is not None:
                first = seen.setdefault(line.custom_id, line.number)
                if first != line.number:
                    raise StartupError(
                        f"{path}: custom_id {line.custom_id!r} stands in lines {first} and {line.number}"
                    )
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}") from error
    return n_lines


def answered_keys(path: Path) -> set[Key]:
    """The keys that the output at `path` holds; cuts off a last line that a killed run left unfinished.

    Raises `StartupError`, and changes nothing, where a line is not an answer: the file is then something else.
    """
    if not path.exists():
        return set()
    if not path.is_file():
        raise StartupError(f"{path} is not a regular file; answers are added to what a file holds already")
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    torn = content[len(whole) :]
    if not torn.startswith(ANSWER_BEGINNINGS) and not any(begin.startswith(torn) for begin in ANSWER_BEGINNINGS):
        raise StartupError(f"{path}: its last line is not an answer of an earlier run")
    keys: set[Key] = set()
    for number, text in enumerate(whole.splitlines(), start=1):
        try:
            answer = json.loads(text)
            keys.add(answer["custom_id"] if "custom_id" in answer else answer["line"])
        except (ValueError, TypeError, KeyError) as error:
            raise StartupError(f"{path}: line {number} is not an answer of an earlier run") from error
    if torn:
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return keys


async def answer_all(
    gateway: Gateway, lines: Iterator[Line], output: TextIO, *, n_in_flight: int, on_answer: Callable[[], None]
) -> int:
    """Answer the lines, at most `n_in_flight` at a time; returns how many were answered by an error."""
    n_errors = 0

    async def work() -> None:
        nonlocal n_errors
        for line in lines:  # shared by all workers: each takes the next one
            answer, is_error = await _answer(gateway, line)
            n_errors += is_error
            output.write(json.dumps(answer, ensure_ascii=False) + "\n")
            output.flush()
            on_answer()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(n_in_flight):
                group.create_task(work())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return n_errors


async def _answer(gateway: Gateway, line: Line) -> tuple[Json, bool]:
    """The answer's record, and whether it is an error."""
    call_id = f"batch-{secrets.token_hex(12)}"
    is_batch = False
    try:
        fields = parse_object(line.content)
        is_batch = "body" in fields
        url, body = _batch_body(fields) if is_batch else _plain_body(fields, gateway.model_name)
        reply = await _reply(gateway, url, body, call_id)
    except Exception as error:
        problem = problem_of(error, call_id)
        if problem.status >= 500:  # the model or we have failed: no line after this one would fare better
            raise
        if is_batch:
            return _batch_answer(line, call_id, problem.status, problem.envelope()), True
        return _label(line) | problem.envelope(), True
    if is_batch:
        return _batch_answer(line, call_id, HTTP_OK, reply), False
    return _plain_answer(line, reply), False


async def _reply(gateway: Gateway, url: str, body: Json, call_id: str) -> Json:
    if body.get("stream"):
        raise InvalidRequest("stream is true; a batch answers in whole", "stream")
    head = ReplyHead(reply_id=call_id, created=int(time.time()), model=gateway.model_name)
    call: Call
    shape: ReplyShape
    if url == CHAT_URL:
        call = chat_call(parse_body(ChatBody, body), gateway.settings)
        shape = ChatShape(token_report(call, gateway), gateway.new_parser(call))
    else:
        call = completion_call(parse_body(CompletionBody, body), gateway.settings)
        shape = CompletionShape(token_report(call, gateway))
    return await whole_reply(await gateway.start(call, call_id), shape, head)


def _batch_body(fields: Json) -> tuple[str, Json]:
    custom_id, url, body = fields.get("custom_id"), fields.get("url"), fields["body"]
    if not isinstance(custom_id, str):
        raise InvalidRequest("custom_id is required; it must be a string", "custom_id")
    if fields.get("method", "POST") != "POST":
        raise InvalidRequest(f"method is {fields['method']!r}; it must be 'POST'", "method")
    if url not in (CHAT_URL, COMPLETION_URL):
        raise InvalidRequest(f"url is {url!r}; it must be {CHAT_URL!r} or {COMPLETION_URL!r}", "url")
    if not isinstance(body, dict):
        raise InvalidRequest("body must be a JSON object", "body")
    return str(url), body


def _plain_body(fields: Json, model_name: str) -> tuple[str, Json]:
    if ("prompt" in fields) == ("messages" in fields):
        raise InvalidRequest("a line needs either prompt or messages", "prompt")
    body: Json = {"model": model_name} | {name: value for name, value in fields.items() if name != "custom_id"}
    if body.get("n", 1) != 1:
        raise InvalidRequest("n must be 1 in a plain line; a Batch line may ask for more", "n")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and not all(isinstance(part, int) for part in prompt):
        raise InvalidRequest("prompt must be one prompt in a plain line: a text or token ids", "prompt")
    return (CHAT_URL if "messages" in fields else COMPLETION_URL), body


def _label(line: Line) -> Json:
    return {"line": line.number} if line.custom_id is None else {"custom_id": line.custom_id}


def _batch_answer(line: Line, call_id: str, status: int, body: Json) -> Json:
    response = {"status_code": status, "request_id": call_id, "body": body}
    return {"id": call_id} | _label(line) | {"response": response, "error": None}


def _plain_answer(line: Line, reply: Json) -> Json:
    (choice,) = cast("list[Json]", reply["choices"])
    answer = _label(line)
    if "text" in choice:
        answer["text"] = choice["text"]
    else:
        message = cast("Json", choice["message"])
        answer["text"] = message["content"]
        if "tool_calls" in message:
            answer["tool_calls"] = message["tool_calls"]
    return answer | {"finish_reason": choice["finish_reason"], "usage": reply["usage"]}
