"""From the words of the command line to a plan."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from bakehouse_replica.core.errors import StartupError

from bakehouse_cluster.bench.result import Load
from bakehouse_cluster.bench.traces import Trace, read_trace
from bakehouse_cluster.bench.workloads import PRESETS, FixedLengths, MixedLengths, SharedPrefixes, Workload

KINDS = ("fixed", "mixed", "shared-prefix", "trace")
DEFAULT_N_REQUESTS = 64
DEFAULT_N_USERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """As they stand on the command line; None: not given."""

    input_tokens: str | None = None
    output_tokens: str | None = None
    prefix_tokens: int | None = None
    prefixes: int | None = None
    n_requests: int | None = None
    trace: Path | None = None


def choose_workload(name: str, lengths: Lengths) -> Workload:
    """The preset or kind `name`. Raises `StartupError` where it is unknown or a length does not belong to it."""
    if name in PRESETS:
        _refuse(name, lengths, known=("n_requests",))
        workload = PRESETS[name].workload
        return workload if lengths.n_requests is None else _with_requests(workload, lengths.n_requests)
    if name == "trace":
        return _trace(lengths)
    n_requests = DEFAULT_N_REQUESTS if lengths.n_requests is None else lengths.n_requests
    if name == "fixed":
        _refuse(name, lengths, known=("n_requests", "input_tokens", "output_tokens"))
        return FixedLengths(
            n_requests=n_requests,
            n_input=_number("--input-tokens", lengths.input_tokens or "128"),
            n_output=_number("--output-tokens", lengths.output_tokens or "64"),
        )
    if name == "mixed":
        _refuse(name, lengths, known=("n_requests", "input_tokens", "output_tokens"))
        return MixedLengths(
            n_requests=n_requests,
            input_range=_range("--input-tokens", lengths.input_tokens or "16-256"),
            outputs=_numbers("--output-tokens", lengths.output_tokens or "8,16,32,128"),
        )
    if name == "shared-prefix":
        _refuse(name, lengths, known=("n_requests", "input_tokens", "output_tokens", "prefix_tokens", "prefixes"))
        return SharedPrefixes(
            n_requests=n_requests,
            n_prefix=lengths.prefix_tokens or 768,
            n_own=_number("--input-tokens", lengths.input_tokens or "32"),
            n_output=_number("--output-tokens", lengths.output_tokens or "32"),
            n_prefixes=lengths.prefixes or 1,
        )
    raise StartupError(f"--workload {name}: unknown; there are {', '.join((*PRESETS, *KINDS))}")


def choose_loads(
    name: str, workload: Workload, *, concurrency: str | None, rate: str | None, speed: str | None
) -> tuple[Load, ...]:
    """The loads asked for, or else that of the preset or trace. Raises `StartupError` for wrong numbers."""
    loads = [
        *(Load(kind="concurrency", value=n) for n in _numbers("--concurrency", concurrency or "")),
        *(Load(kind="rate", value=value) for value in _values("--rate", rate or "")),
        *(Load(kind="speed", value=value) for value in _values("--speed", speed or "")),
    ]
    if speed is not None and not (isinstance(workload, Trace) and workload.has_times):
        raise StartupError("--speed needs a trace with times of arrival; give --concurrency or --rate")
    if loads:
        return tuple(loads)
    if isinstance(workload, Trace) and workload.has_times:
        return (Load(kind="speed", value=1),)
    return (Load(kind="concurrency", value=PRESETS[name].n_users if name in PRESETS else DEFAULT_N_USERS),)


def _with_requests(workload: Workload, n_requests: int) -> Workload:
    assert isinstance(workload, FixedLengths | MixedLengths | SharedPrefixes), "presets are of these kinds"
    return replace(workload, n_requests=n_requests)


def _trace(lengths: Lengths) -> Trace:
    _refuse("trace", lengths, known=("n_requests", "trace"))
    if lengths.trace is None:
        raise StartupError("--workload trace needs --trace FILE")
    trace = read_trace(lengths.trace)
    return trace if lengths.n_requests is None else replace(trace, lines=trace.lines[: lengths.n_requests])


def _refuse(name: str, lengths: Lengths, *, known: tuple[str, ...]) -> None:
    for field, option in (
        ("input_tokens", "--input-tokens"),
        ("output_tokens", "--output-tokens"),
        ("prefix_tokens", "--prefix-tokens"),
        ("prefixes", "--prefixes"),
        ("trace", "--trace"),
    ):
        if field not in known and getattr(lengths, field) is not None:
            raise StartupError(f"{option} is not for --workload {name}")


def _number(option: str, text: str) -> int:
    numbers = _numbers(option, text)
    if len(numbers) != 1:
        raise StartupError(f"{option} {text}: one number is needed here")
    return numbers[0]


def _numbers(option: str, text: str) -> tuple[int, ...]:
    values = _values(option, text)
    for value in values:
        if value != int(value):
            raise StartupError(f"{option}: {value:g} is not a whole number")
    return tuple(map(int, values))


def _values(option: str, text: str) -> tuple[float, ...]:
    return tuple(_above_zero(option, part) for part in text.split(",")) if text else ()


def _range(option: str, text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    low, high = _number(option, first), _number(option, last or first)
    if low > high:
        raise StartupError(f"{option} {text}: the smaller number comes first")
    return low, high


def _above_zero(option: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise StartupError(f"{option}: {text!r} is no number") from None
    if not 0 < number < float("inf"):
        raise StartupError(f"{option}: {text} is not above 0")
    return number


def read_extra_body(text: str | None) -> dict[str, object]:
    """`--extra-body`. Raises `StartupError` where it is not a JSON object."""
    try:
        tree = json.loads(text or "{}")
        json.dumps(tree, ensure_ascii=False, allow_nan=False).encode()  # else neither request nor file can hold it
    except (ValueError, RecursionError) as error:
        raise StartupError(f"--extra-body {text}: {error}") from error
    if not isinstance(tree, dict):
        raise StartupError(f"--extra-body {text}: not a JSON object")
    return tree
