"""Paged attention against its definition, and the independence of every row from what runs beside it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.cpu.attention import MIN_PARALLEL_SCORES, TILE_ROWS
from bakehouse_kernels.cpu.ops import CpuOps
from bakehouse_kernels.layout import KVCache
from bakehouse_kernels.reference import ReferenceOps
from numba.core import event
from torch import Tensor

from tests.kernels.conftest import Compare

NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Chunks over a cache whose slots beyond every context are NaN and whose tables end in garbage."""

    q_TND: Tensor
    cache: KVCache
    block_table_SB: Tensor
    query_start_S1: Tensor
    context_len_S: Tensor
    window: int | None = None
    softcap: float | None = None

    def attend(self, ops: Ops, layer: int = 1) -> Tensor:
        return ops.paged_attention(
            self.q_TND,
            self.cache,
            layer,
            self.block_table_SB,
            self.query_start_S1,
            self.context_len_S,
            scale=self.q_TND.shape[2] ** -0.5,
            window=self.window,
            softcap=self.softcap,
        )


def make_batch(
    generator: torch.Generator,
    chunks: tuple[tuple[int, int], ...],
    *,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 64,
    block_size: int = 16,
    window: int | None = None,
    softcap: float | None = None,
) -> Batch:
    """`chunks` are (query rows, context length); blocks lie scattered over the pool. Layer 0 is all NaN."""
    n_heads, n_kv_heads = heads
    n_needed = [-(-context_len // block_size) for _, context_len in chunks]
    n_blocks = sum(n_needed) + 3
    cache = KVCache.allocate(
        n_layers=2,
        n_blocks=n_blocks,
        block_size=block_size,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for tensor in (*cache.key, *cache.value):
        tensor.fill_(NAN)
    table = torch.full((len(chunks), max(n_needed, default=0) + 2), 2**31 - 1, dtype=torch.int32)
    free = torch.randperm(n_blocks, generator=generator).int()
    for s, (_, context_len) in enumerate(chunks):
        table[s, : n_needed[s]], free = free[: n_needed[s]], free[n_needed[s] :]
        for position in range(context_len):
            block, slot = int(table[s, position // block_size]), position % block_size
            cache.key[1][block, slot] = torch.randn(n_kv_heads, head_dim, generator=generator)
            cache.value[1][block, slot] = torch.randn(n_kv_heads, head_dim, generator=generator)
    starts = torch.tensor([0, *(rows for rows, _ in chunks)]).cumsum(0).int()
    return Batch(
        q_TND=torch.randn(int(starts[-1]), n_heads, head_dim, generator=generator),
        cache=cache,
        block_table_SB=table,
        query_start_S1=starts,
        context_len_S=torch.tensor([context_len for _, context_len in chunks], dtype=torch.int32),
        window=window,
        softcap=softcap,
    )


def only(batch: Batch, s: int, rows: slice) -> Batch:
    """Some query rows of chunk `s` as the last rows of a batch of their own."""
    start, end = batch.query_start_S1[s : s + 2].tolist()
    first, after = rows.indices(end - start)[:2]
    return replace(
        batch,
        q_TND=batch.q_TND[start + first : start + after],
        block_table_SB=batch.block_table_SB[s : s + 1],
        query_start_S1=torch.tensor([0, after - first], dtype=torch.int32),
        context_len_S=batch.context_len_S[s : s + 1] - (end - start - after),
    )


ONE_TOKEN = ((1, 1),)
DECODE = ((1, 1), (1, 15), (1, 16), (1, 17), (1, 97))
PREFILL = ((TILE_ROWS + 1, TILE_ROWS + 1), (70, 101))
MIXED = ((1, 33), (5, 5), (0, 20), (TILE_ROWS, 40), (1, 7))


@pytest.mark.parametrize("chunks", [ONE_TOKEN, DECODE, PREFILL, MIXED], ids=["one", "decode", "prefill", "mixed"])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((2, 2), 64), ((9, 3), 64), ((8, 2), 80), ((4, 1), 128), ((1, 1), 7)]
)
@pytest.mark.parametrize("block_size", [1, 7, 16, 32])
def test_attention_equals_its_definition(
    cpu_ops: CpuOps,
    reference_ops: ReferenceOps,
    compare: Compare,
    generator: torch.Generator,
    chunks: tuple[tuple[int, int], ...],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
) -> None:
    batch = make_batch(generator, chunks, heads=heads, head_dim=head_dim, block_size=block_size)
    compare(batch.attend(cpu_ops), batch.attend(reference_ops))


@pytest.mark.parametrize("window", [1, 2, 16, 31, 1000])
@pytest.mark.parametrize("softcap", [None, 0.5, 50.0])
def test_windows_and_soft_caps_equal_their_definition(
    cpu_ops: CpuOps,
    reference_ops: ReferenceOps,
    compare: Compare,
    generator: torch.Generator,
    window: int,
    softcap: float | None,
) -> None:
    batch = make_batch(generator, (*PREFILL, *MIXED), window=window, softcap=softcap)
    compare(batch.attend(cpu_ops), batch.attend(reference_ops))


def test_large_scores_neither_overflow_nor_lose_the_winner(
    cpu_ops: CpuOps, reference_ops: ReferenceOps, compare: Compare, generator: torch.Generator
) -> None:
    batch = make_batch(generator, MIXED)
    batch.q_TND.mul_(300.0)
    # Scores near 1000 are known to 2^-24 of themselves, and weights to no better.
    compare(batch.attend(cpu_ops), batch.attend(reference_ops), absolute=1e-3)


def test_a_view_of_a_fused_projection_serves_as_queries(
    cpu_ops: CpuOps, reference_ops: ReferenceOps, compare: Compare, generator: torch.Generator
) -> None:
    batch = make_batch(generator, MIXED)
    n_rows = batch.q_TND.shape[0]
    fused = torch.randn(n_rows, 10 * 64, generator=generator)
    view = replace(batch, q_TND=fused[:, : 6 * 64].view(n_rows, 6, 64))
    assert not view.q_TND.is_contiguous()
    compare(view.attend(cpu_ops), view.attend(reference_ops))


def test_no_rows_give_no_rows(cpu_ops: CpuOps, reference_ops: ReferenceOps, generator: torch.Generator) -> None:
    for ops in (cpu_ops, reference_ops):
        for chunks in ((), ((0, 0),), ((0, 20), (0, 3))):
            assert make_batch(generator, chunks).attend(ops).shape == (0, 6, 64)


def test_inputs_are_left_as_they_were(cpu_ops: CpuOps, generator: torch.Generator) -> None:
    batch = make_batch(generator, MIXED)
    inputs = (batch.q_TND, batch.cache.key[1], batch.cache.value[1], batch.block_table_SB, batch.context_len_S)
    before = [tensor.clone() for tensor in inputs]
    batch.attend(cpu_ops)
    for tensor, copy in zip(inputs, before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


def test_a_nan_in_a_key_reaches_exactly_the_rows_that_see_it(cpu_ops: CpuOps, generator: torch.Generator) -> None:
    batch = make_batch(generator, ((30, 30), (1, 30)), window=8)
    batch.cache.key[1][int(batch.block_table_SB[0, 0]), 10, 0] = NAN
    is_nan_TN = batch.attend(cpu_ops).isnan().any(dim=2)
    expected_TN = torch.zeros(31, 6, dtype=torch.bool)
    expected_TN[10:18, :3] = True  # key head 0 serves query heads 0 to 2
    assert is_nan_TN.equal(expected_TN)


@pytest.mark.parametrize("window", [None, 19])
def test_a_row_has_the_same_bits_in_any_chunk(
    cpu_ops: CpuOps, generator: torch.Generator, window: int | None
) -> None:
    whole = make_batch(generator, ((90, 101),), window=window)
    result = whole.attend(cpu_ops)
    for n_rows in (1, 7, 16, 50):
        for first in range(0, 90, n_rows):
            rows = slice(first, min(first + n_rows, 90))
            assert only(whole, 0, rows).attend(cpu_ops).equal(result[rows]), f"rows {first} on, {n_rows} a chunk"


def test_a_row_has_the_same_bits_with_any_neighbours(cpu_ops: CpuOps, generator: torch.Generator) -> None:
    together = make_batch(generator, (*MIXED, *PREFILL, *DECODE))
    result = together.attend(cpu_ops)
    for s in range(len(together.context_len_S)):
        start, end = together.query_start_S1[s : s + 2].tolist()
        assert only(together, s, slice(None)).attend(cpu_ops).equal(result[start:end]), f"chunk {s}"


def test_a_row_has_the_same_bits_with_any_number_of_threads(cpu_ops: CpuOps, generator: torch.Generator) -> None:
    batch = make_batch(generator, PREFILL)
    assert MIN_PARALLEL_SCORES < 70 * 101 * 2, "too little work to reach the pool"
    n_torch_threads = torch.get_num_threads()
    single = CpuOps(n_threads=1)
    torch.set_num_threads(n_torch_threads)
    assert batch.attend(single).equal(batch.attend(cpu_ops))


def test_threads_may_call_at_once(cpu_ops: CpuOps, generator: torch.Generator) -> None:
    batches = [make_batch(generator, PREFILL) for _ in range(4)]
    alone = [batch.attend(cpu_ops) for batch in batches]
    with ThreadPoolExecutor(max_workers=4) as executor:
        together = list(executor.map(lambda i: batches[i % 4].attend(cpu_ops), range(200)))
    for i, result in enumerate(together):
        assert result.equal(alone[i % 4]), f"call {i}"


def test_nothing_is_compiled_once_the_ops_are_built(cpu_ops: CpuOps, generator: torch.Generator) -> None:
    batches = [
        make_batch(generator, ONE_TOKEN, head_dim=80, block_size=32),
        make_batch(generator, PREFILL, window=3, softcap=2.0),
        make_batch(generator, ()),
    ]
    rows = torch.randn(5, 6 * 64, generator=generator)
    angles = torch.randn(5, 64, generator=generator)
    with event.install_recorder("numba:compile") as recorder:
        for batch in batches:
            batch.attend(cpu_ops)
        for n_rows in (1, 5):
            cpu_ops.rms_norm(rows[:n_rows], rows[0], 1e-5)
            cpu_ops.silu_mul(rows[:n_rows])
            for x_THD in (rows[:n_rows].view(-1, 6, 64), rows[:n_rows, :128].view(-1, 2, 64)):
                cpu_ops.rope(x_THD, angles[:n_rows], angles[:n_rows])
    assert not recorder.buffer, [str(entry) for entry in recorder.buffer]
