"""Every executor in turn, for the conformance suite."""

import gc
from collections.abc import Iterator

import pytest
from bakehouse_replica.core.executor import Executor
from executors import CAPACITY, EXECUTORS, MakeExecutor


@pytest.fixture(params=EXECUTORS)
def make_executor(request: pytest.FixtureRequest) -> MakeExecutor:
    factory: MakeExecutor = request.param
    return factory


@pytest.fixture
def executor(make_executor: MakeExecutor) -> Iterator[Executor]:
    made = make_executor(CAPACITY)
    yield made
    made.close()
    gc.collect()  # connections of ranks are parts of cycles, and there are many tests
