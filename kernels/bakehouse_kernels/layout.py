"""The paged KV cache and its slot arithmetic.

Shape legend, used as suffixes here and in every file of kernels and model:
    T tokens of all chunks of a step, end to end      S chunks (sequences) of a step
    N query heads      H key/value heads      D head dimension      E hidden size      F feed-forward width
    B blocks in the widest block table      K slots in a block (block_size)      P blocks in the pool
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """Keys and values of all layers: `key[l]` and `value[l]` are `[P, K, H, D]`, contiguous.

    Slot s stands in block `s // K` at offset `s % K`, so `key[l].view(P * K, H, D)[s]` is its key.
    """

    key: tuple[Tensor, ...]
    value: tuple[Tensor, ...]

    @classmethod
    def allocate(
        cls,
        *,
        n_layers: int,
        n_blocks: int,
        block_size: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "KVCache":
        """An uninitialised cache: a slot is written before it is first read."""
        shape = (n_blocks, block_size, n_kv_heads, head_dim)
        return cls(
            key=tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(n_layers)),
            value=tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(n_layers)),
        )

    @property
    def block_size(self) -> int:
        """Slots in a block."""
        return self.key[0].shape[1]

    @property
    def n_blocks(self) -> int:
        """Blocks in the pool."""
        return self.key[0].shape[0]
