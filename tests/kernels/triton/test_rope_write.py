"""Rotation and writing of keys and values against their definition."""

import pytest
import torch
from bakehouse_kernels.layout import KVCache
from bakehouse_kernels.reference import ReferenceOps
from bakehouse_kernels.triton.cache import TritonCache, new_cache
from bakehouse_kernels.triton.rope_write import rope_and_write
from torch import Tensor

from tests.kernels.triton.conftest import Close

SHAPES = [  # tokens, query heads, key heads, head dimension, block size
    (0, 2, 1, 8, 4),
    (1, 1, 1, 2, 1),
    (1, 9, 3, 64, 16),
    (7, 5, 1, 80, 3),
    (4, 4, 4, 12, 16),
    (3, 7, 1, 256, 5),
]


def poisoned_cache(
    n_blocks: int, block_size: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> TritonCache:
    cache = new_cache(
        n_layers=2,
        n_blocks=n_blocks,
        block_size=block_size,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    for layer in (*cache.key, *cache.value):
        layer.fill_(torch.nan)
    return cache


def rope_rows(n_tokens: int, head_dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    angles = torch.rand(n_tokens, head_dim // 2, generator=generator) * 6
    angles = torch.cat((angles, angles), dim=1)
    return angles.cos(), angles.sin()


def in_slots(layer_PHKD: Tensor) -> Tensor:
    """As the reference keeps it: `[P, K, H, D]`."""
    return layer_PHKD.transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n_tokens", "n_heads", "n_kv_heads", "head_dim", "block_size"), SHAPES)
def test_queries_keys_and_values_are_as_defined_and_nothing_else_is_written(
    close: Close,
    generator: torch.Generator,
    n_tokens: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    n_blocks = 6
    cache = poisoned_cache(n_blocks, block_size, n_kv_heads, head_dim, dtype)
    reference = ReferenceOps(dtype=dtype)
    expected = reference.new_cache(
        n_layers=2, n_blocks=n_blocks, block_size=block_size, n_kv_heads=n_kv_heads, head_dim=head_dim
    )
    for tensor in (*expected.key, *expected.value):
        tensor.fill_(torch.nan)
    slots = torch.randperm(n_blocks * block_size, generator=generator)[:n_tokens]
    n_tokens = len(slots)
    qkv = torch.randn(n_tokens, (n_heads + 2 * n_kv_heads) * head_dim, generator=generator).to(dtype)
    cos, sin = rope_rows(n_tokens, head_dim, generator)
    q = rope_and_write(qkv, cos, sin, cache, 1, slots)
    close(q, reference.rope_and_write(qkv, cos, sin, expected, 1, slots))
    for actual, wanted in ((cache.key, expected.key), (cache.value, expected.value)):
        for layer in range(2):
            close(in_slots(actual[layer]), wanted[layer])


def test_a_slot_outside_of_the_cache_is_not_written(generator: torch.Generator) -> None:
    head_dim, before, after = 4, 5, 3
    room = torch.full((before + 2 * 3 * head_dim + after,), torch.nan)
    key = room[before : before + 2 * 3 * head_dim].view(2, 1, 3, head_dim)
    value = torch.full_like(key, torch.nan)
    cache = KVCache(key=(key,), value=(value,), block_size=3)
    qkv = torch.ones(4, 3 * head_dim)
    cos, sin = rope_rows(4, head_dim, generator)
    rope_and_write(qkv, cos, sin, cache, 0, torch.tensor([-1, 6, 5, 1 << 40]))
    assert room.isfinite().nonzero()[:, 0].tolist() == list(range(before + 5 * head_dim, before + 6 * head_dim))
    assert value.isfinite().sum() == head_dim


def test_rows_may_lie_apart(close: Close, generator: torch.Generator) -> None:
    wide = torch.full((3, 50), torch.nan)
    wide[:, 10:34] = torch.randn(3, 24, generator=generator)
    cos, sin = rope_rows(3, 8, generator)
    slots = torch.tensor([0, 5, 3])
    found = rope_and_write(wide[:, 10:34], cos, sin, poisoned_cache(2, 4, 1, 8, torch.float32), 0, slots)
    alone = wide[:, 10:34].contiguous()
    close(found, rope_and_write(alone, cos, sin, poisoned_cache(2, 4, 1, 8, torch.float32), 0, slots))
    assert found.isfinite().all()
