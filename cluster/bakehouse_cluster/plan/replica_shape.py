"""What each replica and gateway would be, by a configuration: sizes as they are computed when a server starts.

Nothing is loaded and no device is asked, so that a fleet can be planned on a machine that could not hold it. What
a start would measure must therefore be said: the memory of the KV cache, and the device.
"""

import torch
from bakehouse_kernels.dispatch import default_block_size
from bakehouse_replica.core.capacity import KVShape, plan_blocks
from bakehouse_replica.core.errors import ConfigError
from bakehouse_replica.core.types import Capacity, Chunk, SchedulingPolicy, StepPlan
from bakehouse_replica.executors.device_choice import kind_of, kv_dtype_of
from bakehouse_replica.executors.step_sizes import step_sizes
from bakehouse_replica.model.device_sizing import N_NULL_BLOCKS
from bakehouse_replica.model.sharding import check_sizes
from bakehouse_replica.model.sizing import choose_max_model_len
from bakehouse_replica.model.spec import ModelSpec, read_spec
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_replica.source import SCRIPT_PREFIX, open_source

from bakehouse_cluster.config import Config
from bakehouse_cluster.plan.cost_file import CostFile, shape_of
from bakehouse_cluster.plan.fleet import GatewayShape, ReplicaShape

# Beyond any step that somebody waits for; the virtual clock ticks on in half seconds meanwhile.
MAX_STEP_S = 3600.0


def replica_shape(config: Config, cost: CostFile) -> ReplicaShape:
    """Raises `StartupError` where the configuration says too little, contradicts `cost`, or could not start."""
    _require_plannable(config, cost)
    settings = config.replica_settings(hash_key=b"")
    spec = read_spec(open_source(settings.source))
    check_sizes(spec, settings.tensor_parallel)
    max_model_len = choose_max_model_len(spec.context_length, settings.max_model_len)
    device = torch.device(cost.device)
    _require_measured(settings, spec, device, cost)
    sizes = step_sizes(settings, device)
    capacity = _capacity(settings, spec, max_model_len, device)
    _require_bearable(cost, capacity, max_model_len)
    return ReplicaShape(
        capacity=capacity,
        policy=SchedulingPolicy(
            max_model_len=max_model_len,
            max_prefill_tokens=sizes.max_prefill_tokens,
            max_waiting_requests=settings.max_waiting_requests,
        ),
        cost=cost.cost,
        vocabulary_size=spec.vocabulary_size,
    )


def gateway_shape(config: Config) -> GatewayShape:
    """The queues of the gateways."""
    return GatewayShape(
        n_gateways=config.server.gateways,
        max_queued_requests=config.gateway.max_queued_requests,
        max_queued_tokens=config.gateway.max_queued_tokens,
    )


def _require_plannable(config: Config, cost: CostFile) -> None:
    if config.replica.executor != "model" or config.model.source.startswith(SCRIPT_PREFIX):
        raise ConfigError("replica.executor: only a model's KV cache can be planned, not a fake's or a script's")
    if config.model.device not in ("auto", cost.device):
        raise ConfigError(
            f"model.device: it is {config.model.device}, but the cost was measured on {cost.device}; "
            f"calibrate on the device that is to serve"
        )
    if config.replica.kv_memory is None:
        raise ConfigError(
            "replica.kv_memory: not given, and a replica takes what its machine has free when it starts; "
            "say how much a replica will have, as --kv-memory 1GiB"
        )


def _require_measured(settings: ReplicaSettings, spec: ModelSpec, device: torch.device, cost: CostFile) -> None:
    """A cost that says of what it is must be of this replica; one written by hand may not say."""
    if cost.shape not in ("", shape_of(spec)):
        raise ConfigError(
            f"model.source: {settings.source.model} has {shape_of(spec)}, but the cost was measured with "
            f"{cost.model}: {cost.shape}; calibrate with the model of the server"
        )
    weights = kind_of(settings, device)
    if cost.weights not in ("", weights):
        raise ConfigError(
            f"model.dtype and model.quantize: products would be in {weights}, but the cost was measured in "
            f"{cost.weights}; calibrate with the options of the server"
        )
    if cost.n_ranks not in (None, settings.tensor_parallel):
        raise ConfigError(
            f"replica.tensor_parallel: it is {settings.tensor_parallel}, but the cost was measured with "
            f"{cost.n_ranks}; calibrate with the options of the server"
        )


def _require_bearable(cost: CostFile, capacity: Capacity, max_model_len: int) -> None:
    n_tokens = min(capacity.max_step_tokens, max_model_len)
    prompt = Chunk(sequence_id=0, token_ids=(0,) * n_tokens, start=max_model_len - n_tokens, block_ids=(0,))
    decode = Chunk(sequence_id=1, token_ids=(0,), start=max_model_len - 1, block_ids=(1,))
    seconds = cost.cost.seconds(StepPlan(step=0, copies=(), chunks=(prompt, decode)))
    if seconds > MAX_STEP_S:
        raise ConfigError(
            f"--cost: by it a step of {n_tokens} prompt tokens and a decode at the end of a context of "
            f"{max_model_len} takes {seconds:.4g} s; the limit is {MAX_STEP_S:.0f} s"
        )


def _capacity(settings: ReplicaSettings, spec: ModelSpec, max_model_len: int, device: torch.device) -> Capacity:
    sizes, is_gpu = step_sizes(settings, device), device.type == "cuda"
    shape = KVShape(
        n_layers=spec.n_layers,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        element_bytes=kv_dtype_of(settings, device).itemsize,
        block_size=settings.block_size or default_block_size(device),
    )
    budget_bytes = settings.kv_memory_bytes or 0
    if is_gpu:
        budget_bytes = max(0, budget_bytes - N_NULL_BLOCKS * shape.block_bytes)
    return Capacity(
        n_blocks=plan_blocks(shape, budget_bytes=budget_bytes, max_model_len=max_model_len),
        block_size=shape.block_size,
        block_bytes=shape.block_bytes,
        max_step_tokens=sizes.max_step_tokens,
        max_sequences=sizes.max_sequences,
        max_flights=settings.max_flights(is_apart=is_gpu),
    )
