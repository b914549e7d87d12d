"""Every executor in turn, for the conformance suite."""

import gc
from collections.abc import Iterator

import pytest
from bakehouse_replica.core.executor import Executor
from executors import CAPACITY, EXECUTORS, OF_RANKS, MakeExecutor, closing_all


@pytest.fixture(params=EXECUTORS)
def make_executor(request: pytest.FixtureRequest) -> Iterator[MakeExecutor]:
    with closing_all(request.param) as factory:
        yield factory
    if request.param in OF_RANKS:
        gc.collect()  # connections of ranks are parts of cycles, and there are many tests; takes half a second


@pytest.fixture
def executor(make_executor: MakeExecutor) -> Executor:
    return make_executor(CAPACITY)


@pytest.fixture
def nothing_hangs() -> Iterator[None]:
    """For tests that lose a rank, whose threads go on in this process.

    The lost group's operations hang until their limit, and whoever collects the group waits for them: left to
    chance, that is the next test in the middle of a step.
    """
    yield
    gc.collect()
