"""Builds the executor that runs a model on a GPU: measures a step, sizes the cache, records decode steps."""

import gc
import logging
from dataclasses import dataclass
from time import perf_counter

import torch
from bakehouse_kernels.api import Ops

from bakehouse_replica.core.capacity import KVShape, blocks_for
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Capacity, Chunk, Sample, StepPlan
from bakehouse_replica.executors.in_process import InProcessExecutor
from bakehouse_replica.model.buckets import Buckets, buckets_of
from bakehouse_replica.model.constraint import ConstraintSource
from bakehouse_replica.model.decoder import Decoder
from bakehouse_replica.model.device_runner import DeviceRunner, StepLimits
from bakehouse_replica.model.device_sizing import N_NULL_BLOCKS, DeviceMemory, graph_bytes_of, plan_device_blocks
from bakehouse_replica.model.spec import ModelSpec

logger = logging.getLogger(__name__)

# Larger steps take so long that their launches hide behind them.
MAX_GRAPH_ROWS = 256
# The step in flight, and the one that is planned meanwhile.
MAX_FLIGHTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """A model on its device, and the largest step that it has to do."""

    spec: ModelSpec
    decoder: Decoder
    ops: Ops
    device: torch.device
    block_size: int
    max_model_len: int
    max_step_tokens: int
    max_sequences: int

    @property
    def buckets(self) -> Buckets:
        """The decode steps that are recorded."""
        return buckets_of(
            max_rows=min(self.max_sequences, MAX_GRAPH_ROWS),
            max_blocks=blocks_for(self.max_model_len, self.block_size),
        )

    def runner(self, n_blocks: int, constraints: ConstraintSource | None = None) -> DeviceRunner:
        """One with a cache of its own, of `n_blocks` blocks beside the null block; nothing is recorded yet."""
        cache = self.ops.new_cache(
            n_layers=self.spec.n_layers,
            n_blocks=n_blocks + N_NULL_BLOCKS,
            block_size=self.block_size,
            n_kv_heads=self.spec.n_kv_heads,
            head_dim=self.spec.head_dim,
        )
        return DeviceRunner(
            decoder=self.decoder,
            cache=cache,
            ops=self.ops,
            device=self.device,
            limits=StepLimits(max_tokens=self.max_step_tokens, max_sequences=self.max_sequences),
            buckets=self.buckets,
            constraints=constraints,
        )


def build_device_executor(
    model: DeviceModel,
    *,
    n_blocks: int,
    block_bytes: int = 0,
    max_flights: int = 1,
    constraints: ConstraintSource | None = None,
) -> InProcessExecutor:
    """An executor with `n_blocks` blocks for sequences; decode steps are recorded, and all kernels compiled.

    `max_flights`: see `Capacity`; at most 2.
    """
    runner = model.runner(n_blocks, constraints)
    for plan in (largest_step(model, n_blocks), one_decode(model)):
        runner.begin(plan).result()
    runner.graphs.record()
    runner.begin(one_decode(model)).result()
    capacity = Capacity(
        n_blocks=n_blocks,
        block_size=model.block_size,
        block_bytes=block_bytes,
        max_step_tokens=model.max_step_tokens,
        max_sequences=model.max_sequences,
        max_flights=max_flights,
    )
    return InProcessExecutor(runner=runner, capacity=capacity, constraints=constraints)


def measure(model: DeviceModel) -> DeviceMemory:
    """What the largest step and the recordings take on a GPU, found by doing them with the least cache."""
    device = model.device
    _settle(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    n_blocks = blocks_for(model.max_step_tokens, model.block_size) + model.max_sequences
    runner = model.runner(n_blocks)
    plan = largest_step(model, n_blocks)
    runner.begin(plan).result()  # once, so that what is loaded and compiled does not count
    torch.cuda.reset_peak_memory_stats(device)
    resting_bytes = torch.cuda.memory_allocated(device)
    runner.begin(plan).result()
    step_bytes = torch.cuda.max_memory_allocated(device) - resting_bytes
    begun_at = perf_counter()
    taken = [_taken_by(runner, bucket, device) for bucket in model.buckets.falling()[:2]]
    n_graphs = len(model.buckets.falling())
    logger.info(
        "the largest step takes %.0f MB, a decode graph %.0f MB and %.2f s; %d graphs will be recorded",
        step_bytes / 1e6,
        taken[-1] / 1e6,
        (perf_counter() - begun_at) / len(taken),
        n_graphs,
    )
    runner.graphs.forget()
    del runner
    _settle(device)
    return DeviceMemory(
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        step_bytes=step_bytes,
        graph_bytes=graph_bytes_of(n_graphs, first_bytes=taken[0], second_bytes=taken[-1]),
    )


def plan_blocks_of(model: DeviceModel, memory: DeviceMemory, kv_shape: KVShape, kv_bytes: int | None) -> int:
    """Blocks for sequences on this device."""
    return plan_device_blocks(kv_shape, memory, kv_memory_bytes=kv_bytes, max_model_len=model.max_model_len)


def largest_step(model: DeviceModel, n_blocks: int) -> StepPlan:
    """As many sequences and tokens as one step may have, in so many blocks, a token drawn after each chunk."""
    n_chunks = min(model.max_sequences, model.max_step_tokens, n_blocks)
    n_tokens = min(model.max_step_tokens, n_blocks // n_chunks * n_chunks * model.block_size)
    params = SamplingParams(temperature=1.0, top_p=0.9)
    chunks, next_block = [], 0
    for index in range(n_chunks):
        length = n_tokens // n_chunks + (1 if index < n_tokens % n_chunks else 0)
        length = min(length, model.max_model_len)
        taken = blocks_for(length, model.block_size)
        if next_block + taken > n_blocks:
            break
        chunks.append(
            Chunk(
                sequence_id=index,
                token_ids=(0,) * length,
                start=0,
                block_ids=tuple(range(next_block, next_block + taken)),
                sample=Sample(params=params, seeds=(index,), output_index=0),
            )
        )
        next_block += taken
    return StepPlan(step=0, copies=(), chunks=tuple(chunks))


def one_decode(model: DeviceModel) -> StepPlan:
    """One token after another, drawn greedily."""
    sample = Sample(params=SamplingParams(temperature=0.0), seeds=(0,), output_index=1)
    n_blocks = blocks_for(2, model.block_size)
    chunk = Chunk(sequence_id=0, token_ids=(0,), start=1, block_ids=tuple(range(n_blocks)), sample=sample)
    return StepPlan(step=0, copies=(), chunks=(chunk,))


def _taken_by(runner: DeviceRunner, bucket: tuple[int, int], device: torch.device) -> int:
    """Memory of the device that recording a bucket takes, what the driver keeps for graphs included."""
    before_bytes, _ = torch.cuda.mem_get_info(device)
    runner.graphs.record((bucket,))
    torch.cuda.synchronize(device)
    after_bytes, _ = torch.cuda.mem_get_info(device)
    return max(0, before_bytes - after_bytes)


def _settle(device: torch.device) -> None:
    """Give memory that nobody uses back to the device."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
