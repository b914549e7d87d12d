"""Paged attention against its definition, and the independence of every row from what runs beside it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest
import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.cpu.attention import MAX_TILE_ROWS
from bakehouse_kernels.cpu.attention_plan import plan_attention
from bakehouse_kernels.cpu.ops import CpuOps
from bakehouse_kernels.layout import KVCache
from bakehouse_kernels.reference import ReferenceOps
from numba.core import event
from torch import Tensor

from tests.kernels.conftest import Compare

NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Chunks over a cache whose slots beyond every context are NaN and whose tables end in garbage.

    Layer 1 holds keys and values, layer 0 nothing but NaN.
    """

    q_TND: Tensor
    k_LHD: Tensor
    v_LHD: Tensor
    slots_L: Tensor
    n_blocks: int
    block_size: int
    block_table_SB: Tensor
    query_start_S1: Tensor
    context_len_S: Tensor
    window: int | None = None
    softcap: float | None = None
    caches: dict[Ops, KVCache] = field(default_factory=dict)

    def attend(self, ops: Ops) -> Tensor:
        return ops.paged_attention(
            self.q_TND,
            self.cache(ops),
            1,
            ops.plan_attention(self.block_table_SB, self.query_start_S1, self.context_len_S),
            scale=self.q_TND.shape[2] ** -0.5,
            window=self.window,
            softcap=self.softcap,
        )

    def cache(self, ops: Ops) -> KVCache:
        """In the layout of `ops`, made once."""
        if ops not in self.caches:
            n_tokens, n_kv_heads, head_dim = self.k_LHD.shape
            cache = ops.new_cache(
                n_layers=2,
                n_blocks=self.n_blocks,
                block_size=self.block_size,
                n_kv_heads=n_kv_heads,
                head_dim=head_dim,
            )
            for tensor in (*cache.key, *cache.value):
                tensor.fill_(NAN)
            no_queries = torch.cat((self.k_LHD, self.v_LHD), dim=1).flatten(1)
            ones, zeros = torch.ones(n_tokens, head_dim), torch.zeros(n_tokens, head_dim)
            ops.rope_and_write(no_queries, ones, zeros, cache, 1, self.slots_L)
            self.caches[ops] = cache
        return self.caches[ops]


def make_batch(
    generator: torch.Generator,
    chunks: tuple[tuple[int, int], ...],
    *,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 64,
    block_size: int = 16,
    n_shared_blocks: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    of_halves: bool = False,
) -> Batch:
    """`chunks` are (query rows, context length); their blocks lie scattered, the first few common to all.

    `of_halves`: keys and values are numbers that float16 holds.
    """
    n_heads, n_kv_heads = heads
    n_needed = [-(-context_len // block_size) for _, context_len in chunks]
    n_blocks = n_shared_blocks + sum(n_needed) + 3
    table = torch.full((len(chunks), max(n_needed, default=0) + 2), 2**31 - 1, dtype=torch.int32)
    free = torch.randperm(n_blocks, generator=generator).int()
    shared, free = free[:n_shared_blocks], free[n_shared_blocks:]
    slots: dict[int, None] = {}
    for s, (_, context_len) in enumerate(chunks):
        table[s, : n_needed[s]] = torch.cat((shared, free))[: n_needed[s]]
        free = free[max(0, n_needed[s] - n_shared_blocks) :]
        positions = torch.arange(context_len)
        blocks = table[s, positions // block_size].long()
        slots |= dict.fromkeys((blocks * block_size + positions % block_size).tolist())
    starts = torch.tensor([0, *(rows for rows, _ in chunks)]).cumsum(0).int()
    q_TND = torch.randn(int(starts[-1]), n_heads, head_dim, generator=generator)
    k_LHD = torch.randn(len(slots), n_kv_heads, head_dim, generator=generator)
    v_LHD = torch.randn(len(slots), n_kv_heads, head_dim, generator=generator)
    if of_halves:
        k_LHD, v_LHD = k_LHD.half().float(), v_LHD.half().float()
    return Batch(
        q_TND=q_TND,
        k_LHD=k_LHD,
        v_LHD=v_LHD,
        slots_L=torch.tensor(list(slots), dtype=torch.int64),
        n_blocks=n_blocks,
        block_size=block_size,
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
PREFILL = ((MAX_TILE_ROWS + 1, MAX_TILE_ROWS + 1), (150, 181))
MIXED = ((1, 33), (5, 5), (0, 20), (MAX_TILE_ROWS, 40), (1, 7))
SHARING = ((1, 200), (1, 97), (30, 130), (1, 70), (1, 200), (1, 20), (3, 96), (45, 45), *(((1, 101),) * 9))


@pytest.mark.parametrize("chunks", [ONE_TOKEN, DECODE, PREFILL, MIXED], ids=["one", "decode", "prefill", "mixed"])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((2, 2), 64), ((9, 3), 64), ((8, 2), 80), ((14, 1), 128), ((1, 1), 6)]
)
@pytest.mark.parametrize("block_size", [1, 7, 16, 32, 64])
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


@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((8, 2), 80), ((14, 1), 128), ((1, 1), 6)])
@pytest.mark.parametrize("block_size", [1, 7, 32, 64])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (31, 0.5)])
def test_attention_over_float16_equals_the_definition_over_what_it_holds(
    half_ops: CpuOps,
    reference_ops: ReferenceOps,
    compare: Compare,
    generator: torch.Generator,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
) -> None:
    batch = make_batch(
        generator,
        (*MIXED, *PREFILL, *DECODE),
        heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        window=window,
        softcap=softcap,
        of_halves=True,
    )
    compare(batch.attend(half_ops), batch.attend(reference_ops))


