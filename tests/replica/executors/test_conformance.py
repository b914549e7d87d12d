"""What every executor promises; each test states one promise, in terms that hold for any model."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.dispatch import select_ops
from bakehouse_replica.core.executor import Executor
from bakehouse_replica.core.types import BlockCopy, Capacity, Chunk, Sample, SamplingParams, StepPlan, StepResult
from bakehouse_replica.executors.fake import FakeExecutor
from bakehouse_replica.executors.in_process import build_executor
from bakehouse_replica.model.spec import ModelSpec
from bakehouse_replica.model.weights import DecoderWeights, LayerWeights
from torch import Tensor

CAPACITY = Capacity(n_blocks=16, block_size=4, max_step_tokens=64, max_sequences=8)
N_PROMPT = 11  # two full blocks of 4, and a partly filled third
BLOCKS = (3, 9, 5, 1)  # in no order
OTHER_BLOCKS = (12, 2, 7, 10)
PROMPT = tuple((7 * index + 3) % 60 for index in range(N_PROMPT))  # ids below 60 exist in every vocabulary
OTHER_PROMPT = tuple((11 * index + 5) % 60 for index in range(N_PROMPT))
GREEDY = SamplingParams(temperature=0.0, seed=0)
SEEDED = SamplingParams(temperature=1.0, seed=0)


def make_fake(capacity: Capacity) -> Executor:
    return FakeExecutor(capacity)


@cache
def random_model() -> tuple[ModelSpec, DecoderWeights]:
    """Two layers with grouped queries. Weights of spread 0.3 keep the two best logits well apart."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    spec = ModelSpec(
        n_layers=2,
        hidden_size=32,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        feed_forward_size=48,
        vocabulary_size=200,
        context_length=64,
        norm_eps=1e-5,
        rope_frequencies=(1.0, 0.1, 0.01, 0.001),
    )
    layers = [
        LayerWeights(
            attention_norm_E=torch.ones(32),
            qkv_EX=random(32, 64),
            output_QE=random(32, 32),
            feed_forward_norm_E=torch.ones(32),
            gate_up_EF2=random(32, 96),
            down_FE=random(48, 32),
        )
        for _ in range(spec.n_layers)
    ]
    embedding_VE, head_VE = random(200, 32), random(200, 32)
    weights = DecoderWeights(
        embedding_VE=embedding_VE, layers=tuple(layers), final_norm_E=torch.ones(32), head_VE=head_VE
    )
    return spec, weights


@cache
def cpu_ops() -> Ops:
    return select_ops(torch.device("cpu"), torch.float32, n_threads=torch.get_num_threads())


def make_in_process(capacity: Capacity) -> Executor:
    spec, weights = random_model()
    return build_executor(spec=spec, weights=weights, ops=cpu_ops(), capacity=capacity, dtype=torch.float32)


# One entry for each executor there is: a function of a capacity that returns a fresh one.
EXECUTORS = [pytest.param(make_fake, id="fake"), pytest.param(make_in_process, id="in_process")]


@pytest.fixture(params=EXECUTORS)
def make_executor(request: pytest.FixtureRequest) -> Callable[[Capacity], Executor]:
    factory: Callable[[Capacity], Executor] = request.param
    return factory


@pytest.fixture
def executor(make_executor: Callable[[Capacity], Executor]) -> Executor:
    return make_executor(CAPACITY)


def ids_drawn(result: StepResult) -> list[tuple[int, ...]]:
    """Per sampled chunk, the one token of each draw."""
    return [tuple(draw.token_ids[0] for draw in sampled.draws) for sampled in result.sampled]


def sample_at(output_index: int, params: SamplingParams = GREEDY, seeds: tuple[int, ...] = (0,)) -> Sample:
    return Sample(params=params, seeds=seeds, output_index=output_index)


