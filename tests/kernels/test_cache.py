"""Rotated queries, and the cache: exactly the named slots and blocks change, to exactly the given values."""

import pytest
import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.cpu.ops import CpuOps
from bakehouse_kernels.layout import KVCache
from bakehouse_kernels.reference import rotated
from torch import Tensor

from tests.kernels.conftest import Compare

N_BLOCKS, BLOCK_SIZE, N_KV_HEADS, HEAD_DIM = 7, 5, 3, 8
N_SLOTS = N_BLOCKS * BLOCK_SIZE


@pytest.fixture(params=["cpu_ops", "half_ops", "reference_ops"])
def ops(request: pytest.FixtureRequest) -> Ops:
    ops: Ops = request.getfixturevalue(request.param)
    return ops


@pytest.fixture
def cache(ops: Ops, generator: torch.Generator) -> KVCache:
    cache = ops.new_cache(
        n_layers=2, n_blocks=N_BLOCKS, block_size=BLOCK_SIZE, n_kv_heads=N_KV_HEADS, head_dim=HEAD_DIM
    )
    for tensor in (*cache.key, *cache.value):
        tensor.normal_(generator=generator)
    return cache


def contents(ops: Ops, cache: KVCache) -> tuple[Tensor, ...]:
    """Keys of both layers, then values: `[slots, H, D]`, copied out of the layout of `ops`."""
    keys, values = list(cache.key), list(cache.value)
    if isinstance(ops, CpuOps):
        head_dim, block_size = keys[0].shape[3], cache.block_size
        keys = [key.permute(0, 2, 4, 1, 3).flatten(1, 2)[:, :block_size] for key in keys]
        values = [value.permute(0, 3, 1, 2, 4).flatten(3)[..., :head_dim] for value in values]
    return tuple(tensor.flatten(0, 1).clone() for tensor in (*keys, *values))


def test_a_cache_has_so_many_blocks_of_so_many_slots(ops: Ops, cache: KVCache) -> None:
    assert (cache.n_blocks, cache.block_size) == (N_BLOCKS, BLOCK_SIZE)
    assert {tensor.shape for tensor in contents(ops, cache)} == {(N_SLOTS, N_KV_HEADS, HEAD_DIM)}


@pytest.mark.parametrize("n_rows", [0, 1, 2, 11, N_SLOTS])
@pytest.mark.parametrize("is_view", [False, True])
def test_keys_and_values_go_to_the_named_slots_of_their_layer_only(
    ops: Ops, cache: KVCache, generator: torch.Generator, n_rows: int, is_view: bool
) -> None:
    fused = torch.randn(n_rows, 4 + 2 * N_KV_HEADS, HEAD_DIM, generator=generator)
    qkv = fused.flatten(1)
    if is_view:
        qkv = torch.cat((qkv, qkv), dim=1)[:, : qkv.shape[1]]
    q, k, v = fused[:, :4], fused[:, 4:-N_KV_HEADS], fused[:, -N_KV_HEADS:]
    slots = torch.randperm(N_SLOTS, generator=generator)[:n_rows]
    expected = contents(ops, cache)
    expected[1][slots], expected[3][slots] = k.to(expected[1].dtype), v.to(expected[3].dtype)
    before = qkv.clone()
    ones, zeros = torch.ones(n_rows, HEAD_DIM), torch.zeros(n_rows, HEAD_DIM)  # of position 0
    assert ops.rope_and_write(qkv, ones, zeros, cache, 1, slots).equal(q)
    assert qkv.equal(before)
    for actual, wanted in zip(contents(ops, cache), expected, strict=True):
        assert actual.equal(wanted)