@pytest.mark.parametrize("window", [1, 2, 16, 31, 1000])
@pytest.mark.parametrize("softcap", [None, 0.5, 50.0])
@pytest.mark.parametrize("block_size", [16, 64])
def test_windows_and_soft_caps_equal_their_definition(
    cpu_ops: CpuOps,
    reference_ops: ReferenceOps,
    compare: Compare,
    generator: torch.Generator,
    window: int,
    softcap: float | None,
    block_size: int,
) -> None:
    chunks = (*PREFILL, *MIXED)
    batch = make_batch(generator, chunks, block_size=block_size, window=window, softcap=softcap)
    compare(batch.attend(cpu_ops), batch.attend(reference_ops))


@pytest.mark.parametrize("n_shared_blocks", [1, 3, 20])
@pytest.mark.parametrize("window", [None, 40])
def test_sequences_that_share_blocks_get_what_their_definition_says_and_what_they_get_alone(
    either_ops: CpuOps,
    reference_ops: ReferenceOps,
    compare: Compare,
    generator: torch.Generator,
    n_shared_blocks: int,
    window: int | None,
) -> None:
    batch = make_batch(
        generator,
        SHARING,
        heads=(9, 3),
        block_size=32,
        n_shared_blocks=n_shared_blocks,
        window=window,
        of_halves=True,
    )
    result = batch.attend(either_ops)
    compare(result, batch.attend(reference_ops))
    assert_same_bits_alone(batch, result, either_ops)


def test_large_scores_neither_overflow_nor_lose_the_winner(
    cpu_ops: CpuOps, reference_ops: ReferenceOps, compare: Compare, generator: torch.Generator
) -> None:
    batch = make_batch(generator, MIXED)
    batch.q_TND.mul_(300.0)
    # Scores near 1000 are known to 2^-24 of themselves, and weights to no better.
    compare(batch.attend(cpu_ops), batch.attend(reference_ops), absolute=1e-3)


def test_views_serve_as_queries_and_as_indices(
    cpu_ops: CpuOps, reference_ops: ReferenceOps, compare: Compare, generator: torch.Generator
) -> None:
    batch = make_batch(generator, MIXED)
    n_rows = batch.q_TND.shape[0]
    fused = torch.randn(n_rows, 10 * 64, generator=generator)
    view = replace(
        batch,
        q_TND=fused[:, : 6 * 64].view(n_rows, 6, 64),
        block_table_SB=batch.block_table_SB.t().contiguous().t(),
        query_start_S1=batch.query_start_S1.repeat_interleave(2)[::2],
        context_len_S=batch.context_len_S.repeat_interleave(2)[::2],
    )
    assert not view.q_TND.is_contiguous()
    compare(view.attend(cpu_ops), view.attend(reference_ops))


def test_no_rows_give_no_rows(cpu_ops: CpuOps, reference_ops: ReferenceOps, generator: torch.Generator) -> None:
    for ops in (cpu_ops, reference_ops):
        for chunks in ((), ((0, 0),), ((0, 20), (0, 3))):
            assert make_batch(generator, chunks).attend(ops).shape == (0, 6, 64)


