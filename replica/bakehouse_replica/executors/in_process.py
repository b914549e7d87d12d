"""The executor that runs the model, or one rank's part of it, in its own process, on one device."""

import logging
from dataclasses import replace
from time import perf_counter

import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.dispatch import default_block_size, select_ops

from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import BlockCopy, Capacity, StepPlan, StepResult
from bakehouse_replica.executors.device_choice import dtype_of, kv_dtype_of
from bakehouse_replica.executors.host_steps import HostStep, HostSteps
from bakehouse_replica.executors.start_log import loaded_line
from bakehouse_replica.executors.step_sizes import step_sizes
from bakehouse_replica.model.batch import FlatChunks
from bakehouse_replica.model.collective import Alone, Collective
from bakehouse_replica.model.constraint import ConstraintSource, prepare_constraint
from bakehouse_replica.model.decoder import Decoder
from bakehouse_replica.model.parallel_ops import ParallelOps
from bakehouse_replica.model.runner import Runner
from bakehouse_replica.model.sharding import Shard, local_spec, own_tokens
from bakehouse_replica.model.sizing import MemoryPlan, available_memory_bytes, plan_memory
from bakehouse_replica.model.spec import ModelSpec
from bakehouse_replica.model.weights import DecoderWeights, load_weights
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_replica.source import ModelFiles

logger = logging.getLogger(__name__)


class InProcessExecutor:
    """Carries out plans in the thread that asks. Without `constraints`, which its runner has too, no grammars."""

    def __init__(self, *, runner: Runner, capacity: Capacity, constraints: ConstraintSource | None = None) -> None:
        self._runner: Runner | None = runner
        self._capacity = capacity
        self._constraints = constraints
        self._steps = HostSteps(self._carry_out, capacity.max_flights)

    @property
    def capacity(self) -> Capacity:
        """What it was built with."""
        return self._capacity

    @property
    def takes_placeholders(self) -> bool:
        """Of the host's own steps alone: other ranks need the tokens."""
        return False

    def prepare(self, params: SamplingParams) -> None:
        """Compiles the grammar."""
        prepare_constraint(self._constraints, params)

    def begin(self, plan: StepPlan) -> HostStep:
        """One step of the model."""
        return self._steps.begin(plan)

    def follow(self, copies: tuple[BlockCopy, ...], flat: FlatChunks | None) -> None:
        """The same step where this is another rank than the first; see `Runner.follow`."""
        assert self._runner is not None, "a step for an executor that has been closed"
        self._runner.follow(copies, flat)

    def close(self) -> None:
        """Lets go of weights and cache."""
        self._runner = None

    def _carry_out(self, plan: StepPlan, begun_at: float) -> StepResult:
        assert self._runner is not None, f"step {plan.step} for an executor that has been closed"
        turn_at = perf_counter()
        sampled, scored = self._runner.run(plan)
        return StepResult(step=plan.step, sampled=sampled, scored=scored, elapsed_s=perf_counter() - turn_at)


def build_executor(
    *,
    spec: ModelSpec,
    weights: DecoderWeights,
    ops: Ops,
    capacity: Capacity,
    constraints: ConstraintSource | None = None,
    collective: Collective | None = None,
) -> InProcessExecutor:
    """An executor with a cache of `capacity.n_blocks` blocks on the device of the weights, warmed up.

    With a `collective`, spec and weights are those of its rank, and all ranks build theirs at the same time.
    """
    if collective is not None and collective.size > 1:
        ops = ParallelOps(ops, collective)
    device = weights.embedding_VE.device
    cache = ops.new_cache(
        n_layers=spec.n_layers,
        n_blocks=capacity.n_blocks,
        block_size=capacity.block_size,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
    )
    decoder = Decoder(spec, weights, ops, collective)
    runner = Runner(decoder=decoder, cache=cache, ops=ops, device=device, constraints=constraints)
    runner.warm_up()
    return InProcessExecutor(runner=runner, capacity=capacity, constraints=constraints)


def host_memory(settings: ReplicaSettings, spec: ModelSpec, max_model_len: int, shard: Shard) -> MemoryPlan:
    """What a rank takes of this machine's memory. Raises `StartupError` where that does not suffice."""
    device = torch.device("cpu")
    return plan_memory(
        replace(local_spec(spec, shard), vocabulary_size=len(own_tokens(spec.vocabulary_size, shard))),
        dtype=dtype_of(settings, device),
        quantize=settings.quantize,
        kv_dtype=kv_dtype_of(settings, device),
        block_size=settings.block_size or default_block_size(device),
        max_model_len=max_model_len,
        kv_memory_bytes=settings.kv_memory_bytes,
        available_bytes=available_memory_bytes(),
        n_ranks=shard.size,
    )


def load_executor(
    settings: ReplicaSettings,
    files: ModelFiles,
    spec: ModelSpec,
    max_model_len: int,
    *,
    constraints: ConstraintSource | None = None,
    collective: Collective | None = None,
) -> InProcessExecutor:
    """The executor that the settings ask for on the CPU, with weights loaded and kernels compiled.

    With a `collective`, that of its rank; all ranks load theirs at the same time, and share memory and threads
    equally. Sets the compute threads of this process. Raises `StartupError` where the machine cannot serve the
    model so.
    """
    collective = collective or Alone()
    shard, device = Shard(collective.rank, collective.size), torch.device("cpu")
    n_threads = max(1, (settings.n_threads or torch.get_num_threads()) // shard.size)
    ops, memory = _cpu_ops(settings, files, n_threads), host_memory(settings, spec, max_model_len, shard)
    capacity = _cpu_capacity(settings, memory, collective.smallest(memory.n_blocks))
    begun_at = perf_counter()
    # What products do not read stays float32; the kernels round the rest as they pack it.
    weights = load_weights(
        files, spec, dtype=torch.float32, device=device, rotated=settings.quantize == "int8", shard=shard
    )
    loaded_at = perf_counter()
    executor = build_executor(
        spec=local_spec(spec, shard),
        weights=weights,
        ops=ops,
        capacity=capacity,
        constraints=constraints,
        collective=collective,
    )
    place = f"the CPU with {n_threads} threads"
    line = loaded_line(
        settings, files, capacity, shard, device, place=place, begun_at=begun_at, loaded_at=loaded_at
    )
    logger.info("%s", line)
    return executor


def _cpu_ops(settings: ReplicaSettings, files: ModelFiles, n_threads: int) -> Ops:
    device = torch.device("cpu")
    dtype, kv_dtype = dtype_of(settings, device), kv_dtype_of(settings, device)
    try:
        return select_ops(device, dtype, n_threads, quantize=settings.quantize, kv_dtype=kv_dtype)
    except ValueError as error:
        raise StartupError(f"model {files.name!r}: {error}") from error


def _cpu_capacity(settings: ReplicaSettings, memory: MemoryPlan, n_blocks: int) -> Capacity:
    device = torch.device("cpu")
    sizes = step_sizes(settings, device)
    return Capacity(
        n_blocks=n_blocks,
        block_size=settings.block_size or default_block_size(device),
        block_bytes=memory.kv_bytes // memory.n_blocks,
        max_step_tokens=sizes.max_step_tokens,
        max_sequences=sizes.max_sequences,
        max_flights=settings.max_flights(is_apart=False),
    )
