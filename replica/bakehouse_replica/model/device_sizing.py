"""Decides how many blocks of keys and values a GPU holds, from what its largest step was seen to take."""

from dataclasses import dataclass

from bakehouse_replica.core.capacity import KVShape, format_bytes, plan_blocks
from bakehouse_replica.core.errors import StartupError

# Left free: libraries load code and take workspaces after the measurement, and memory breaks into pieces.
_MARGIN_SHARE = 0.02
_LEAST_MARGIN_BYTES = 512 * 1024**2

# A block that belongs to no sequence: rows that fill a recorded step up write to it.
N_NULL_BLOCKS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """What was measured with the weights loaded and no cache.

    `step_bytes`: the most that the largest step took at once. `graph_bytes`: what all recordings take.
    """

    total_bytes: int
    free_bytes: int
    step_bytes: int
    graph_bytes: int

    @property
    def margin_bytes(self) -> int:
        """What stays free."""
        return max(_LEAST_MARGIN_BYTES, int(self.total_bytes * _MARGIN_SHARE))

    @property
    def left_bytes(self) -> int:
        """What a cache may take."""
        return max(0, self.free_bytes - self.step_bytes - self.graph_bytes - self.margin_bytes)


def plan_device_blocks(
    shape: KVShape, memory: DeviceMemory, *, kv_memory_bytes: int | None, max_model_len: int
) -> int:
    """Blocks for sequences, within `kv_memory_bytes` (None: all that is left); the null block comes on top.

    Raises `StartupError` with the numbers where the memory does not suffice, or where the cache cannot hold one
    sequence of `max_model_len` tokens.
    """
    budget_bytes = memory.left_bytes if kv_memory_bytes is None else kv_memory_bytes
    if budget_bytes > memory.left_bytes:
        raise StartupError(
            f"too little memory on the device: {format_bytes(memory.free_bytes)} are free beside the weights, but "
            f"a step takes {format_bytes(memory.step_bytes)}, recordings {format_bytes(memory.graph_bytes)} and "
            f"the KV cache {format_bytes(budget_bytes)}, and {format_bytes(memory.margin_bytes)} have to stay free"
        )
    null_bytes = N_NULL_BLOCKS * shape.block_bytes
    return plan_blocks(shape, budget_bytes=max(0, budget_bytes - null_bytes), max_model_len=max_model_len)


def graph_bytes_of(n_graphs: int, *, first_bytes: int, second_bytes: int) -> int:
    """What `n_graphs` recordings take, the two largest of which were measured.

    The first one brings the memory that all of them share. Later ones are smaller than the second.
    """
    return first_bytes + max(0, n_graphs - 1) * second_bytes
