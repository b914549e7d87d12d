"""What a replica is told at start; built by `bakehouse_cluster.config`, read here and nowhere else."""

from dataclasses import dataclass, field
from typing import Literal

from bakehouse_replica.core.types import ModelSource

# The limits that a replica takes while it serves; the configuration file and Serve's `user_config` call them so.
LIVE_LIMITS = ("max_prefill_tokens", "max_waiting_requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """One replica's model, memory and scheduling limits.

    `dtype` is that of the weights and of the rows that meet them; `quantize` `int8` rounds both to 8 bits.
    `kv_dtype` is that of keys and values; `auto` is float16 where weights have 16 bits or fewer. `max_model_len`
    None takes the model's own context length. `kv_memory_bytes` None takes what one CPU replica gets by default
    (see `bakehouse_replica.model.sizing`). `executor` is what runs a model; a script (see
    `bakehouse_replica.script`) has one of its own. `fake_step_s`: how long a step of the fake one takes.
    `max_step_tokens`, `max_sequences` and `max_prefill_tokens` None: as suits the device (see
    `bakehouse_replica.executors.step_sizes`). `overlap`: whether the next step is planned while one runs; `auto`:
    where a GPU runs it.
    `n_threads`: compute threads this replica may use. `tensor_parallel`: how many ranks, a process each, share the
    model, its memory and the threads; one that is silent for `rank_timeout_s` is lost, and the replica with it.
    `step_timeout_s`: an engine that is in one step for longer hangs, and its replica ends.
    `vllm_names`: whether metrics are exported under the names that vLLM has for them, too. `hash_key` is shared by
    all replicas of a deployment and secret to it.
    """

    source: ModelSource = field(default_factory=ModelSource)
    served_name: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    quantize: Literal["none", "int8"] = "none"
    kv_dtype: Literal["auto", "float32", "float16"] = "auto"
    executor: Literal["model", "fake"] = "model"
    fake_step_s: float = 0.0
    overlap: Literal["auto", "on", "off"] = "auto"
    max_model_len: int | None = None
    kv_memory_bytes: int | None = None
    block_size: int | None = None
    max_step_tokens: int | None = None
    max_sequences: int | None = None
    max_prefill_tokens: int | None = None
    max_waiting_requests: int = 4096
    n_threads: int | None = None
    tensor_parallel: int = 1
    rank_timeout_s: float = 60.0
    step_timeout_s: float = 600.0
    vllm_names: bool = False
    hash_key: bytes = field(default=b"", repr=False)

    def max_flights(self, *, is_apart: bool) -> int:
        """How many steps may be in flight on a device; `is_apart`: it computes beside the host, not on it."""
        return 2 if self.overlap == "on" or (self.overlap == "auto" and is_apart) else 1
