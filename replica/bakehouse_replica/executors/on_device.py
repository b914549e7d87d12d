"""Builds the executor that runs a model, or one rank's part of it, on a GPU.

Measures the largest step, sizes the cache by it, records decode steps. Where several ranks share the model, each
step of that is one that all of them do, in the same order: what they say to each other stands within.
"""

import gc
import logging
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.dispatch import default_block_size, select_ops

from bakehouse_replica.core.capacity import KVShape, blocks_for
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.core.executor import Pending
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import BlockCopy, Capacity, Chunk, Sample, StepPlan
from bakehouse_replica.executors.device_choice import device_of, dtype_of, kv_dtype_of
from bakehouse_replica.model.batch import FlatChunks
from bakehouse_replica.model.buckets import Buckets, buckets_of
from bakehouse_replica.model.collective import Alone, Collective
from bakehouse_replica.model.constraint import ConstraintSource, prepare_constraint
from bakehouse_replica.model.decoder import Decoder
from bakehouse_replica.model.device_runner import DeviceRunner, StepLimits
from bakehouse_replica.model.device_sizing import N_NULL_BLOCKS, DeviceMemory, graph_bytes_of, plan_device_blocks
from bakehouse_replica.model.parallel_ops import ParallelOps
from bakehouse_replica.model.sharding import Shard, local_spec
from bakehouse_replica.model.spec import ModelSpec
from bakehouse_replica.model.weights import DecoderWeights, load_weights
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_replica.source import ModelFiles

logger = logging.getLogger(__name__)

# Larger steps take so long that their launches hide behind them.
MAX_GRAPH_ROWS = 256


class DeviceExecutor:
    """Launches plans on a device. Without `constraints`, which the runner has too, no grammars."""

    def __init__(
        self, *, runner: DeviceRunner, capacity: Capacity, constraints: ConstraintSource | None = None
    ) -> None:
        self._runner: DeviceRunner | None = runner
        self._capacity = capacity
        self._constraints = constraints

    @property
    def capacity(self) -> Capacity:
        """What it was built with."""
        return self._capacity

    @property
    def takes_placeholders(self) -> bool:
        """What the step before has drawn is on the device."""
        return True

    def prepare(self, params: SamplingParams) -> None:
        """Compiles the grammar."""
        prepare_constraint(self._constraints, params)

    def begin(self, plan: StepPlan) -> Pending:
        """Launches the step."""
        assert self._runner is not None, f"step {plan.step} for an executor that has been closed"
        return self._runner.begin(plan)

    def follow(self, copies: tuple[BlockCopy, ...], flat: FlatChunks | None) -> None:
        """Launches the same step where this is another rank than the first; see `DeviceRunner.follow`."""
        assert self._runner is not None, "a step for an executor that has been closed"
        self._runner.follow(copies, flat)

    def close(self) -> None:
        """Lets go of weights, cache and recordings."""
        self._runner = None


def load_device_executor(
    settings: ReplicaSettings,
    files: ModelFiles,
    spec: ModelSpec,
    max_model_len: int,
    *,
    constraints: ConstraintSource | None = None,
    collective: Collective | None = None,
) -> DeviceExecutor:
    """The executor that the settings ask for on a GPU, with weights loaded and decode steps recorded.

    With a `collective`, that of its rank, on a GPU of its own; all ranks load theirs at the same time. Raises
    `StartupError` where the device cannot serve the model so.
    """
    collective = collective or Alone()
    shard = Shard(collective.rank, collective.size)
    own_spec = local_spec(spec, shard)
    device = device_of(settings)
    dtype, kv_dtype = dtype_of(settings, device), kv_dtype_of(settings, device)
    n_threads = settings.n_threads or torch.get_num_threads()
    try:
        ops = select_ops(device, dtype, n_threads, quantize=settings.quantize, kv_dtype=kv_dtype)
    except ValueError as error:
        raise StartupError(f"model {files.name!r}: {error}") from error
    begun_at = perf_counter()
    block_size = settings.block_size or default_block_size(device)
    # Nobody but the decoder keeps the weights, so what it packs into a copy is freed.
    model = device_model(
        own_spec,
        load_weights(files, spec, dtype=dtype, device=device, shard=shard),
        ops,
        collective,
        block_size=block_size,
        max_model_len=max_model_len,
        max_step_tokens=settings.max_step_tokens,
        max_sequences=settings.max_sequences,
    )
    loaded_at = perf_counter()
    shape = KVShape(
        n_layers=spec.n_layers,
        n_kv_heads=own_spec.n_kv_heads,
        head_dim=spec.head_dim,
        element_bytes=kv_dtype.itemsize,
        block_size=block_size,
    )
    asked_bytes = settings.kv_memory_bytes
    own_blocks = plan_device_blocks(
        shape,
        measure(model, shape.block_bytes),
        kv_memory_bytes=None if asked_bytes is None else asked_bytes // shard.size,
        max_model_len=max_model_len,
    )
    n_blocks = collective.smallest(own_blocks)
    executor = build_device_executor(
        model,
        n_blocks=n_blocks,
        block_bytes=shard.size * shape.block_bytes,
        max_flights=settings.max_flights(is_apart=True),
        constraints=constraints,
    )
    logger.info(
        "%s, rank %d of %d, in %s on %s: weights in %.1f s, warm-up and graphs in %.1f s, "
        "%d blocks of %d tokens in %s (%.0f MB)",
        files.name,
        shard.rank,
        shard.size,
        str(dtype).removeprefix("torch."),
        torch.cuda.get_device_name(device),
        loaded_at - begun_at,
        perf_counter() - loaded_at,
        n_blocks,
        block_size,
        str(kv_dtype).removeprefix("torch."),
        n_blocks * shape.block_bytes / 1e6,
    )
    return executor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """A model, or one rank's part of it, on its device, and the largest step that it has to do."""

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


