"""What is said of an executor that has been loaded."""

from time import perf_counter

import torch

from bakehouse_replica.core.types import Capacity
from bakehouse_replica.executors.device_choice import kind_of, kv_dtype_of
from bakehouse_replica.executors.step_sizes import step_sizes
from bakehouse_replica.model.sharding import Shard
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_replica.source import ModelFiles


def loaded_line(
    settings: ReplicaSettings,
    files: ModelFiles,
    capacity: Capacity,
    shard: Shard,
    device: torch.device,
    *,
    place: str,
    begun_at: float,
    loaded_at: float,
) -> str:
    """Of one rank's part of a model, on `place`: how long it took, what it holds, how large its steps are.

    Seconds of `perf_counter`: the weights were loaded from `begun_at` to `loaded_at`, and all is ready now.
    """
    own_bytes = capacity.n_blocks * capacity.block_bytes // shard.size
    return (
        f"{files.name}, rank {shard.rank} of {shard.size}, in {kind_of(settings, device)} on {place}: "
        f"weights in {loaded_at - begun_at:.1f} s, ready in {perf_counter() - loaded_at:.1f} s more, "
        f"{capacity.n_blocks} blocks of {capacity.block_size} tokens in "
        f"{str(kv_dtype_of(settings, device)).removeprefix('torch.')} ({own_bytes / 1e6:.0f} MB), "
        f"{step_sizes(settings, device)}"
    )
