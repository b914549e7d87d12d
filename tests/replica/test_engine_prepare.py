"""Requests that need something made ready before they run: steps go on, and the client may leave meanwhile."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from bakehouse_replica.core.errors import DeadlineExceeded, InvalidRequest, Unavailable
from bakehouse_replica.core.sampling import Grammar, GrammarKind, SamplingParams
from bakehouse_replica.core.types import FailureKind, FinishReason, StepPlan
from bakehouse_replica.executors.fake import FakeExecutor
from engines import CAPACITY, WAIT_S, collect, engine_with, ids_of, request, wait_until_idle

GRAMMAR = Grammar(kind=GrammarKind.REGEX, text="a+")


class CompilingExecutor(FakeExecutor):
    """Says when it begins to make a grammar ready, and waits until it is told to be done with it."""

    def __init__(
        self,
        while_compiling: Callable[[], None] | None = None,
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.plans: list[StepPlan] = []

        def watch(plan: StepPlan) -> None:
            self.plans.append(plan)
            before_step()

        super().__init__(CAPACITY, before_step=watch)
        self.has_begun = threading.Event()
        self.may_end = threading.Event()
        self._while_compiling = while_compiling

    def prepare(self, params: SamplingParams) -> None:
        assert params.grammar is not None, "there is nothing to make ready"
        self.has_begun.set()
        if self._while_compiling is not None:
            self._while_compiling()
        else:
            assert self.may_end.wait(WAIT_S), "the compilation was never let through"

    async def begun(self) -> None:
        assert await asyncio.to_thread(self.has_begun.wait, WAIT_S)


async def test_steps_go_on_while_a_grammar_is_compiled() -> None:
    executor = CompilingExecutor()
    async with engine_with(executor=executor) as engine:
        waiting = asyncio.create_task(collect(engine, request("a", grammar=GRAMMAR)))
        await executor.begun()
        assert len(ids_of(await collect(engine, request("neighbour")))) == 6
        assert not waiting.done()
        executor.may_end.set()
        assert len(ids_of(await waiting)) == 6


async def test_the_time_for_a_grammar_is_told_in_the_story() -> None:
    executor = CompilingExecutor(while_compiling=lambda: None)
    async with engine_with(executor=executor) as engine:
        (*_, last) = await collect(engine, request("a", grammar=GRAMMAR))
    assert last.story is not None
    assert last.story.prepared_s >= 1.0, "the engine's clock ticks with every look at it"


async def test_c46_a_request_aborted_while_its_grammar_is_compiled_ends_without_a_step() -> None:
    executor = CompilingExecutor()
    async with engine_with(executor=executor) as engine:
        waiting = asyncio.create_task(collect(engine, request("a", n=2, grammar=GRAMMAR)))
        await executor.begun()
        engine.abort("a")
        executor.may_end.set()
        deltas = await waiting
        assert [(delta.choice, delta.finish, delta.token_ids) for delta in deltas] == [
            (0, FinishReason.CANCELLED, ()),
            (1, FinishReason.CANCELLED, ()),
        ]
        await wait_until_idle(engine)
        assert (executor.plans, engine.load().n_held_blocks) == ([], 0)


async def test_c46_a_client_that_leaves_while_its_grammar_is_compiled_leaves_nothing_behind() -> None:
    executor = CompilingExecutor()
    async with engine_with(executor=executor) as engine:
        waiting = asyncio.create_task(collect(engine, request("a", grammar=GRAMMAR)))
        await executor.begun()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        executor.may_end.set()
        await wait_until_idle(engine)
        assert (executor.plans, engine.load().n_held_blocks) == ([], 0)


async def test_a_compilation_that_outlasts_the_request_s_time_ends_it() -> None:
    executor = CompilingExecutor()
    async with engine_with(executor=executor) as engine:
        with pytest.raises(DeadlineExceeded, match=r"time limit of 0\.01 s"):
            await collect(engine, request("a", timeout_s=0.01, grammar=GRAMMAR))
        executor.may_end.set()
        await wait_until_idle(engine)
        assert executor.plans == []


async def test_the_time_a_compilation_takes_is_taken_from_the_request_s() -> None:
    now = [0.0]

    def take_three_seconds() -> None:
        now[0] += 3.0

    executor = CompilingExecutor(take_three_seconds, before_step=take_three_seconds)
    async with engine_with(executor=executor, clock=lambda: now[0]) as engine:
        with pytest.raises(DeadlineExceeded):
            await collect(engine, request("late", timeout_s=3.0, grammar=GRAMMAR))
        deltas = await collect(engine, request("a", timeout_s=8.0, max_tokens=100, grammar=GRAMMAR))
    assert len(ids_of(deltas)) == 2, "of eight seconds, five are left, and a step takes three"
    assert deltas[-1].failure is not None
    assert deltas[-1].failure.kind is FailureKind.DEADLINE


async def test_a_replica_that_begins_to_drain_meanwhile_refuses_the_request() -> None:
    executor = CompilingExecutor()
    async with engine_with(executor=executor) as engine:
        waiting = asyncio.create_task(collect(engine, request("a", grammar=GRAMMAR)))
        await executor.begun()
        assert await engine.drain(WAIT_S)
        executor.may_end.set()
        with pytest.raises(Unavailable, match="draining"):
            await waiting


async def test_what_the_executor_cannot_do_is_refused_by_name_and_nobody_else_notices() -> None:
    async with engine_with() as engine:
        wanted = request("a", grammar=GRAMMAR)
        with pytest.raises(InvalidRequest, match="cannot keep to one") as caught:
            await collect(engine, wanted)
        assert caught.value.param == "grammar"
        plain = replace(wanted, params=replace(wanted.params, grammar=None))
        assert len(ids_of(await collect(engine, plain))) == 6
