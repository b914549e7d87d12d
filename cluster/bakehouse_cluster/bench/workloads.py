"""What is asked of a server: how long each prompt and each answer is, and what prompts share.

All of it follows from the workload and a seed, by pure functions, so that every system gets the same work.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from random import Random
from typing import ClassVar, Protocol

Parameters = dict[str, str | int | tuple[int, ...]]


class PromptForm(StrEnum):
    """How a prompt is sent: as text, which all servers take, or as the token ids of the same text."""

    TEXT = "text"
    IDS = "ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One request, before its prompt is written; lengths in tokens.

    `n_input`: of the whole prompt, None where the prompt is given. `prefix_id` and `n_prefix`: the shared
    beginning, by number, which is part of `n_input`. `given`: a prompt's text, its ids, or chat messages.
    `arrival_s`: from the start. `origin`: which line of which file asks for it, "" for none.
    """

    n_output: int
    n_input: int | None = None
    prefix_id: int | None = None
    n_prefix: int = 0
    given: "str | tuple[int, ...] | Messages | None" = None
    arrival_s: float | None = None
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Messages:
    """A chat, as (role, content) of each message."""

    turns: tuple[tuple[str, str], ...]


class Workload(Protocol):
    """A kind of work."""

    kind: ClassVar[str]

    @property
    def n_requests(self) -> int:
        """How many requests one measurement makes."""
        ...

    def demands(self, n_requests: int, draw: Random) -> tuple[Demand, ...]:
        """So many requests of this kind, in the order in which they are sent."""
        ...

    def parameters(self) -> Parameters:
        """What makes it this workload, for the record."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedLengths:
    """Every prompt and every answer as long as every other."""

    kind: ClassVar[str] = "fixed"

    n_requests: int
    n_input: int
    n_output: int

    def demands(self, n_requests: int, draw: Random) -> tuple[Demand, ...]:
        """All alike."""
        return (Demand(n_input=self.n_input, n_output=self.n_output),) * n_requests

    def parameters(self) -> Parameters:
        """Its fields."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedLengths:
    """Prompts of any length from one to the other of `input_range`, answers of each of `outputs` equally often."""

    kind: ClassVar[str] = "mixed"

    n_requests: int
    input_range: tuple[int, int]
    outputs: tuple[int, ...]

    def demands(self, n_requests: int, draw: Random) -> tuple[Demand, ...]:
        """Shuffled; where the requests cannot be dealt out evenly, the first of `outputs` come once more."""
        n_outputs = [self.outputs[index % len(self.outputs)] for index in range(n_requests)]
        draw.shuffle(n_outputs)
        return tuple(Demand(n_input=draw.randint(*self.input_range), n_output=n_output) for n_output in n_outputs)

    def parameters(self) -> Parameters:
        """Its fields."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """Prompts of `n_prefix` tokens that many share, then `n_own` of their own; `n_prefixes` different prefixes."""

    kind: ClassVar[str] = "shared-prefix"

    n_requests: int
    n_prefix: int
    n_own: int
    n_output: int
    n_prefixes: int = 1

    def demands(self, n_requests: int, draw: Random) -> tuple[Demand, ...]:
        """The prefixes take turns."""
        one = Demand(n_input=self.n_prefix + self.n_own, n_output=self.n_output, n_prefix=self.n_prefix)
        return tuple(replace(one, prefix_id=index % self.n_prefixes) for index in range(n_requests))

    def parameters(self) -> Parameters:
        """Its fields."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named workload, and how many users send it at once."""

    workload: Workload
    n_users: int


PRESETS = {
    "W1": Preset(workload=FixedLengths(n_requests=4, n_input=64, n_output=64), n_users=1),
    "W2": Preset(workload=FixedLengths(n_requests=64, n_input=128, n_output=64), n_users=32),
    "W3": Preset(workload=SharedPrefixes(n_requests=32, n_prefix=768, n_own=32, n_output=32), n_users=16),
    "W4": Preset(
        workload=MixedLengths(n_requests=48, input_range=(16, 256), outputs=(8, 16, 32, 128)), n_users=16
    ),
}


def poisson_arrivals(n_requests: int, rate: float, draw: Random) -> tuple[float, ...]:
    """When each request comes, in seconds from the start: `rate` a second on average, the first after a gap."""
    arrivals, now = [], 0.0
    for _ in range(n_requests):
        now += draw.expovariate(rate)
        arrivals.append(now)
    return tuple(arrivals)


def arriving(demands: Sequence[Demand], arrivals_s: Sequence[float]) -> tuple[Demand, ...]:
    """The same requests at these times."""
    return tuple(
        replace(demand, arrival_s=arrival_s) for demand, arrival_s in zip(demands, arrivals_s, strict=True)
    )