def chunk_of(
    tokens: tuple[int, ...],
    *,
    start: int = 0,
    blocks: tuple[int, ...] = BLOCKS,
    sequence_id: int = 0,
    sample: Sample | None = None,
) -> Chunk:
    """The positions from `start` to the end of `tokens`, with as much of the table as they need."""
    n_blocks = -(-len(tokens) // CAPACITY.block_size)
    return Chunk(
        sequence_id=sequence_id, token_ids=tokens[start:], start=start, block_ids=blocks[:n_blocks], sample=sample
    )


def run(executor: Executor, *chunks: Chunk, copies: tuple[BlockCopy, ...] = (), step: int = 0) -> StepResult:
    return executor.execute(StepPlan(step=step, copies=copies, chunks=chunks))


def drawn(executor: Executor, chunk: Chunk, copies: tuple[BlockCopy, ...] = ()) -> tuple[int, ...]:
    return ids_drawn(run(executor, chunk, copies=copies))[0]


def cold(make_executor: Callable[[Capacity], Executor], tokens: tuple[int, ...]) -> int:
    """The greedy id after `tokens`, computed by a fresh executor in one chunk."""
    executor = make_executor(CAPACITY)
    (token_id,) = drawn(executor, chunk_of(tokens, sample=sample_at(0)))
    executor.close()
    return token_id


def test_it_has_the_capacity_it_was_given(executor: Executor) -> None:
    assert executor.capacity == CAPACITY


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, 5, 10, N_PROMPT])
def test_the_greedy_id_does_not_depend_on_chunking(
    make_executor: Callable[[Capacity], Executor], executor: Executor, chunk_size: int
) -> None:
    for start in range(0, N_PROMPT, chunk_size):
        end = min(start + chunk_size, N_PROMPT)
        sample = sample_at(0) if end == N_PROMPT else None
        result = run(executor, chunk_of(PROMPT[:end], start=start, sample=sample))
        assert len(result.sampled) == (sample is not None)
    assert ids_drawn(result)[0] == (cold(make_executor, PROMPT),)


def test_the_greedy_id_does_not_depend_on_block_ids(
    make_executor: Callable[[Capacity], Executor], executor: Executor
) -> None:
    found = drawn(executor, chunk_of(PROMPT, blocks=OTHER_BLOCKS, sample=sample_at(0)))
    assert found == (cold(make_executor, PROMPT),)


def test_the_greedy_id_does_not_depend_on_neighbours(
    make_executor: Callable[[Capacity], Executor], executor: Executor
) -> None:
    run(executor, chunk_of(OTHER_PROMPT[:6], blocks=OTHER_BLOCKS, sequence_id=1))
    result = run(
        executor,
        chunk_of(PROMPT, sample=sample_at(0)),
        chunk_of(OTHER_PROMPT, start=6, blocks=OTHER_BLOCKS, sequence_id=1, sample=sample_at(0)),
    )
    assert [drawn_ids[0] for drawn_ids in ids_drawn(result)] == [
        cold(make_executor, PROMPT),
        cold(make_executor, OTHER_PROMPT),
    ]


def test_decoding_token_by_token_equals_computing_all_at_once(
    make_executor: Callable[[Capacity], Executor], executor: Executor
) -> None:
    tokens = PROMPT
    tokens += drawn(executor, chunk_of(tokens, sample=sample_at(0)))
    for output_index in range(1, 5):
        tokens += drawn(executor, chunk_of(tokens, start=len(tokens) - 1, sample=sample_at(output_index)))
    for n_output in range(5):
        assert tokens[N_PROMPT + n_output] == cold(make_executor, tokens[: N_PROMPT + n_output])


def test_a_full_block_is_shared_by_naming_it_in_two_tables(
    make_executor: Callable[[Capacity], Executor], executor: Executor
) -> None:
    run(executor, chunk_of(PROMPT))
    tokens = (*PROMPT[:8], *OTHER_PROMPT[8:])
    table = (*BLOCKS[:2], *OTHER_BLOCKS[2:])
    found = drawn(executor, chunk_of(tokens, start=8, blocks=table, sample=sample_at(0)))
    assert found == (cold(make_executor, tokens),)


def test_copies_happen_before_anything_is_written(
    make_executor: Callable[[Capacity], Executor], executor: Executor
) -> None:
    run(executor, chunk_of(PROMPT))
    tail, own_tail = BLOCKS[2], OTHER_BLOCKS[2]
    ours, theirs = (*PROMPT, 1), (*PROMPT, 2)
    result = run(
        executor,
        chunk_of(ours, start=N_PROMPT, sample=sample_at(1)),  # in place, into the source of the copy
        chunk_of(theirs, start=N_PROMPT, blocks=(*BLOCKS[:2], own_tail), sequence_id=1, sample=sample_at(1)),
        copies=(BlockCopy(source=tail, target=own_tail),),
    )
    assert [drawn_ids[0] for drawn_ids in ids_drawn(result)] == [
        cold(make_executor, ours),
        cold(make_executor, theirs),
    ]


