"""Every executor in turn, for the conformance suite."""

import pytest
from bakehouse_replica.core.executor import Executor
from executors import CAPACITY, EXECUTORS, MakeExecutor


@pytest.fixture(params=EXECUTORS)
def make_executor(request: pytest.FixtureRequest) -> MakeExecutor:
    factory: MakeExecutor = request.param
    return factory


@pytest.fixture
def executor(make_executor: MakeExecutor) -> Executor:
    return make_executor(CAPACITY)
