"""How many KV blocks fit into a memory budget; runner and planner use the same arithmetic."""

from dataclasses import dataclass

from bakehouse_replica.core.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What decides the size of a block of keys and values; `element_bytes` is that of one number."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    element_bytes: int
    block_size: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of `block_size` tokens in all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * self.element_bytes * self.block_size


def blocks_for(n_tokens: int, block_size: int) -> int:
    """Blocks that `n_tokens` occupy, the last one perhaps partly filled."""
    return -(-n_tokens // block_size)


def plan_blocks(shape: KVShape, *, budget_bytes: int, max_model_len: int) -> int:
    """Blocks of a pool within `budget_bytes`.

    Raises `StartupError` with the numbers where not even one sequence of `max_model_len` tokens fits.
    """
    n_blocks = budget_bytes // shape.block_bytes
    n_needed = blocks_for(max_model_len, shape.block_size)
    if n_blocks >= n_needed:
        return n_blocks
    n_fitting = n_blocks * shape.block_size
    needed_bytes = n_needed * shape.block_bytes
    advice = f"lower --max-model-len to {n_fitting} or raise" if n_fitting else "raise"
    raise StartupError(
        f"a context of {max_model_len} tokens needs {format_bytes(needed_bytes)} of KV memory, but "
        f"{format_bytes(budget_bytes)} holds {n_fitting} tokens: "
        f"{advice} --kv-memory by {format_bytes(needed_bytes - budget_bytes)}"
    )


def format_bytes(n_bytes: int) -> str:
    """`n_bytes` for people: binary units, four digits at most."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
