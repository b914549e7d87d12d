"""Rotation of queries and keys by their positions, with keys and values written into the paged cache.

    rotated(x) = x * cos + concat(-x[D/2:], x[:D/2]) * sin
    key[slot // K, h, slot % K] = rotated(k[h])      value[slot // K, h, slot % K] = v[h]

Su et al. 2021, RoFormer (arXiv 2104.09864), in the half-split form of GPT-NeoX. Shape legend in `layout`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bakehouse_kernels.layout import KVCache
from bakehouse_kernels.triton.launch import device_class_of, launch_of, start_kernel


def rope_and_write(
    qkv_TX: Tensor, cos_TD: Tensor, sin_TD: Tensor, cache: KVCache, layer: int, slots_T: Tensor
) -> Tensor:
    """The rotated queries, `[T, N, D]`; writes keys and values. See `api.Ops.rope_and_write`.

    A slot outside of the cache is not written: no device raises.
    """
    key, value = cache.key[layer], cache.value[layer]
    n_blocks, n_kv_heads, block_size, head_dim = key.shape
    n_tokens, width = qkv_TX.shape
    n_heads = width // head_dim - 2 * n_kv_heads
    _check(qkv_TX, cos_TD, sin_TD, slots_T, n_kv_heads, head_dim)
    q_TND = torch.empty((n_tokens, n_heads, head_dim), dtype=qkv_TX.dtype, device=qkv_TX.device)
    if n_tokens == 0:
        return q_TND
    launch = launch_of("rope_write", device_class_of(qkv_TX.device))
    grid = (n_tokens, triton.cdiv(n_heads + 2 * n_kv_heads, launch.tiles["BLOCK_H"]))
    start_kernel(
        _rope_write,
        grid,
        qkv_TX,
        cos_TD,
        sin_TD,
        slots_T,
        q_TND,
        key,
        value,
        qkv_TX.stride(0),
        cos_TD.stride(0),
        n_blocks * block_size,
        N_HEADS=n_heads,
        N_KV_HEADS=n_kv_heads,
        BLOCK_SIZE=block_size,
        HALF=head_dim // 2,
        HALF_PAD=triton.next_power_of_2(head_dim // 2),
        **launch.options,
    )
    return q_TND


def _check(
    qkv_TX: Tensor, cos_TD: Tensor, sin_TD: Tensor, slots_T: Tensor, n_kv_heads: int, head_dim: int
) -> None:
    """Asserts that the arguments fit each other and the cache."""
    n_tokens, width = qkv_TX.shape
    n_heads = width // head_dim - 2 * n_kv_heads
    assert width == (n_heads + 2 * n_kv_heads) * head_dim, f"width {width} of heads of {head_dim}"
    assert n_heads > 0, f"width {width} holds no queries beside {n_kv_heads} key heads of {head_dim}"
    assert head_dim % 2 == 0, f"head dimension {head_dim} has no halves"
    assert cos_TD.shape == sin_TD.shape == (n_tokens, head_dim), f"cosines {tuple(cos_TD.shape)}"
    assert slots_T.shape == (n_tokens,), f"slots {tuple(slots_T.shape)} for {n_tokens} tokens"
    assert qkv_TX.stride(1) == cos_TD.stride(1) == sin_TD.stride(1) == 1, "rows that lie together"
    assert cos_TD.stride(0) == sin_TD.stride(0), "cosines and sines that lie alike"


@triton.jit(do_not_specialize=["slots", "n_slots"])
def _rope_write(
    qkv,
    cos,
    sin,
    slots,
    q_out,
    key,
    value,
    qkv_stride,
    cos_stride,
    n_slots,
    N_HEADS: tl.constexpr,
    N_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """A program for each token and BLOCK_H of its heads: queries, then keys, then values."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    half = tl.arange(0, HALF_PAD)
    in_half = half < HALF
    inside = (head < N_HEADS + 2 * N_KV_HEADS)[:, None] & in_half[None, :]
    place = head[:, None] * (2 * HALF) + half[None, :]
    first = tl.load(qkv + token * qkv_stride + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv + token * qkv_stride + place + HALF, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cos + token * cos_stride + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + token * cos_stride + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    turns = (head < N_HEADS + N_KV_HEADS)[:, None]
    turned_first = tl.where(turns, first * cosine - second * sine, first)
    turned_second = tl.where(turns, second * cosine + first * sine, second)

    is_query = inside & (head < N_HEADS)[:, None]
    query = q_out + token * (N_HEADS * 2 * HALF) + place
    tl.store(query, turned_first.to(q_out.dtype.element_ty), mask=is_query)
    tl.store(query + HALF, turned_second.to(q_out.dtype.element_ty), mask=is_query)

    slot = tl.load(slots + token)
    is_kept = inside & (slot >= 0) & (slot < n_slots)
    is_key = is_kept & ((head >= N_HEADS) & (head < N_HEADS + N_KV_HEADS))[:, None]
    is_value = is_kept & (head >= N_HEADS + N_KV_HEADS)[:, None]
    kv_head = (head - N_HEADS) % N_KV_HEADS
    row = (slot // BLOCK_SIZE * N_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    target = row[:, None] * (2 * HALF) + half[None, :]
    tl.store(key + target, turned_first.to(key.dtype.element_ty), mask=is_key)
    tl.store(key + target + HALF, turned_second.to(key.dtype.element_ty), mask=is_key)
    tl.store(value + target, turned_first.to(value.dtype.element_ty), mask=is_value)
    tl.store(value + target + HALF, turned_second.to(value.dtype.element_ty), mask=is_value)
