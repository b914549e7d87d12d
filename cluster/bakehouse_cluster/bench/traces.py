"""Recorded traffic as a workload: one JSON object a line.

    {"arrival_s": 0.0, "input_tokens": 120, "output_tokens": 64}
    {"arrival_s": 0.4, "prompt": "Once upon a time", "output_tokens": 16}
    {"arrival_s": 1.1, "token_ids": [504, 253, 18], "output_tokens": 8}
    {"arrival_s": 1.1, "messages": [{"role": "user", "content": "Hello"}], "output_tokens": 8}

`arrival_s`, in seconds from the start and never falling, may be left out of all lines: such a trace has no times
of its own. Each line has `output_tokens` and one of the four kinds of prompt; for `input_tokens` one is written.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Annotated, ClassVar, Self

from bakehouse_replica.core.errors import StartupError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bakehouse_cluster.bench.workloads import Demand, Messages, Parameters, Workload

_PROMPTS = ("input_tokens", "prompt", "token_ids", "messages")


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    role: str
    content: str


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    output_tokens: Annotated[int, Field(ge=1)]
    arrival_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    input_tokens: Annotated[int, Field(ge=1)] | None = None
    prompt: Annotated[str, Field(min_length=1)] | None = None
    token_ids: Annotated[tuple[int, ...], Field(min_length=1)] | None = None
    messages: Annotated[tuple[_Message, ...], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _has_one_prompt(self) -> Self:
        if sum(getattr(self, name) is not None for name in _PROMPTS) != 1:
            raise ValueError(f"needs exactly one of {', '.join(_PROMPTS)}")
        return self

    def demand(self, origin: str) -> Demand:
        messages = None
        if self.messages is not None:
            messages = Messages(tuple((one.role, one.content) for one in self.messages))
        return Demand(
            n_output=self.output_tokens,
            n_input=self.input_tokens,
            given=self.prompt or self.token_ids or messages,
            arrival_s=self.arrival_s,
            origin=origin,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The requests of a trace file, in its order. `digest`: of the file's bytes."""

    kind: ClassVar[str] = "trace"

    file_name: str
    digest: str
    lines: tuple[Demand, ...]

    @property
    def n_requests(self) -> int:
        """One for each line."""
        return len(self.lines)

    @property
    def has_times(self) -> bool:
        """Whether it says when its requests come."""
        return self.lines[0].arrival_s is not None

    def demands(self, n_requests: int, draw: Random) -> tuple[Demand, ...]:
        """Its first ones; from the top again where more are wanted."""
        return tuple(self.lines[index % len(self.lines)] for index in range(n_requests))

    def parameters(self) -> Parameters:
        """The file's content, by digest."""
        return {"digest": self.digest, "n_requests": self.n_requests}


def read_trace(path: Path) -> Trace:
    """Raises `StartupError`, in one line that names the line of the file, where it is wrong."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StartupError(f"trace {path}: {error.strerror}") from error
    lines = tuple(_read_lines(content, path))
    if not lines:
        raise StartupError(f"trace {path}: no requests in it")
    _require_order(lines, path)
    return Trace(file_name=path.name, digest=blake2b(content, digest_size=16).hexdigest(), lines=lines)


def require_sendable(workload: Workload, *, is_chat: bool) -> None:
    """Raises `StartupError`, which names the line, where a trace has a prompt that this API cannot be asked by."""
    for demand in workload.lines if isinstance(workload, Trace) else ():
        if isinstance(demand.given, Messages) and not is_chat:
            raise StartupError(f"{demand.origin}: messages need --chat")
        if isinstance(demand.given, tuple) and is_chat:
            raise StartupError(f"{demand.origin}: token_ids cannot be asked in a chat; leave out --chat")


def _read_lines(content: bytes, path: Path) -> Iterator[Demand]:
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        origin = f"trace {path}, line {number}"
        try:
            yield _Line.model_validate_json(line).demand(origin)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise StartupError(f"{origin}: {f'{where}: ' if where else ''}{first['msg']}") from error


def _require_order(lines: tuple[Demand, ...], path: Path) -> None:
    times = [line.arrival_s for line in lines if line.arrival_s is not None]
    if len(times) not in (0, len(lines)):
        raise StartupError(f"trace {path}: arrival_s stands in some lines and not in others")
    if times != sorted(times):
        raise StartupError(f"trace {path}: arrival_s falls; sort the lines by it")
