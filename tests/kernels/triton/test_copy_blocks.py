"""Copies of blocks in all layers."""

import pytest
import torch
from bakehouse_kernels.reference import ReferenceOps
from bakehouse_kernels.triton.cache import TritonCache, new_cache
from bakehouse_kernels.triton.copy_blocks import copy_blocks


def filled_cache(
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    *,
    n_layers: int = 3,
    n_blocks: int = 7,
    block_size: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 12,
) -> TritonCache:
    """A cache of random numbers."""
    cache = new_cache(
        n_layers=n_layers,
        n_blocks=n_blocks,
        block_size=block_size,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    for layer in (*cache.key, *cache.value):
        layer.copy_(torch.randn(layer.shape, generator=generator))
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("sources", "targets"), [([], []), ([3], [0]), ([1, 1, 6], [4, 2, 0])])
@pytest.mark.parametrize(("block_size", "head_dim"), [(1, 2), (4, 12), (16, 64)])
def test_targets_become_their_sources_in_every_layer_and_nothing_else_changes(
    generator: torch.Generator,
    sources: list[int],
    targets: list[int],
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    cache = filled_cache(generator, dtype, block_size=block_size, head_dim=head_dim)
    expected = TritonCache(
        key=tuple(layer.clone() for layer in cache.key),
        value=tuple(layer.clone() for layer in cache.value),
        block_size=block_size,
        addresses=cache.addresses,
    )
    source, target = torch.tensor(sources, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64)
    copy_blocks(cache, source, target)
    ReferenceOps().copy_blocks(expected, source, target)
    for actual, wanted in zip((*cache.key, *cache.value), (*expected.key, *expected.value), strict=True):
        assert actual.equal(wanted)


def test_a_block_that_is_no_number_of_words_is_refused(generator: torch.Generator) -> None:
    cache = filled_cache(generator, torch.bfloat16, block_size=1, n_kv_heads=1, head_dim=3)
    index = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(AssertionError, match="a block of 6 bytes is not made of words"):
        copy_blocks(cache, index, index + 1)