def test_a_copy_stays_as_it_is_when_its_source_is_written_later(
    make_executor: Callable[[Capacity], Executor], executor: Executor
) -> None:
    run(executor, chunk_of(PROMPT))
    copies = (
        BlockCopy(source=BLOCKS[2], target=OTHER_BLOCKS[2]),
        BlockCopy(source=BLOCKS[1], target=OTHER_BLOCKS[1]),
    )
    run(executor, chunk_of(OTHER_PROMPT, blocks=(14, 15, 13), sequence_id=1), copies=copies)
    run(executor, chunk_of(OTHER_PROMPT, sequence_id=1))
    run(executor, chunk_of(PROMPT[:4], blocks=OTHER_BLOCKS))
    tokens = (*PROMPT, 4)
    found = drawn(executor, chunk_of(tokens, start=N_PROMPT, blocks=OTHER_BLOCKS, sample=sample_at(1)))
    assert found == (cold(make_executor, tokens),)


def test_a_reused_block_keeps_nothing_of_its_past(
    make_executor: Callable[[Capacity], Executor], executor: Executor
) -> None:
    run(executor, chunk_of((*OTHER_PROMPT, *OTHER_PROMPT[:5])))
    assert drawn(executor, chunk_of(PROMPT, sample=sample_at(0))) == (cold(make_executor, PROMPT),)


def test_n_seeds_give_n_tokens_each_the_one_that_its_seed_gives_alone(executor: Executor) -> None:
    seeds = (5, -6, 7, 2**63 - 1, -(2**63))
    together = drawn(executor, chunk_of(PROMPT, sample=sample_at(0, SEEDED, seeds)))
    alone = [drawn(executor, chunk_of(PROMPT, sample=sample_at(0, SEEDED, (seed,)))) for seed in seeds]
    assert [(token_id,) for token_id in together] == alone


def test_a_seed_draws_the_same_token_again_and_seeds_differ(executor: Executor) -> None:
    seeds = tuple(range(40))
    first = drawn(executor, chunk_of(PROMPT, sample=sample_at(0, SEEDED, seeds)))
    second = drawn(executor, chunk_of(PROMPT, blocks=OTHER_BLOCKS, sample=sample_at(0, SEEDED, seeds)))
    assert first == second
    assert len(set(first)) > 1


def test_greedy_choices_ignore_the_seed(executor: Executor) -> None:
    assert len(set(drawn(executor, chunk_of(PROMPT, sample=sample_at(0, GREEDY, (1, 2, 3)))))) == 1


def test_results_come_in_the_plan_s_order_and_only_for_chunks_that_ask(executor: Executor) -> None:
    result = run(
        executor,
        chunk_of(PROMPT[:3], blocks=(0,), sequence_id=30, sample=sample_at(0)),
        chunk_of(PROMPT[:4], blocks=(1,), sequence_id=20),
        chunk_of(PROMPT[:2], blocks=(2,), sequence_id=10, sample=sample_at(0, SEEDED, (1, 2))),
        step=17,
    )
    assert result.step == 17
    assert [(sampled.sequence_id, len(sampled.draws)) for sampled in result.sampled] == [(30, 1), (10, 2)]
    assert result.elapsed_s >= 0


def test_no_stop_id_is_drawn_before_min_tokens(
    make_executor: Callable[[Capacity], Executor], executor: Executor
) -> None:
    stop = cold(make_executor, PROMPT)
    params = replace(GREEDY, stop_token_ids=(stop,), min_tokens=3)
    for output_index in range(3):
        assert drawn(executor, chunk_of(PROMPT, sample=sample_at(output_index, params))) != (stop,)
    assert drawn(executor, chunk_of(PROMPT, sample=sample_at(3, params))) == (stop,)


def test_a_plan_without_samples_gives_an_empty_result(executor: Executor) -> None:
    assert run(executor, chunk_of(PROMPT)).sampled == ()


def test_closing_twice_is_harmless(executor: Executor) -> None:
    run(executor, chunk_of(PROMPT))
    executor.close()
    executor.close()
