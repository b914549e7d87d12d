"""Batches for the attention kernels: what no row sees is NaN, and what no row's table holds is out of range."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from bakehouse_kernels.layout import KVCache
from bakehouse_kernels.reference import ReferenceOps
from bakehouse_kernels.triton.attention_plan import TritonPlan, plan_attention
from bakehouse_kernels.triton.paged_attention import paged_attention
from torch import Tensor

CPU = torch.device("cpu")
NAN = float("nan")


@contextmanager
def uninitialised_is_nan() -> Iterator[None]:
    """Fills what `torch.empty` gives: floats with NaN, integers with their largest."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Chunks over a cache of two layers, of which layer 0 holds nothing but NaN."""

    q_TND: Tensor
    cache: KVCache
    block_table_SB: Tensor
    query_start_S1: Tensor
    context_len_S: Tensor
    window: int | None = None
    softcap: float | None = None
    split_tokens: int | None = None

    def plan(self, into: TritonPlan | None = None) -> TritonPlan:
        with uninitialised_is_nan():
            return plan_attention(
                self.block_table_SB,
                self.query_start_S1,
                self.context_len_S,
                block_size=self.cache.block_size,
                device=CPU,
                into=into,
                split_tokens=self.split_tokens,
            )

    def attend(self, plan: TritonPlan | None = None) -> Tensor:
        """By the kernels."""
        with uninitialised_is_nan():
            return paged_attention(
                self.q_TND,
                self.cache,
                1,
                plan or self.plan(),
                scale=self.q_TND.shape[2] ** -0.5,
                window=self.window,
                softcap=self.softcap,
            )

    def expected(self) -> Tensor:
        """By the definition."""
        ops = ReferenceOps()
        cache = KVCache(
            key=tuple(key.transpose(1, 2) for key in self.cache.key),
            value=tuple(value.transpose(1, 2) for value in self.cache.value),
            block_size=self.cache.block_size,
        )
        plan = ops.plan_attention(self.block_table_SB, self.query_start_S1, self.context_len_S)
        return ops.paged_attention(
            self.q_TND,
            cache,
            1,
            plan,
            scale=self.q_TND.shape[2] ** -0.5,
            window=self.window,
            softcap=self.softcap,
        )

    def only(self, s: int, rows: slice = slice(None)) -> "Batch":
        """Some query rows of chunk `s` as the last rows of a batch of their own."""
        start, end = self.query_start_S1[s : s + 2].tolist()
        first, after = rows.indices(end - start)[:2]
        return replace(
            self,
            q_TND=self.q_TND[start + first : start + after],
            block_table_SB=self.block_table_SB[s : s + 1],
            query_start_S1=torch.tensor([0, after - first], dtype=torch.int32),
            context_len_S=self.context_len_S[s : s + 1] - (end - start - after),
        )


def make_batch(
    generator: torch.Generator,
    chunks: tuple[tuple[int, int], ...],
    *,
    heads: tuple[int, int] = (3, 1),
    head_dim: int = 16,
    block_size: int = 16,
    n_shared_blocks: int = 0,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    softcap: float | None = None,
    split_tokens: int | None = None,
) -> Batch:
    """`chunks` are (query rows, context length); their blocks lie scattered, the first few common to all.

    Queries are a view of fused queries, keys and values.
    """
    n_heads, n_kv_heads = heads
    n_needed = [-(-context_len // block_size) for _, context_len in chunks]
    n_blocks = n_shared_blocks + sum(n_needed) + 3
    table = torch.full((len(chunks), max(n_needed, default=0) + 2), 2**31 - 1, dtype=torch.int32)
    free = torch.randperm(n_blocks, generator=generator).int()
    shared, free = free[:n_shared_blocks], free[n_shared_blocks:]
    key, value = (torch.full((2, n_blocks, n_kv_heads, block_size, head_dim), NAN, dtype=dtype) for _ in range(2))
    for s, (_, context_len) in enumerate(chunks):
        table[s, : n_needed[s]] = torch.cat((shared, free))[: n_needed[s]]
        free = free[max(0, n_needed[s] - n_shared_blocks) :]
        for b, block in enumerate(table[s, : n_needed[s]].tolist()):
            n_slots = min(block_size, context_len - b * block_size)
            for tensor in (key, value):
                written = torch.randn(n_kv_heads, n_slots, head_dim, generator=generator)
                slots = tensor[1, block, :, :n_slots]
                slots.copy_(torch.where(slots.isnan(), written.to(dtype), slots))
    starts = torch.tensor([0, *(rows for rows, _ in chunks)]).cumsum(0).int()
    fused_TX = torch.randn(int(starts[-1]), (n_heads + 2 * n_kv_heads) * head_dim, generator=generator).to(dtype)
    return Batch(
        q_TND=fused_TX[:, : n_heads * head_dim].view(len(fused_TX), n_heads, head_dim),
        cache=KVCache(key=tuple(key), value=tuple(value), block_size=block_size),
        block_table_SB=table,
        query_start_S1=starts,
        context_len_S=torch.tensor([context_len for _, context_len in chunks], dtype=torch.int32),
        window=window,
        softcap=softcap,
        split_tokens=split_tokens,
    )
