"""A replica's limits while it serves: what changes, when, and what stays."""

import asyncio

import pytest
from bakehouse_replica.core.errors import ConfigError, Overloaded
from bakehouse_replica.core.types import StepPlan
from bakehouse_replica.service import ReplicaService
from engines import CAPACITY, Gate, collect, engine_with, ids_of, request

pytestmark = pytest.mark.usefixtures("max_flights")


async def test_limits_change_between_steps_and_what_runs_and_waits_goes_on() -> None:
    gate = Gate()
    async with engine_with(gate.before_step, max_waiting_requests=100) as engine:
        service = ReplicaService(engine)
        whole = [request(f"{index}", n=CAPACITY.max_sequences) for index in range(3)]  # one of them runs at a time
        served = [asyncio.create_task(collect(engine, one)) for one in whole]
        await asyncio.sleep(0)  # they have been handed over, and no step passes the gate
        service.reconfigure({"max_waiting_requests": 1})
        late = asyncio.create_task(collect(engine, request("late")))
        await asyncio.sleep(0)
        gate.open()
        with pytest.raises(Overloaded, match="requests are waiting, which is the limit"):
            await late
        for deltas in await asyncio.gather(*served):
            assert all(len(ids_of(deltas, choice)) == 6 for choice in range(CAPACITY.max_sequences))
        service.reconfigure({})
        assert engine.policy.max_waiting_requests == 100


async def test_fewer_prompt_tokens_beside_decodes_are_computed_from_the_next_step_on() -> None:
    plans: list[StepPlan] = []
    async with engine_with(plans.append) as engine:
        ReplicaService(engine).reconfigure({"max_prefill_tokens": 2})
        first = asyncio.create_task(collect(engine, request("decodes", max_tokens=60)))
        second = asyncio.create_task(collect(engine, request("long", prompt=tuple(range(40)), max_tokens=2)))
        deltas = await asyncio.gather(first, second)
    assert [len(ids_of(of_one)) for of_one in deltas] == [60, 2]
    sizes = [[len(chunk.token_ids) for chunk in plan.chunks] for plan in plans]
    assert {size for first_size, *others in sizes if first_size == 1 for size in others} == {1, 2}


@pytest.mark.parametrize("wrong", [{"max_waiting_requests": 0}, {"max_waiting_requests": 7, "max_sequences": 3}])
async def test_a_wrong_limit_is_refused_and_the_others_stay(wrong: dict[str, object]) -> None:
    async with engine_with() as engine:
        service = ReplicaService(engine)
        service.reconfigure({"max_waiting_requests": 5})
        before = engine.policy
        with pytest.raises(ConfigError, match=r"^user_config\.max_"):
            service.reconfigure(wrong)
        assert engine.policy == before
