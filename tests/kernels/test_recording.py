"""Recorded operations do what the operations do, again and again, on the memory they were recorded with."""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.cpu.ops import CpuOps
from bakehouse_kernels.cpu.pool import n_cores
from bakehouse_kernels.cpu.recording import Memory
from bakehouse_kernels.layout import KVCache
from bakehouse_kernels.reference import ReferenceOps
from torch import Tensor

N_LAYERS = 3
HEADS, KV_HEADS, HEAD_DIM, WIDTH, FEATURES = 4, 2, 16, 40, 56
BLOCK_SIZE, N_BLOCKS = 4, 64


@dataclass(frozen=True, slots=True)
class Inputs:
    """Of a step in which each sequence has one token at the end of its context."""

    x_TE: Tensor
    cos_TD: Tensor
    sin_TD: Tensor
    slots_T: Tensor
    table_SB: Tensor
    start_S1: Tensor
    context_S: Tensor


def inputs(n_rows: int, seed: int, n_blocks: int = 3) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(N_BLOCKS, generator=generator)[: n_rows * n_blocks].view(n_rows, n_blocks)
    context_S = torch.randint(1, n_blocks * BLOCK_SIZE + 1, (n_rows,), generator=generator)
    last = context_S - 1
    return Inputs(
        x_TE=torch.randn(n_rows, WIDTH, generator=generator),
        cos_TD=torch.rand(n_rows, HEAD_DIM, generator=generator),
        sin_TD=torch.rand(n_rows, HEAD_DIM, generator=generator),
        slots_T=blocks.gather(1, last[:, None] // BLOCK_SIZE)[:, 0] * BLOCK_SIZE + last % BLOCK_SIZE,
        table_SB=blocks.int(),
        start_S1=torch.arange(n_rows + 1, dtype=torch.int32),
        context_S=context_S.int(),
    )


def work_on(
    step: Inputs, plan: object, cache: KVCache, packed: list[tuple[object, ...]]
) -> Callable[[Ops], Tensor]:
    def work(ops: Ops) -> Tensor:
        for layer, (qkv, output, gate_up, down) in enumerate(packed):
            qkv_TX = ops.linear(ops.rms_norm(step.x_TE, NORM_E, 1e-5), qkv, BIAS_X)
            q_TND = ops.rope_and_write(qkv_TX, step.cos_TD, step.sin_TD, cache, layer, step.slots_T)
            attended_TND = ops.paged_attention(q_TND, cache, layer, plan, scale=0.25, window=9, softcap=20.0)
            ops.add_linear(step.x_TE, attended_TND.flatten(1), output)
            gated_TF = ops.gated_linear(ops.rms_norm(step.x_TE, NORM_E, 1e-5), gate_up)
            ops.add_linear(step.x_TE, gated_TF, down)
        return step.x_TE

    return work


NORM_E = torch.linspace(0.5, 1.5, WIDTH)
BIAS_X = torch.linspace(-1, 1, (HEADS + 2 * KV_HEADS) * HEAD_DIM)


def packed_by(ops: Ops) -> list[tuple[object, ...]]:
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    return [
        (
            ops.pack(random(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM)),
            ops.pack(random(HEADS * HEAD_DIM, WIDTH)),
            ops.pack_gated(random(WIDTH, 2 * FEATURES)),
            ops.pack(random(FEATURES, WIDTH)),
        )
        for _ in range(N_LAYERS)
    ]


def cache_of(ops: Ops) -> KVCache:
    cache = ops.new_cache(
        n_layers=N_LAYERS, n_blocks=N_BLOCKS, block_size=BLOCK_SIZE, n_kv_heads=KV_HEADS, head_dim=HEAD_DIM
    )
    generator = torch.Generator().manual_seed(3)
    for part in (*cache.key, *cache.value):
        part.copy_(torch.randn(part.shape, generator=generator))
    return cache


def plan_of(ops: Ops, step: Inputs, into: object | None = None) -> object:
    return ops.plan_attention(step.table_SB, step.start_S1, step.context_S, into=into)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8", "reference"])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "reference":
        return ReferenceOps()
    return CpuOps(min(2, n_cores()), weight_format=request.param)


@pytest.mark.parametrize("n_rows", [1, 2, 7, 12])
def test_a_recording_gives_each_time_what_its_operations_give(ops: Ops, n_rows: int) -> None:
    packed, done, played = packed_by(ops), cache_of(ops), cache_of(ops)
    own = inputs(n_rows, seed=0)
    own_plan = plan_of(ops, own)
    recording = ops.record(work_on(own, own_plan, played, packed))
    for seed in (1, 2, 3):
        # Narrower tables than the recording's are followed by as wide ones.
        step = inputs(n_rows, seed, n_blocks=min(seed, 3))
        for name in ("x_TE", "cos_TD", "sin_TD", "slots_T"):
            getattr(own, name).copy_(getattr(step, name))
        plan_of(ops, step, into=own_plan)
        recording.play()
        expected = work_on(step, plan_of(ops, step), done, packed)(ops)
        assert torch.equal(recording.result, expected)
        for part, other in zip((*played.key, *played.value), (*done.key, *done.value), strict=True):
            assert torch.equal(part, other)


def test_recordings_of_several_sizes_played_in_turn_do_not_disturb_each_other(cpu_ops: CpuOps) -> None:
    packed, cache = packed_by(cpu_ops), cache_of(cpu_ops)
    steps = {n: inputs(n, seed=n) for n in (1, 5, 3)}
    begun = {n: step.x_TE.clone() for n, step in steps.items()}
    recordings = {
        n: cpu_ops.record(work_on(step, plan_of(cpu_ops, step), cache, packed)) for n, step in steps.items()
    }
    expected: dict[int, Tensor] = {}
    for n in (1, 5, 3, 5, 1, 1, 3):
        steps[n].x_TE.copy_(begun[n])
        recordings[n].play()
        first = expected.setdefault(n, recordings[n].result.clone())
        assert torch.equal(recordings[n].result, first)


def test_recording_does_none_of_the_operations(cpu_ops: CpuOps) -> None:
    step, cache = inputs(3, seed=0), cache_of(cpu_ops)
    x_TE, keys = step.x_TE.clone(), [key.clone() for key in cache.key]
    cpu_ops.record(work_on(step, plan_of(cpu_ops, step), cache, packed_by(cpu_ops)))
    assert torch.equal(step.x_TE, x_TE)
    assert all(torch.equal(key, before) for key, before in zip(cache.key, keys, strict=True))


def test_a_slot_outside_of_the_cache_ends_a_play_and_is_named_by_its_row(cpu_ops: CpuOps) -> None:
    step, cache, packed = inputs(3, seed=0), cache_of(cpu_ops), packed_by(cpu_ops)
    recording = cpu_ops.record(work_on(step, plan_of(cpu_ops, step), cache, packed))
    step.slots_T[1] = N_BLOCKS * BLOCK_SIZE
    keys = [key.clone() for key in cache.key]
    with pytest.raises(IndexError, match="row 1"):
        recording.play()
    assert all(torch.equal(key, before) for key, before in zip(cache.key, keys, strict=True))


def test_a_plan_is_not_replaced_by_one_of_another_size(cpu_ops: CpuOps) -> None:
    plan = plan_of(cpu_ops, inputs(3, seed=0))
    with pytest.raises(AssertionError, match="3 chunks"):
        plan_of(cpu_ops, inputs(2, seed=0), into=plan)


def test_memory_is_used_again_once_nothing_refers_to_it() -> None:
    memory = Memory()
    first = memory.empty(3, 5)
    view, address = first[1:], first.data_ptr()
    del first
    gc.collect()
    assert memory.empty(3, 5).data_ptr() != address, "a view still refers to it"
    del view
    gc.collect()
    again = memory.empty(2, 8)
    assert again.data_ptr() == address
    assert address % 64 == 0
    assert memory.empty(0, 5).shape == (0, 5)
