"""Decides before any weight is loaded how a replica divides the machine's memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from bakehouse_replica.core.capacity import KVShape, format_bytes, plan_blocks
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.model.spec import ModelSpec

_DEFAULT_KV_BYTES = 1024**3
_DEFAULT_KV_SHARE = 0.25
# Interpreter, torch, compiled kernels and the activations of a step: 600 MB measured for a 135M model.
_WORKING_BYTES = 768 * 1024**2
# Beside its 8-bit weights an output has a scale (float32) and the sum of those weights (int32).
_OUTPUT_BYTES = 8
# The embedding is float32 whatever the products multiply.
_FLOAT_BYTES = 4

MIN_MODEL_LEN = 2  # a token of prompt and one of output

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What one replica takes; all its sequences share `n_blocks` blocks of KV cache."""

    weight_bytes: int
    kv_bytes: int
    n_blocks: int


def available_memory_bytes() -> int:
    """Memory that can still be taken: of the machine, or of this container where that is less."""
    available = psutil.virtual_memory().available
    return min(available, _container_bytes(_CGROUP, available))


def plan_memory(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    quantize: Literal["none", "int8"],
    kv_dtype: torch.dtype,
    block_size: int,
    max_model_len: int,
    kv_memory_bytes: int | None,
    available_bytes: int,
    n_ranks: int = 1,
) -> MemoryPlan:
    """Weights, and KV cache within `kv_memory_bytes` (None: a quarter of what the weights leave, at most 1 GiB).

    `dtype` is that of packed weights, where they are not quantised. `spec` is that of one of `n_ranks` that share
    the machine; all bytes are those of all ranks together. Raises `StartupError` with the numbers where
    the memory does not suffice, or where the cache cannot hold one sequence of `max_model_len` tokens.
    """
    weight_bytes = n_ranks * _weight_bytes(spec, dtype, quantize)
    working_bytes = n_ranks * _WORKING_BYTES
    fixed_bytes = weight_bytes + working_bytes
    left_bytes = available_bytes - fixed_bytes
    budget_bytes = kv_memory_bytes
    if budget_bytes is None:
        budget_bytes = max(0, min(_DEFAULT_KV_BYTES, int(left_bytes * _DEFAULT_KV_SHARE)))
    if budget_bytes > left_bytes:
        raise StartupError(
            f"too little memory: {format_bytes(available_bytes)} are available, but the weights take "
            f"{format_bytes(weight_bytes)}, the process {format_bytes(working_bytes)} and the KV cache "
            f"{format_bytes(budget_bytes)}"
        )
    shape = KVShape(
        n_layers=spec.n_layers,
        n_kv_heads=n_ranks * spec.n_kv_heads,
        head_dim=spec.head_dim,
        element_bytes=kv_dtype.itemsize,
        block_size=block_size,
    )
    n_blocks = plan_blocks(shape, budget_bytes=budget_bytes, max_model_len=max_model_len)
    return MemoryPlan(weight_bytes=weight_bytes, kv_bytes=n_blocks * shape.block_bytes, n_blocks=n_blocks)


def _weight_bytes(spec: ModelSpec, dtype: torch.dtype, quantize: Literal["none", "int8"]) -> int:
    """Of the embedding, in which rows are looked up, and of the packed matrices, of which the head is one."""
    n_embedding = spec.hidden_size * spec.vocabulary_size
    n_packed = spec.n_parameters - (0 if spec.has_tied_head else n_embedding)
    if quantize == "none":
        return n_embedding * _FLOAT_BYTES + n_packed * dtype.itemsize
    return n_embedding * _FLOAT_BYTES + n_packed + spec.n_outputs * _OUTPUT_BYTES


def choose_max_model_len(context_length: int, asked: int | None) -> int:
    """`asked`, or the model's own context length; `StartupError` where more is asked than the model can do."""
    if asked is None:
        return context_length
    if not MIN_MODEL_LEN <= asked <= context_length:
        raise StartupError(
            f"--max-model-len is {asked}; it must be from {MIN_MODEL_LEN} to the model's context length, "
            f"{context_length}"
        )
    return asked


def _container_bytes(cgroup: Path, unlimited: int) -> int:
    """What a cgroup (version 2) lets its processes take on top of what they use; `unlimited` without a limit."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        statistics = (cgroup / "memory.stat").read_text()
    except OSError:
        return unlimited
    if limit == "max":
        return unlimited
    # The kernel gives file pages back before it refuses memory.
    lines = (line.split() for line in statistics.splitlines())
    reclaimable = next((int(n_bytes) for key, n_bytes in lines if key == "inactive_file"), 0)
    return max(0, int(limit) - used + reclaimable)
