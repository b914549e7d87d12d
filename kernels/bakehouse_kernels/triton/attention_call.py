"""What all kernels of one layer's attention are called with."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from bakehouse_kernels.layout import KVCache
from bakehouse_kernels.triton.launch import DeviceClass, Launch, device_class_of, launch_of

MAX_GROUP = 16
"""Query heads to a key head, at most: a tile of rows holds whole groups."""

_HEAD_DIMS = range(16, 257)  # a product sums over 16 at least; beyond 256 the tiles do not fit into shared memory


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """Queries `[T, N, D]`, whose rows may lie apart, keys and values `[P, H, K, D]`, and where the result goes."""

    q_TND: Tensor
    out_TND: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int | None
    softcap: float | None
    device_class: DeviceClass

    @property
    def group(self) -> int:
        """Query heads to a key head."""
        return self.q_TND.shape[1] // self.key.shape[1]

    @property
    def head_pad(self) -> int:
        """Numbers of a head, with those that fill it up to a power of two."""
        padded: int = triton.next_power_of_2(self.key.shape[3])
        return padded

    @property
    def constants(self) -> dict[str, int]:
        """Those that all kernels over keys have."""
        _, n_kv_heads, block_size, head_dim = self.key.shape
        return {
            "N_KV_HEADS": n_kv_heads,
            "GROUP": self.group,
            "BLOCK_SIZE": block_size,
            "HEAD_DIM": head_dim,
            "HEAD_PAD": self.head_pad,
            "WINDOWED": self.window is not None,
            "CAPPED": self.softcap is not None,
            "WIDEN": self.device_class == "interpreter" and self.key.dtype == torch.bfloat16,
        }

    @property
    def numbers(self) -> tuple[float, float, int]:
        """Scale, soft-cap and window as the kernels take them, anything for one that there is not."""
        return self.scale, 1.0 if self.softcap is None else self.softcap, self.window or 0

    def launch(self, op: str) -> Launch:
        """How kernel `op` is launched for this call."""
        return launch_of(op, self.device_class, element_bytes=self.key.itemsize, head_pad=self.head_pad)


def attention_call(
    q_TND: Tensor, cache: KVCache, layer: int, *, scale: float, window: int | None, softcap: float | None
) -> AttentionCall:
    """A call with an uninitialised result; asserts that shapes and dtypes fit each other.

    Raises `ValueError` on heads that the kernels have no tiles for.
    """
    key, value = cache.key[layer], cache.value[layer]
    (_, n_heads, head_dim), (_, n_kv_heads, _, key_dim) = q_TND.shape, key.shape
    assert n_heads % n_kv_heads == 0, f"{n_heads} query heads do not divide into {n_kv_heads} key heads"
    assert head_dim == key_dim, f"head dimension {head_dim} against {key_dim}"
    assert q_TND.dtype == key.dtype == value.dtype, f"queries of {q_TND.dtype} over keys of {key.dtype}"
    assert key.is_contiguous(), "a cache from `new_cache`"
    assert value.is_contiguous(), "a cache from `new_cache`"
    assert scale > 0.0, f"scale is {scale}"
    if head_dim not in _HEAD_DIMS:
        raise ValueError(f"head dimension is {head_dim}; the kernels serve {_HEAD_DIMS[0]} to {_HEAD_DIMS[-1]}")
    if n_heads // n_kv_heads > MAX_GROUP:
        raise ValueError(f"{n_heads // n_kv_heads} query heads to a key head; the kernels serve up to {MAX_GROUP}")
    if q_TND.stride(2) != 1:
        q_TND = q_TND.contiguous()
    return AttentionCall(
        q_TND=q_TND,
        out_TND=torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device),
        key=key,
        value=value,
        scale=scale,
        window=window,
        softcap=softcap,
        device_class=device_class_of(key.device),
    )
