"""Every executor there is, and how the conformance suite asks them for tokens and scores."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import pytest
import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.dispatch import select_ops
from bakehouse_kernels.reference import ReferenceOps
from bakehouse_replica.core.executor import Executor, execute
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import BlockCopy, Capacity, Chunk, Sample, Score, StepPlan, StepResult
from bakehouse_replica.executors.device_model import device_model
from bakehouse_replica.executors.fake import FakeExecutor
from bakehouse_replica.executors.in_process import InProcessExecutor, build_executor
from bakehouse_replica.executors.on_device import DeviceExecutor, build_device_executor
from bakehouse_replica.executors.scripted import ScriptedExecutor
from bakehouse_replica.executors.simulated import SimulatedExecutor, StepCost
from bakehouse_replica.executors.step_sizes import StepSizes
from bakehouse_replica.executors.tensor_parallel import gather
from bakehouse_replica.model.collective import Alone, Collective
from bakehouse_replica.model.sharding import Shard, local_spec
from bakehouse_replica.model.spec import ModelSpec
from bakehouse_replica.model.weights import DecoderWeights, LayerWeights
from bakehouse_replica.script import parse_script
from ranks import leader_of, part_of
from torch import Tensor

CAPACITY = Capacity(n_blocks=16, block_size=4, max_step_tokens=64, max_sequences=8)
N_PROMPT = 11  # two full blocks of 4, and a partly filled third
BLOCKS = (3, 9, 5, 1)  # in no order
OTHER_BLOCKS = (12, 2, 7, 10)
PROMPT = tuple((7 * index + 3) % 60 for index in range(N_PROMPT))  # ids below 60 exist in every vocabulary
OTHER_PROMPT = tuple((11 * index + 5) % 60 for index in range(N_PROMPT))
GREEDY = SamplingParams(temperature=0.0, seed=0)
SEEDED = SamplingParams(temperature=1.0, seed=0)


MakeExecutor = Callable[[Capacity], Executor]


def make_fake(capacity: Capacity) -> Executor:
    """A token at a time."""
    return FakeExecutor(capacity)


def make_fake_ahead(capacity: Capacity) -> Executor:
    """Three tokens at once."""
    return FakeExecutor(capacity, tokens_per_step=3)


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
    return build_executor(spec=spec, weights=weights, ops=cpu_ops(), capacity=capacity)


def make_on_device(capacity: Capacity) -> Executor:
    """The runner of GPUs, with its recordings, by the reference's operations."""
    return device_part(Alone(), capacity)


def device_part(collective: Collective, capacity: Capacity) -> DeviceExecutor:
    """One rank's part of the model, as on a GPU."""
    spec, weights = random_model()
    shard = Shard(collective.rank, collective.size)
    model = device_model(
        local_spec(spec, shard),
        part_of(weights, spec, shard),
        ReferenceOps(),
        collective,
        block_size=capacity.block_size,
        max_model_len=spec.context_length,
        sizes=StepSizes(
            max_step_tokens=capacity.max_step_tokens,
            max_sequences=capacity.max_sequences,
            max_prefill_tokens=capacity.max_step_tokens,
        ),
    )
    return build_device_executor(model, n_blocks=capacity.n_blocks, max_flights=capacity.max_flights)


def make_tensor_parallel_on_device(capacity: Capacity) -> Executor:
    """Two ranks of the same model, as on two GPUs."""

    def load(collective: Collective) -> DeviceExecutor:
        return device_part(collective, capacity)

    return gather(leader_of(2, load), load)


def make_tensor_parallel(capacity: Capacity) -> Executor:
    """Two ranks of the same model."""
    spec, weights = random_model()

    def load(collective: Collective) -> InProcessExecutor:
        shard = Shard(collective.rank, collective.size)
        return build_executor(
            spec=local_spec(spec, shard),
            weights=part_of(weights, spec, shard),
            ops=cpu_ops(),
            capacity=capacity,
            collective=collective,
        )

    return gather(leader_of(2, load), load)


