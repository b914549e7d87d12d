"""Writes to the cache: exactly the named slots and blocks change, to exactly the given values."""

import pytest
import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.cpu.ops import CpuOps
from bakehouse_kernels.layout import KVCache
from bakehouse_kernels.reference import ReferenceOps
from torch import Tensor

N_BLOCKS, BLOCK_SIZE, N_KV_HEADS, HEAD_DIM = 7, 5, 3, 8


@pytest.fixture(params=["cpu", "reference"])
def ops(request: pytest.FixtureRequest, cpu_ops: CpuOps, reference_ops: ReferenceOps) -> Ops:
    return cpu_ops if request.param == "cpu" else reference_ops


@pytest.fixture
def cache(generator: torch.Generator) -> KVCache:
    cache = KVCache.allocate(
        n_layers=2,
        n_blocks=N_BLOCKS,
        block_size=BLOCK_SIZE,
        n_kv_heads=N_KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for tensor in (*cache.key, *cache.value):
        tensor.normal_(generator=generator)
    return cache


def copy_of(cache: KVCache) -> tuple[Tensor, ...]:
    return tuple(tensor.clone() for tensor in (*cache.key, *cache.value))


@pytest.mark.parametrize("n_rows", [0, 1, 2, 11, N_BLOCKS * BLOCK_SIZE])
def test_write_kv_fills_the_named_slots_of_its_layer_only(
    ops: Ops, cache: KVCache, generator: torch.Generator, n_rows: int
) -> None:
    fused = torch.randn(n_rows, 2, N_KV_HEADS, HEAD_DIM, generator=generator)
    k, v = fused[:, 0], fused[:, 1]  # views, as a fused projection gives them
    slots = torch.randperm(N_BLOCKS * BLOCK_SIZE, generator=generator)[:n_rows]
    key_0, key_1, value_0, value_1 = copy_of(cache)
    ops.write_kv(k, v, cache, 1, slots)
    for t, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, BLOCK_SIZE)
        key_1[block, offset], value_1[block, offset] = k[t], v[t]
    for actual, expected in zip(copy_of(cache), (key_0, key_1, value_0, value_1), strict=True):
        assert actual.equal(expected)


@pytest.mark.parametrize(("source", "target"), [([], []), ([2], [5]), ([0, 0, 6], [4, 1, 3])])
def test_copy_blocks_copies_whole_blocks_in_all_layers(
    ops: Ops, cache: KVCache, source: list[int], target: list[int]
) -> None:
    expected = copy_of(cache)
    for tensor in expected:
        for from_block, to_block in zip(source, target, strict=True):
            tensor[to_block] = tensor[from_block]
    ops.copy_blocks(cache, torch.tensor(source, dtype=torch.int64), torch.tensor(target, dtype=torch.int64))
    for actual, wanted in zip(copy_of(cache), expected, strict=True):
        assert actual.equal(wanted)


def test_a_slot_outside_the_pool_is_refused(ops: Ops, cache: KVCache) -> None:
    row = torch.zeros(1, N_KV_HEADS, HEAD_DIM)
    with pytest.raises(IndexError):
        ops.write_kv(row, row, cache, 0, torch.tensor([N_BLOCKS * BLOCK_SIZE]))


def test_a_slot_stands_where_the_layout_says(ops: Ops, cache: KVCache) -> None:
    row = torch.full((1, N_KV_HEADS, HEAD_DIM), 9.0)
    ops.write_kv(row, row, cache, 0, torch.tensor([13]))
    assert cache.key[0].view(N_BLOCKS * BLOCK_SIZE, N_KV_HEADS, HEAD_DIM)[13].equal(row[0])
    assert cache.value[0][13 // cache.block_size, 13 % cache.block_size].equal(row[0])
    assert cache.n_blocks == N_BLOCKS
