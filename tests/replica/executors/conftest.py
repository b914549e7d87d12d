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