def device_model(
    spec: ModelSpec,
    weights: DecoderWeights,
    ops: Ops,
    collective: Collective | None = None,
    *,
    block_size: int,
    max_model_len: int,
    max_step_tokens: int,
    max_sequences: int,
) -> DeviceModel:
    """The model on the device of its weights. With a `collective`, spec and weights are those of its rank."""
    if collective is not None and collective.size > 1:
        ops = ParallelOps(ops, collective)
    return DeviceModel(
        spec=spec,
        decoder=Decoder(spec, weights, ops, collective),
        ops=ops,
        device=weights.embedding_VE.device,
        block_size=block_size,
        max_model_len=max_model_len,
        max_step_tokens=max_step_tokens,
        max_sequences=max_sequences,
    )


def build_device_executor(
    model: DeviceModel,
    *,
    n_blocks: int,
    block_bytes: int = 0,
    max_flights: int = 1,
    constraints: ConstraintSource | None = None,
) -> DeviceExecutor:
    """An executor with `n_blocks` blocks for sequences; decode steps are recorded, and all kernels compiled.

    `max_flights`: see `Capacity`; at most 2.
    """
    runner = model.runner(n_blocks, constraints)
    for plan in (largest_step(model, n_blocks), one_decode(model), unrecorded(model, n_blocks)):
        runner.rehearse(plan)
    runner.graphs.record()
    runner.rehearse(one_decode(model))
    capacity = Capacity(
        n_blocks=n_blocks,
        block_size=model.block_size,
        block_bytes=block_bytes,
        max_step_tokens=model.max_step_tokens,
        max_sequences=model.max_sequences,
        max_flights=max_flights,
    )
    return DeviceExecutor(runner=runner, capacity=capacity, constraints=constraints)


def measure(model: DeviceModel, block_bytes: int) -> DeviceMemory:
    """What the largest step and the recordings take on a GPU, found by doing them with the least cache.

    What a runner holds between steps, inputs and the logits of recordings, counts as its step's.
    """
    device = model.device
    _settle(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    n_blocks = blocks_for(model.max_step_tokens, model.block_size) + model.max_sequences
    resting_bytes = torch.cuda.memory_allocated(device) + (n_blocks + N_NULL_BLOCKS) * block_bytes
    runner = model.runner(n_blocks)
    plan = largest_step(model, n_blocks)
    runner.rehearse(plan)  # once, so that what is loaded and compiled does not count
    torch.cuda.reset_peak_memory_stats(device)
    runner.rehearse(plan)
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


def largest_step(model: DeviceModel, n_blocks: int) -> StepPlan:
    """As many sequences and tokens as a step may have and `n_blocks` hold, a token drawn after each chunk."""
    params = SamplingParams(temperature=1.0, top_p=0.9)
    chunks: list[Chunk] = []
    n_tokens, next_block = model.max_step_tokens, 0
    for index in range(min(model.max_sequences, n_tokens, n_blocks)):
        # What is left is shared out among the sequences that are left.
        length = min(-(-n_tokens // (model.max_sequences - index)), model.max_model_len)
        length = min(length, (n_blocks - next_block) * model.block_size)
        if length <= 0:
            break
        after_block = next_block + blocks_for(length, model.block_size)
        chunks.append(
            Chunk(
                sequence_id=index,
                token_ids=(0,) * length,
                start=0,
                block_ids=tuple(range(next_block, after_block)),
                sample=Sample(params=params, seeds=(index,), output_index=0),
            )
        )
        n_tokens, next_block = n_tokens - length, after_block
    return StepPlan(step=0, copies=(), chunks=tuple(chunks))


def one_decode(model: DeviceModel) -> StepPlan:
    """One token after another, drawn greedily."""
    sample = Sample(params=SamplingParams(temperature=0.0), seeds=(0,), output_index=1)
    n_blocks = blocks_for(2, model.block_size)
    chunk = Chunk(sequence_id=0, token_ids=(0,), start=1, block_ids=tuple(range(n_blocks)), sample=sample)
    return StepPlan(step=0, copies=(), chunks=(chunk,))


def unrecorded(model: DeviceModel, null_block: int) -> StepPlan:
    """A decode step with what no recording holds: a copy of a block, and logits that the host surveys."""
    plan = one_decode(model)
    (chunk,) = plan.chunks
    assert chunk.sample is not None
    sample = replace(chunk.sample, params=replace(chunk.sample.params, logprobs=1))
    copies = (BlockCopy(source=0, target=null_block),)
    return replace(plan, copies=copies, chunks=(replace(chunk, sample=sample),))


def _taken_by(runner: DeviceRunner, bucket: tuple[int, int], device: torch.device) -> int:
    """Memory of the device that recording a bucket takes, what the driver keeps for graphs included."""
    _settle(device)  # a capture gives back what nobody uses, which would count against what it takes
    before_bytes, _ = torch.cuda.mem_get_info(device)
    runner.graphs.record((bucket,))
    _settle(device)
    after_bytes, _ = torch.cuda.mem_get_info(device)
    return max(0, before_bytes - after_bytes)


def _settle(device: torch.device) -> None:
    """Give memory that nobody uses back to the device."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
