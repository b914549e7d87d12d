"""What tests of the engine share."""

from dataclasses import replace

import engines
import pytest


@pytest.fixture(params=[1, 2], ids=["one by one", "overlapping"])
def max_flights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many steps the engines of a test have in flight: each test that asks for it runs both ways."""
    n_steps: int = request.param
    monkeypatch.setattr(engines, "CAPACITY", replace(engines.CAPACITY, max_flights=n_steps))
    return n_steps