def make_scripted(capacity: Capacity, tokens_per_step: int = 1) -> Executor:
    """Near ties of three tokens, so that seeds differ."""
    script = parse_script(
        {
            "pieces": ["a", "b", "c"],
            "default": {"ids": [2]},
            "prefer": [[0, 1]],
            "tokens_per_step": tokens_per_step,
        }
    )
    return ScriptedExecutor(script, capacity)


def make_simulated(capacity: Capacity) -> Executor:
    """A second a step."""
    return SimulatedExecutor(capacity, StepCost(step_s=1.0))


def make_scripted_ahead(capacity: Capacity) -> Executor:
    """Two tokens at once."""
    return make_scripted(capacity, tokens_per_step=2)


OF_RANKS = (make_tensor_parallel, make_tensor_parallel_on_device)

# One entry for each executor there is: a function of a capacity that returns a fresh one. Steps overlap where one
# token is drawn at a time.
OVERLAPPING = [
    pytest.param(make_fake, id="fake"),
    pytest.param(make_in_process, id="in_process"),
    pytest.param(make_on_device, id="on_device"),
    pytest.param(make_tensor_parallel, id="tensor_parallel"),
    pytest.param(make_tensor_parallel_on_device, id="tensor_parallel_on_device"),
    pytest.param(make_scripted, id="scripted"),
    pytest.param(make_simulated, id="simulated"),
]
EXECUTORS = [
    *OVERLAPPING,
    pytest.param(make_fake_ahead, id="fake_ahead"),
    pytest.param(make_scripted_ahead, id="scripted_ahead"),
]


@contextmanager
def closing_all(factory: MakeExecutor) -> Iterator[MakeExecutor]:
    """The factory, whose executors are closed at the end: ranks have threads and connections."""
    with ExitStack() as stack:

        def make(capacity: Capacity) -> Executor:
            executor = factory(capacity)
            stack.callback(executor.close)
            return executor

        yield make


def ids_drawn(result: StepResult) -> list[tuple[int, ...]]:
    """Per sampled chunk, the first token of each draw."""
    return [tuple(draw.token_ids[0] for draw in sampled.draws) for sampled in result.sampled]


def sample_at(
    output_index: int,
    params: SamplingParams = GREEDY,
    seeds: tuple[int, ...] = (0,),
    *,
    choice: int = 0,
    output_ids: tuple[int, ...] = (),
) -> Sample:
    """Asks for output token `output_index`, greedily unless told otherwise."""
    return Sample(params=params, seeds=seeds, output_index=output_index, choice=choice, output_ids=output_ids)


def chunk_of(
    tokens: tuple[int, ...],
    *,
    start: int = 0,
    blocks: tuple[int, ...] = BLOCKS,
    sequence_id: int = 0,
    sample: Sample | None = None,
    score: Score | None = None,
) -> Chunk:
    """The positions from `start` to the end of `tokens`, with as much of the table as they need."""
    n_blocks = -(-len(tokens) // CAPACITY.block_size)
    return Chunk(
        sequence_id=sequence_id,
        token_ids=tokens[start:],
        start=start,
        block_ids=blocks[:n_blocks],
        sample=sample,
        score=score,
    )


def run(executor: Executor, *chunks: Chunk, copies: tuple[BlockCopy, ...] = (), step: int = 0) -> StepResult:
    """Carries out a plan of these chunks."""
    return execute(executor, StepPlan(step=step, copies=copies, chunks=chunks))


def drawn(executor: Executor, chunk: Chunk, copies: tuple[BlockCopy, ...] = ()) -> tuple[int, ...]:
    """The first token of each draw of this chunk, the only one of its step."""
    return ids_drawn(run(executor, chunk, copies=copies))[0]


def cold(make_executor: MakeExecutor, tokens: tuple[int, ...]) -> int:
    """The greedy id after `tokens`, computed by a fresh executor in one chunk."""
    executor = make_executor(CAPACITY)
    (token_id,) = drawn(executor, chunk_of(tokens, sample=sample_at(0)))
    executor.close()
    return token_id
