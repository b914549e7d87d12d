"""The executor that runs the model in its own process, on one device."""

import logging
from time import perf_counter

import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.dispatch import default_block_size, select_ops

from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Capacity, StepPlan, StepResult
from bakehouse_replica.executors.device_choice import dtype_of, kv_dtype_of
from bakehouse_replica.executors.host_steps import HostStep, HostSteps
from bakehouse_replica.model.constraint import ConstraintSource, prepare_constraint
from bakehouse_replica.model.decoder import Decoder
from bakehouse_replica.model.runner import Runner
from bakehouse_replica.model.sizing import available_memory_bytes, plan_memory
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

    def prepare(self, params: SamplingParams) -> None:
        """Compiles the grammar."""
        prepare_constraint(self._constraints, params)

    def begin(self, plan: StepPlan) -> HostStep:
        """One step of the model."""
        return self._steps.begin(plan)

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
) -> InProcessExecutor:
    """An executor with a cache of `capacity.n_blocks` blocks on the device of the weights, warmed up."""
    device = weights.embedding_VE.device
    cache = ops.new_cache(
        n_layers=spec.n_layers,
        n_blocks=capacity.n_blocks,
        block_size=capacity.block_size,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
    )
    decoder = Decoder(spec, weights, ops)
    runner = Runner(decoder=decoder, cache=cache, ops=ops, device=device, constraints=constraints)
    runner.warm_up()
    return InProcessExecutor(runner=runner, capacity=capacity, constraints=constraints)


def load_executor(
    settings: ReplicaSettings,
    files: ModelFiles,
    spec: ModelSpec,
    max_model_len: int,
    *,
    constraints: ConstraintSource | None = None,
) -> InProcessExecutor:
    """The executor that the settings ask for on the CPU, with weights loaded and kernels compiled.

    Sets the compute threads of this process. Raises `StartupError` where the machine cannot serve the model so.
    """
    device = torch.device("cpu")
    dtype, kv_dtype = dtype_of(settings, device), kv_dtype_of(settings, device)
    n_threads = settings.n_threads or torch.get_num_threads()
    try:
        ops = select_ops(device, dtype, n_threads, quantize=settings.quantize, kv_dtype=kv_dtype)
    except ValueError as error:
        raise StartupError(f"model {files.name!r}: {error}") from error
    block_size = settings.block_size or default_block_size(device)
    memory = plan_memory(
        spec,
        dtype=dtype,
        quantize=settings.quantize,
        kv_dtype=kv_dtype,
        block_size=block_size,
        max_model_len=max_model_len,
        kv_memory_bytes=settings.kv_memory_bytes,
        available_bytes=available_memory_bytes(),
    )
    begun_at = perf_counter()
    # What products do not read stays float32; the kernels round the rest as they pack it.
    weights = load_weights(files, spec, dtype=torch.float32, device=device, rotated=settings.quantize == "int8")
    loaded_at = perf_counter()
    capacity = Capacity(
        n_blocks=memory.n_blocks,
        block_size=block_size,
        block_bytes=memory.kv_bytes // memory.n_blocks,
        max_step_tokens=settings.max_step_tokens,
        max_sequences=settings.max_sequences,
        max_flights=settings.max_flights(is_apart=device.type == "cuda"),
    )
    executor = build_executor(spec=spec, weights=weights, ops=ops, capacity=capacity, constraints=constraints)
    logger.info(
        "%s in %s on %s with %d threads: weights in %.1f s, warm-up in %.1f s, "
        "%d blocks of %d tokens in %s (%.0f MB)",
        files.name,
        settings.quantize if settings.quantize != "none" else str(dtype).removeprefix("torch."),
        device,
        n_threads,
        loaded_at - begun_at,
        perf_counter() - loaded_at,
        memory.n_blocks,
        block_size,
        str(kv_dtype).removeprefix("torch."),
        memory.kv_bytes / 1e6,
    )
    return executor