def test_inputs_are_left_as_they_were(either_ops: CpuOps, generator: torch.Generator) -> None:
    batch = make_batch(generator, MIXED)
    cache = batch.cache(either_ops)
    indices = (batch.block_table_SB, batch.query_start_S1, batch.context_len_S)
    inputs = (batch.q_TND, cache.key[1], cache.value[1], *indices)
    before = [tensor.clone() for tensor in inputs]
    batch.attend(either_ops)
    for tensor, copy in zip(inputs, before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("of_value", [False, True], ids=["key", "value"])
@pytest.mark.parametrize("number", [NAN, float("inf")])
def test_a_nan_or_an_infinity_reaches_exactly_the_rows_that_see_it(
    either_ops: CpuOps, generator: torch.Generator, of_value: bool, number: float
) -> None:
    batch = make_batch(generator, ((60, 60), (1, 60)), window=8)
    (batch.v_LHD if of_value else batch.k_LHD)[10, 0] = number
    is_wrong_TN = ~batch.attend(either_ops).isfinite().all(dim=2)
    expected_TN = torch.zeros(61, 6, dtype=torch.bool)
    expected_TN[10:18, :3] = True  # key head 0 serves query heads 0 to 2
    assert is_wrong_TN.equal(expected_TN)


def assert_same_bits_alone(together: Batch, result: Tensor, ops: Ops) -> None:
    for s in range(len(together.context_len_S)):
        start, end = together.query_start_S1[s : s + 2].tolist()
        assert only(together, s, slice(None)).attend(ops).equal(result[start:end]), f"chunk {s}"


@pytest.mark.parametrize("window", [None, 19])
@pytest.mark.parametrize("block_size", [16, 64])
def test_a_row_has_the_same_bits_in_any_chunk(
    either_ops: CpuOps, generator: torch.Generator, window: int | None, block_size: int
) -> None:
    whole = make_batch(generator, ((150, 161),), block_size=block_size, window=window)
    result = whole.attend(either_ops)
    for n_rows in (1, 7, 16, 50, 149):
        for first in range(0, 150, n_rows):
            rows = slice(first, min(first + n_rows, 150))
            assert only(whole, 0, rows).attend(either_ops).equal(result[rows]), (
                f"rows {first} on, {n_rows} a chunk"
            )


def test_a_row_has_the_same_bits_with_any_neighbours(either_ops: CpuOps, generator: torch.Generator) -> None:
    together = make_batch(generator, (*MIXED, *PREFILL, *DECODE))
    assert_same_bits_alone(together, together.attend(either_ops), either_ops)


def test_a_row_has_the_same_bits_with_any_number_of_threads(cpu_ops: CpuOps, generator: torch.Generator) -> None:
    batch = make_batch(generator, (*PREFILL, *SHARING))
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


def test_the_plan_puts_rows_that_share_blocks_side_by_side() -> None:
    # Two groups of sequences, in turns; ids whose bytes in memory order differently than the numbers.
    table = torch.tensor([[300, 1], [7, 2], [300, 3], [7, 0]], dtype=torch.int32)
    starts, lengths = torch.tensor([0, 1, 3, 4, 5]).int(), torch.tensor([40, 50, 60, 35]).int()
    plan = plan_attention(table, starts, lengths)
    rows, positions, sequences = plan.ordered.tolist()
    assert sequences == [3, 1, 1, 0, 2]
    assert rows == [4, 1, 2, 0, 3]
    assert positions == [34, 48, 49, 39, 59]


def test_nothing_is_compiled_once_the_ops_are_built(either_ops: CpuOps, generator: torch.Generator) -> None:
    batches = [
        make_batch(generator, ONE_TOKEN, head_dim=80, block_size=32),
        make_batch(generator, SHARING, n_shared_blocks=3, window=3, softcap=2.0),
        make_batch(generator, ()),
    ]
    fused = torch.randn(5, 10 * 64, generator=generator)
    angles = torch.randn(5, 64, generator=generator)
    cache = batches[1].cache(either_ops)
    with event.install_recorder("numba:compile") as recorder:
        for batch in batches:
            batch.attend(either_ops)
        for n_rows in (0, 1, 5):
            either_ops.rms_norm(fused[:n_rows], fused[0], 1e-5)
            for qkv in (fused[:n_rows], fused[:n_rows, : 8 * 64]):
                either_ops.rope_and_write(qkv, angles[:n_rows], angles[:n_rows], cache, 0, torch.arange(n_rows))
    assert not recorder.buffer, [str(entry) for entry in recorder.buffer]
