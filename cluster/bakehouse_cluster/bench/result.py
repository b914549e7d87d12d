"""The outcome of a benchmark, and the JSON file that keeps it (format `bakehouse-bench`, version 2).

The file is the dataclass `Result` as it stands, field by field; times in seconds.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bakehouse_replica.core.errors import StartupError
from pydantic import TypeAdapter, ValidationError

from bakehouse_cluster.bench.records import ANSWERED
from bakehouse_cluster.bench.statistics import Summary
from bakehouse_cluster.bench.workloads import Parameters, PromptForm

_UNITS = {"concurrency": " at once", "rate": "/s", "speed": "x"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How requests come: `concurrency`: so many users in a closed loop; `rate`: so many requests a second, at
    random times (Poisson); `speed`: at the times of a trace, so many times as fast.
    """

    kind: Literal["concurrency", "rate", "speed"]
    value: float

    @property
    def label(self) -> str:
        """For tables, and to tell loads apart."""
        return f"{self.value:g}{_UNITS[self.kind]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement. `n_planned`: requests; `n_input_planned`, `n_output_planned`: their tokens as planned.

    `prompts_digest`: equal where the very same requests were sent. `warmup`: what ran before, uncounted, in words;
    `n_warmup`: how many requests that were.
    `generator_cpu_s`: CPU time of the load generator itself. `is_partial`: it was interrupted.
    """

    load: Load
    n_planned: int
    n_input_planned: int
    n_output_planned: int
    prompts_digest: str
    n_warmup: int
    warmup: str
    generator_cpu_s: float
    is_partial: bool
    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What was asked; two results can be compared where this and each load's number of warm-up requests are equal.

    `parameters`: lengths and numbers. `warms_prefixes`: the warm-up begins with the measured requests' shared
    prefixes, so that these are cached.
    """

    name: str
    kind: str
    parameters: Parameters
    seed: int
    api: Literal["completions", "chat"]
    ignores_eos: bool
    warms_prefixes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where and with what it was measured. `label`: what the user calls the system. `server`: what it says of
    itself.

    `request_fields`: of a request beside its prompt. `tokenizer`: which counted the prompts.
    """

    date: str
    label: str
    url: str
    model: str
    server: str
    tokenizer: str
    prompt_form: PromptForm
    request_fields: dict[str, object]
    software: dict[str, str]
    platform: str
    n_cpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All measurements of one call."""

    environment: Environment
    work: Work
    points: tuple[Point, ...]
    format: Literal["bakehouse-bench"] = "bakehouse-bench"
    version: Literal[2] = 2

    @property
    def is_partial(self) -> bool:
        """Whether it was interrupted."""
        return not self.points or any(point.is_partial for point in self.points)

    @property
    def n_answered(self) -> int:
        """Requests whose tokens and latencies count."""
        return sum(point.summary.outcomes.get(outcome, 0) for point in self.points for outcome in ANSWERED)


_ADAPTER = TypeAdapter(Result)


def require_writable(path: Path) -> None:
    """Raises `StartupError` where a file cannot be written at `path`, which is tried without changing anything."""
    if not path.parent.is_dir():
        raise StartupError(f"{path}: there is no folder {path.parent}")
    is_new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise StartupError(f"{path} cannot be written: {error.strerror}") from error


def write_result(result: Result, path: Path) -> None:
    """Raises `StartupError` where the file cannot be written; it says where the result is instead."""
    content = _ADAPTER.dump_json(result, indent=2) + b"\n"
    try:
        path.write_bytes(content)
    except OSError as error:
        raise StartupError(f"{path} cannot be written: {error.strerror}; {_kept(content)}") from error


def _kept(content: bytes) -> str:
    try:
        with tempfile.NamedTemporaryFile(prefix="bakehouse-bench-", suffix=".json", delete=False) as file:
            file.write(content)
    except OSError as error:
        return f"nor can a temporary file: {error.strerror}"
    return f"the result is in {file.name}"


def read_result(path: Path) -> Result:
    """Raises `StartupError` where the file cannot be read or is not such a result."""
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise StartupError(
            f"{path} is no result of this version of `bakehouse bench --output`: {where}: {first['msg']}"
        ) from error
