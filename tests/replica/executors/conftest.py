"""Every executor in turn, for the conformance suite."""

from collections.abc import Iterator

import pytest
from bakehouse_replica.core.executor import Executor
from executors import CAPACITY, EXECUTORS, MakeExecutor, closing_all


@pytest.fixture(params=EXECUTORS)
def make_executor(request: pytest.FixtureRequest) -> Iterator[MakeExecutor]:
    with closing_all(request.param) as factory:
        yield factory


@pytest.fixture
def executor(make_executor: MakeExecutor) -> Executor:
    return make_executor(CAPACITY)
