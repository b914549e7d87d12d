"""Builds the executor that runs a model, or one rank's part of it, on a GPU.

Measures the largest steps, sizes the cache by them, records decode steps. Where several ranks share the model,
each step of that is one that all of them do, in the same order: what they say to each other stands within.
"""

import logging
from collections.abc import Callable
from time import perf_counter

import torch
from bakehouse_kernels.dispatch import default_block_size, select_ops

from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.core.executor import Pending
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import BlockCopy, Capacity, StepPlan
from bakehouse_replica.executors.device_choice import device_of, dtype_of, kv_dtype_of
from bakehouse_replica.executors.device_model import DeviceModel, device_model
from bakehouse_replica.executors.measuring import CudaMeter, largest_steps, measure, one_decode, unrecorded
from bakehouse_replica.executors.start_log import loaded_line
from bakehouse_replica.executors.step_sizes import step_sizes
from bakehouse_replica.model.batch import FlatChunks
from bakehouse_replica.model.collective import Alone, Collective
from bakehouse_replica.model.constraint import ConstraintSource, prepare_constraint
from bakehouse_replica.model.device_runner import DeviceRunner
from bakehouse_replica.model.device_sizing import plan_device_blocks
from bakehouse_replica.model.sharding import Shard, local_spec
from bakehouse_replica.model.spec import ModelSpec
from bakehouse_replica.model.weights import load_weights
from bakehouse_replica.recording_file import recording_told
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_replica.source import ModelFiles

logger = logging.getLogger(__name__)


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
    shard, device = Shard(collective.rank, collective.size), device_of(settings)
    begun_at = perf_counter()
    model = load_device_model(settings, files, spec, max_model_len, device, collective)
    loaded_at = perf_counter()
    shape, asked_bytes = model.kv_shape(kv_dtype_of(settings, device)), settings.kv_memory_bytes
    own_blocks = plan_device_blocks(
        shape,
        measure(model, shape.block_bytes, CudaMeter(device)),
        kv_memory_bytes=None if asked_bytes is None else asked_bytes // shard.size,
        max_model_len=max_model_len,
    )
    with recording_told(files.cache_dir) as tell:
        executor = build_device_executor(
            model,
            n_blocks=collective.smallest(own_blocks),
            block_bytes=shard.size * shape.block_bytes,
            max_flights=settings.max_flights(is_apart=True),
            constraints=constraints,
            on_recorded=tell if collective.rank == 0 else None,
        )
    place = torch.cuda.get_device_name(device)
    line = loaded_line(
        settings, files, executor.capacity, shard, device, place=place, begun_at=begun_at, loaded_at=loaded_at
    )
    logger.info("%s", line)
    return executor


def load_device_model(
    settings: ReplicaSettings,
    files: ModelFiles,
    spec: ModelSpec,
    max_model_len: int,
    device: torch.device,
    collective: Collective,
) -> DeviceModel:
    """A rank's part of the model, with weights and steps as the settings ask for. Raises `StartupError`."""
    shard, dtype = Shard(collective.rank, collective.size), dtype_of(settings, device)
    n_threads = settings.n_threads or torch.get_num_threads()
    try:
        ops = select_ops(
            device, dtype, n_threads, quantize=settings.quantize, kv_dtype=kv_dtype_of(settings, device)
        )
    except ValueError as error:
        raise StartupError(f"model {files.name!r}: {error}") from error
    # Nobody but the decoder keeps the weights, so what it packs into a copy is freed.
    return device_model(
        local_spec(spec, shard),
        load_weights(files, spec, dtype=dtype, device=device, rotated=settings.quantize == "int8", shard=shard),
        ops,
        collective,
        block_size=settings.block_size or default_block_size(device),
        max_model_len=max_model_len,
        sizes=step_sizes(settings, device),
    )


def build_device_executor(
    model: DeviceModel,
    *,
    n_blocks: int,
    block_bytes: int = 0,
    max_flights: int = 1,
    constraints: ConstraintSource | None = None,
    on_recorded: Callable[[int, int], None] | None = None,
) -> DeviceExecutor:
    """An executor with `n_blocks` blocks for sequences; decode steps are recorded, and all kernels compiled.

    `max_flights`: see `Capacity`; at most 2. `on_recorded`: see `GraphedSteps.record`.
    """
    runner = model.runner(n_blocks, constraints)
    for plan in (*largest_steps(model, n_blocks), one_decode(model), unrecorded(model, n_blocks)):
        runner.rehearse(plan)
    runner.graphs.record(on_recorded=on_recorded)
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
