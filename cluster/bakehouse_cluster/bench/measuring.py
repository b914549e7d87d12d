"""Runs a benchmark: for each load prompts of its own, a warm-up, then the measurement."""

import asyncio
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from importlib.metadata import version
from random import Random
from typing import Protocol

from bakehouse_replica.core.errors import StartupError

from bakehouse_cluster.bench.arranging import arrange
from bakehouse_cluster.bench.connection import ConnectionPool
from bakehouse_cluster.bench.prompts import Ask, Encoder, PromptWriter
from bakehouse_cluster.bench.records import ANSWERED, Record
from bakehouse_cluster.bench.result import Environment, Load, Point, Result, Work
from bakehouse_cluster.bench.sending import Sendable, Sender, closed_loop, open_loop
from bakehouse_cluster.bench.statistics import summarize
from bakehouse_cluster.bench.target import Target
from bakehouse_cluster.bench.workloads import Demand, SharedPrefixes, Workload
from bakehouse_cluster.progress import n_of

MAX_DEFAULT_WARMUP = 16
DEFAULT_WARMUP_OF_OPEN_LOOPS = 4
# The length of a warm-up's prompt where the workload's own prompts are given.
_N_WARMUP_INPUT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure. `name`: of the workload. `n_warmup`: requests before each measurement, uncounted; None: as
    many as users, 16 at most, or 4 in an open loop. `warms_prefixes`: these begin with the measured requests'
    shared prefixes, else with others. `timeout_s`: for one whole answer. `label`: of the system, for people.
    """

    name: str
    workload: Workload
    loads: tuple[Load, ...]
    seed: int = 0
    n_warmup: int | None = None
    warms_prefixes: bool = True
    timeout_s: float = 600.0
    label: str = ""

    def n_warmup_of(self, load: Load) -> int:
        """How many requests warm up for `load`."""
        if self.n_warmup is not None:
            return self.n_warmup
        if load.kind == "concurrency":
            return min(int(load.value), MAX_DEFAULT_WARMUP)
        return DEFAULT_WARMUP_OF_OPEN_LOOPS


class Observer(Protocol):
    """Shows how far a benchmark is."""

    def counted(self, label: str, n_total: int) -> AbstractContextManager[Callable[[], None]]:
        """Around each part; what it hands out is called after each request."""
        ...


class Unobserved:
    """Shows nothing."""

    def counted(self, label: str, n_total: int) -> AbstractContextManager[Callable[[], None]]:
        """See `Observer`."""
        return nullcontext(lambda: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PointWork:
    """The requests of one measurement."""

    load: Load
    warmup: tuple[Ask, ...]
    asks: tuple[Ask, ...]
    said_of_warmup: str


def run_bench(
    plan: Plan, target: Target, encoder: Encoder, *, server: str = "", observer: Observer | None = None
) -> Result:
    """Measure every load of `plan`, one after another. `server`: what it says of itself, for the record.

    Ctrl-C ends it early: then the result is what was measured so far, and `is_partial`. Raises `StartupError`
    where a prompt cannot be written, or the server refuses all of a warm-up.
    """
    observer = observer or Unobserved()
    points = []
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        for load in plan.loads:
            records: list[Record] = []
            begun_s = time.process_time()
            work = None
            try:
                work = _prepare(plan, load, encoder)
                runner.run(_warm_up(plan, target, work, observer))
                begun_s = time.process_time()
                runner.run(_measure(plan, target, work, records, observer))
            except KeyboardInterrupt:
                if work is not None and records:
                    points.append(_point(work, records, time.process_time() - begun_s, is_partial=True))
                break
            points.append(_point(work, records, time.process_time() - begun_s, is_partial=False))
    return Result(
        environment=_environment(plan, target, encoder, server), work=_work(plan, target), points=tuple(points)
    )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop  # there is none for Windows
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def _prepare(plan: Plan, load: Load, encoder: Encoder) -> _PointWork:
    n_warmup = plan.n_warmup_of(load)
    arrangement = arrange(plan.name, plan.workload, load, plan.seed)
    prefixes: dict[int, str] = {}
    writer = PromptWriter(encoder, arrangement.words, prefixes)
    asks = tuple(map(writer.write, arrangement.demands))
    other = Random(f"{plan.seed} warm-up {load.label}")
    warmup_writer = PromptWriter(encoder, other, prefixes if plan.warms_prefixes else {})
    warmup_demands = plan.workload.demands(n_warmup, other)
    warmup = tuple(map(warmup_writer.write, map(_without_given, warmup_demands)))
    return _PointWork(load=load, warmup=warmup, asks=asks, said_of_warmup=_said_of_warmup(plan, warmup_demands))


def _without_given(demand: Demand) -> Demand:
    if demand.given is None:
        return demand
    return Demand(n_input=_N_WARMUP_INPUT, n_output=demand.n_output)


def _said_of_warmup(plan: Plan, demands: Sequence[Demand]) -> str:
    said = f"{n_of(len(demands), 'request')} of the same lengths with prompts of their own"
    if n_given := sum(demand.given is not None for demand in demands):
        said += f", but {n_given} of {_N_WARMUP_INPUT} tokens for prompts that the trace gives"
    if demands and isinstance(plan.workload, SharedPrefixes):
        n_warm = min(len(demands), plan.workload.n_prefixes)
        if plan.warms_prefixes:
            return f"{said}, which begin with {n_warm} of the {plan.workload.n_prefixes} shared prefixes"
        return f"{said} and other prefixes"
    return said


async def _warm_up(plan: Plan, target: Target, work: _PointWork, observer: Observer) -> None:
    records: list[Record] = []
    n_users = int(work.load.value) if work.load.kind == "concurrency" else len(work.warmup)
    label = f"warm-up, {work.load.label}"
    with observer.counted(label, len(work.warmup)) as advance:
        pool = ConnectionPool(target.url)
        sender = Sender(pool, timeout_s=plan.timeout_s)
        try:
            await closed_loop(_sendables(target, work.warmup), n_users, sender, _counting(records, advance))
        finally:
            pool.close()
    if records and not any(record.outcome in ANSWERED for record in records):
        raise StartupError(
            f"the server answered no request of the warm-up: {records[0].problem}. "
            f"A field that it refuses is left out by --no-ignore-eos, --no-usage or "
            f"""--extra-body '{{"FIELD": null}}'"""
        )


async def _measure(
    plan: Plan, target: Target, work: _PointWork, records: list[Record], observer: Observer
) -> None:
    sendables = _sendables(target, work.asks)
    with observer.counted(work.load.label, len(work.asks)) as advance:
        pool = ConnectionPool(target.url)
        sender = Sender(pool, timeout_s=plan.timeout_s)
        try:
            if work.load.kind == "concurrency":
                await closed_loop(sendables, int(work.load.value), sender, _counting(records, advance))
            else:
                await open_loop(sendables, sender, _counting(records, advance))
        finally:
            pool.close()


def _counting(records: list[Record], advance: Callable[[], None]) -> Callable[[Record], None]:
    def take(record: Record) -> None:
        records.append(record)
        advance()

    return take


def _sendables(target: Target, asks: Sequence[Ask]) -> list[Sendable]:
    return [
        Sendable(
            request=target.request(ask),
            n_exact=ask.n_output if target.ignores_eos or target.sends_min_tokens else None,
            n_input=ask.n_input if target.api == "completions" else None,  # a template adds to it
            arrival_s=ask.arrival_s,
        )
        for ask in asks
    ]


def _point(work: _PointWork, records: Sequence[Record], cpu_s: float, *, is_partial: bool) -> Point:
    return Point(
        load=work.load,
        n_planned=len(work.asks),
        n_input_planned=sum(ask.n_input or 0 for ask in work.asks),
        n_output_planned=sum(ask.n_output for ask in work.asks),
        prompts_digest=_digest(work.asks),
        n_warmup=len(work.warmup),
        warmup=work.said_of_warmup,
        generator_cpu_s=cpu_s,
        is_partial=is_partial,
        summary=summarize(records),
    )


def _digest(asks: Sequence[Ask]) -> str:
    digest = blake2b(digest_size=8)
    for ask in asks:
        digest.update(repr((ask.prompt, ask.n_output, ask.arrival_s)).encode())
    return digest.hexdigest()


def _work(plan: Plan, target: Target) -> Work:
    return Work(
        name=plan.name,
        kind=plan.workload.kind,
        parameters=plan.workload.parameters(),
        seed=plan.seed,
        api=target.api,
        ignores_eos=target.ignores_eos,
        warms_prefixes=plan.warms_prefixes and isinstance(plan.workload, SharedPrefixes),
    )


def _environment(plan: Plan, target: Target, encoder: Encoder, server: str) -> Environment:
    return Environment(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        label=plan.label,
        url=target.url,
        model=target.model,
        server=server,
        tokenizer=encoder.name,
        prompt_form=target.prompt_form,
        request_fields=target.fields(),
        software={"bakehouse": version("bakehouse"), "python": platform.python_version()},
        platform=platform.platform(),
        n_cpus=os.cpu_count() or 1,
    )
