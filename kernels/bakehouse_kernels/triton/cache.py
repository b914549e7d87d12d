"""The paged cache of a GPU: per layer `[P, H, K, D]` for keys and for values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bakehouse_kernels.layout import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonCache(KVCache):
    """A cache whose layers a kernel can walk over: `addresses` (int64) of all keys, then of all values."""

    addresses: Tensor


def new_cache(
    *,
    n_layers: int,
    n_blocks: int,
    block_size: int,
    n_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> TritonCache:
    """An uninitialised cache. See `api.Ops.new_cache`."""
    shape = (n_blocks, n_kv_heads, block_size, head_dim)
    key, value = (tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(n_layers)) for _ in range(2))
    addresses = torch.tensor([layer.data_ptr() for layer in (*key, *value)], dtype=torch.int64, device=device)
    return TritonCache(key=key, value=value, block_size=block_size, addresses=addresses)