@pytest.mark.parametrize("n_rows", [1, 2, 13, 64])
@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "head_dim"), [(1, 1, 2), (9, 3, 64), (4, 1, 80), (2, 2, 128), (0, 1, 6)]
)
def test_queries_and_keys_are_rotated_as_their_definition_says(
    cpu_ops: CpuOps,
    compare: Compare,
    generator: torch.Generator,
    n_rows: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
) -> None:
    cache = cpu_ops.new_cache(n_layers=1, n_blocks=4, block_size=33, n_kv_heads=n_kv_heads, head_dim=head_dim)
    fused = torch.randn(n_rows, n_heads + 2 * n_kv_heads, head_dim, generator=generator)
    angle = torch.randn(n_rows, head_dim // 2, generator=generator).repeat(1, 2) * 10
    q, k, v = fused[:, :n_heads], fused[:, n_heads:-n_kv_heads], fused[:, -n_kv_heads:]
    slots = torch.randperm(4 * 33, generator=generator)[:n_rows]
    actual = cpu_ops.rope_and_write(fused.flatten(1), angle.cos(), angle.sin(), cache, 0, slots)
    compare(actual, rotated(q, angle.cos(), angle.sin()))
    keys, values = contents(cpu_ops, cache)
    compare(keys[slots], rotated(k, angle.cos(), angle.sin()))
    assert values[slots].equal(v)


@pytest.mark.parametrize(("source", "target"), [([], []), ([2], [5]), ([0, 0, 6], [4, 1, 3])])
def test_copy_blocks_copies_whole_blocks_in_all_layers(
    ops: Ops, cache: KVCache, source: list[int], target: list[int]
) -> None:
    expected = contents(ops, cache)
    for tensor in expected:
        blocks = tensor.view(N_BLOCKS, BLOCK_SIZE, N_KV_HEADS, HEAD_DIM)
        for from_block, to_block in zip(source, target, strict=True):
            blocks[to_block] = blocks[from_block]
    ops.copy_blocks(cache, torch.tensor(source, dtype=torch.int64), torch.tensor(target, dtype=torch.int64))
    for actual, wanted in zip(contents(ops, cache), expected, strict=True):
        assert actual.equal(wanted)


@pytest.mark.parametrize("slot", [N_SLOTS, -1 - N_SLOTS, 2**40])
def test_a_slot_outside_the_pool_is_refused(ops: Ops, cache: KVCache, slot: int) -> None:
    qkv, angles = torch.zeros(2, 2 * N_KV_HEADS * HEAD_DIM), torch.ones(2, HEAD_DIM)
    before = contents(ops, cache)
    with pytest.raises(IndexError):
        ops.rope_and_write(qkv, angles, angles, cache, 0, torch.tensor([3, slot]))
    if isinstance(ops, CpuOps):  # torch, in the reference, has written slot 3 by then
        for actual, wanted in zip(contents(ops, cache), before, strict=True):
            assert actual.equal(wanted)


def test_float16_rounds_as_torch_does_and_holds_no_number_beyond_its_largest(
    half_ops: CpuOps, generator: torch.Generator
) -> None:
    cache = half_ops.new_cache(n_layers=1, n_blocks=2, block_size=32, n_kv_heads=1, head_dim=70)
    fused = torch.randn(50, 2, 70, generator=generator) * 2.0 ** torch.randint(-30, 16, (50, 2, 70))
    special = [65504.0, 65519.0, 65520.0, 1e30, -65520.0, -1e30, float("inf"), -float("inf"), float("nan"), -0.0]
    fused[7, 1, : len(special)] = torch.tensor(special)
    slots, ones, zeros = torch.arange(50), torch.ones(50, 70), torch.zeros(50, 70)
    half_ops.rope_and_write(fused.flatten(1), ones, zeros, cache, 0, slots)
    largest = torch.finfo(torch.float16).max
    expected = torch.where(fused.isinf(), fused, fused.clamp(-largest, largest)).half()
    for actual, wanted in zip(contents(half_ops, cache), expected.unbind(1), strict=True):
        torch.testing.assert_close(actual[slots, 0], wanted, rtol=0, atol=0, equal_nan=True)
