"""What the simulated executor adds to the promises of all executors: it says how long a step would take."""

import subprocess
import sys
from dataclasses import replace

import pytest
from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.executor import execute
from bakehouse_replica.core.sampling import Grammar, GrammarKind, SamplingParams
from bakehouse_replica.core.types import BlockCopy, Capacity, Chunk, Sample, StepPlan
from bakehouse_replica.executors.simulated import SimulatedExecutor, StepCost

CAPACITY = Capacity(n_blocks=8, block_size=4, max_step_tokens=64, max_sequences=8)
COST = StepCost(step_s=1.0, prefill_token_s=0.1, decode_sequence_s=0.01, context_token_s=0.001)


def plan_of(*chunks: Chunk) -> StepPlan:
    return StepPlan(step=0, copies=(), chunks=chunks)


def chunk_of(token_ids: tuple[int, ...], start: int, block_ids: tuple[int, ...], sequence_id: int = 0) -> Chunk:
    return Chunk(sequence_id=sequence_id, token_ids=token_ids, start=start, block_ids=block_ids)


def test_a_step_costs_what_is_in_it() -> None:
    prefill = chunk_of((1, 2, 3, 4, 5), 4, (0, 1, 2))  # 5 tokens, which attend to 9
    decode = chunk_of((6,), 7, (3, 4), sequence_id=1)  # 1 token, which attends to 8
    assert COST.seconds(plan_of(prefill, decode, decode)) == pytest.approx(
        1.0 + 0.5 + 2 * 0.01 + (9 + 2 * 8) * 0.001
    )
    assert COST.seconds(plan_of()) == 1.0


def test_decodes_and_prompts_attend_to_pairs_of_tokens() -> None:
    cost = StepCost(pair_s=1.0)
    whole = cost.seconds(plan_of(chunk_of((1,) * 12, 0, (0, 1, 2))))
    parts = (chunk_of((1,) * 5, 0, (0, 1)), chunk_of((1,) * 7, 5, (0, 1, 2)))
    assert whole == sum(cost.seconds(plan_of(part)) for part in parts) == 12 * 13 / 2
    assert cost.seconds(plan_of(chunk_of((1,), 12, (0, 1, 2, 3)))) == 0, "a decode's are tokens of its context"


def test_blocks_in_several_tables_are_read_once() -> None:
    cost = StepCost(read_token_s=1.0)
    apart = chunk_of((6,), 7, (3, 4))
    one, other = (chunk_of((6,), 11, (0, 1, own)) for own in (5, 6))
    assert cost.seconds(plan_of(one)) == 12
    assert cost.seconds(plan_of(one, other, apart)) == 4 * 4 + 8
    assert cost.seconds(plan_of(apart, replace(apart, sequence_id=1))) == 8
    assert cost.seconds(plan_of()) == 0


def test_a_result_says_what_its_step_costs() -> None:
    executor = SimulatedExecutor(CAPACITY, COST)
    plan = plan_of(chunk_of((1, 2, 3), 0, (0,)))
    assert execute(executor, plan).elapsed_s == COST.seconds(plan) == pytest.approx(1.303)


@pytest.mark.parametrize("seconds", [-1e-9, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["step_s", "prefill_token_s", "decode_sequence_s", "context_token_s", "read_token_s", "pair_s"]
)
def test_a_cost_is_a_finite_number_of_seconds(name: str, seconds: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {seconds}"):
        StepCost(**{name: seconds})


@pytest.mark.parametrize(
    "block_ids",
    [
        pytest.param((0, 2), id="never written"),
        pytest.param((1, 0), id="another place in the table"),
        pytest.param((0, 3), id="not written so far"),
    ],
)
def test_going_on_from_a_past_that_is_not_there_is_an_error(block_ids: tuple[int, ...]) -> None:
    executor = SimulatedExecutor(CAPACITY, COST)
    execute(executor, plan_of(chunk_of((1, 2, 3, 4, 5, 6), 0, (0, 1))))
    execute(executor, plan_of(chunk_of((1, 2, 3, 4, 5), 0, (0, 3))))
    with pytest.raises(AssertionError, match="sequence 0, which goes on at 6"):
        execute(executor, plan_of(chunk_of((7,), 6, block_ids)))


def test_a_block_may_follow_only_a_full_one() -> None:
    executor = SimulatedExecutor(CAPACITY, COST)
    execute(executor, plan_of(chunk_of((1, 2, 3), 0, (0,))))
    with pytest.raises(AssertionError, match="block 0 not full"):
        execute(executor, plan_of(chunk_of((5,), 4, (0, 1))))


def test_a_copy_of_what_was_never_written_is_an_error() -> None:
    executor = SimulatedExecutor(CAPACITY, COST)
    plan = replace(plan_of(chunk_of((1,), 0, (1,))), copies=(BlockCopy(source=0, target=2),))
    with pytest.raises(KeyError):
        execute(executor, plan)


def test_a_grammar_is_refused() -> None:
    grammar = Grammar(kind=GrammarKind.REGEX, text="a")
    with pytest.raises(InvalidRequest, match="simulated executor cannot keep to one"):
        SimulatedExecutor(CAPACITY, COST).prepare(SamplingParams(grammar=grammar))


def test_draws_are_the_same_in_every_process() -> None:
    program = (
        "from bakehouse_replica.core.executor import execute\n"
        "from bakehouse_replica.core.sampling import SamplingParams\n"
        "from bakehouse_replica.core.types import Capacity, Chunk, Sample, StepPlan\n"
        "from bakehouse_replica.executors.simulated import SimulatedExecutor, StepCost\n"
        "capacity = Capacity(n_blocks=8, block_size=4, max_step_tokens=64, max_sequences=8)\n"
        "sample = Sample(params=SamplingParams(seed=0), seeds=(1, 2, 3), output_index=0)\n"
        "chunk = Chunk(sequence_id=0, token_ids=(5, 6, 7, 8, 9), start=0, block_ids=(3, 1), sample=sample)\n"
        "plan = StepPlan(step=0, copies=(), chunks=(chunk,))\n"
        "result = execute(SimulatedExecutor(capacity, StepCost(step_s=1.0)), plan)\n"
        "print([draw.token_ids for draw in result.sampled[0].draws])"
    )
    sample = Sample(params=SamplingParams(seed=0), seeds=(1, 2, 3), output_index=0)
    chunk = replace(chunk_of((5, 6, 7, 8, 9), 0, (3, 1)), sample=sample)
    here = execute(SimulatedExecutor(CAPACITY, COST), plan_of(chunk)).sampled[0].draws
    environment = {"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)}
    there = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    assert there.stdout.strip() == str([draw.token_ids for draw in here])
