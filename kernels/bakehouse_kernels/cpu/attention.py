"""Paged attention over the block table, for decode rows and prefill chunks alike, without gathering blocks.

A work item is (sequence, up to 16 query rows, one key head with its group of query heads). Items are dealt to
the threads by their number of scores, so that one long context does not leave the other threads idle.

A row's sums run over the blocks of its own context in order, from its first visible position, whatever tile,
chunk or thread it falls into: its result does not depend, in any bit, on its neighbours or on chunking.
"""

import math
from typing import NamedTuple

import numba
import numpy as np
import torch
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from bakehouse_kernels.cpu.compile import compiled
from bakehouse_kernels.cpu.exponential import exp_of_negative
from bakehouse_kernels.cpu.pool import pool_lock
from bakehouse_kernels.layout import KVCache

Floats = NDArray[np.float32]
Indices = NDArray[np.int32]

# Rows that share one pass over a block while it lies in the first-level cache: with 3 query heads of 64 their
# accumulators take 12 KB.
TILE_ROWS = 16

# Below this many scores (rows by context by key heads) one thread is as fast: it does some 20 a microsecond, and
# waking a second one takes 35 to 70 µs (2-core AVX-512 machine, 3 query heads of 64 a key head).
MIN_PARALLEL_SCORES = 2000

_LOWEST = np.float32(np.finfo(np.float32).min)


class _Call(NamedTuple):
    """The arguments of one call, as the compiled functions take them. `softcap` counts only where `capped`."""

    q_TND: Floats
    key_PKHD: Floats
    value_PKHD: Floats
    block_table_SB: Indices
    query_start_S1: Indices
    context_len_S: Indices
    out_TND: Floats
    scale: np.float32
    window: int
    capped: bool
    softcap: np.float32


class _State(NamedTuple):
    """Per row and query head: the highest score so far, and sums relative to it; `scores` is one block's."""

    highest: Floats
    total: Floats
    sums: Floats
    scores: Floats


def paged_attention(
    q_TND: Tensor,
    cache: KVCache,
    layer: int,
    block_table_SB: Tensor,
    query_start_S1: Tensor,
    context_len_S: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    n_threads: int,
) -> Tensor:
    """`softmax(cap(q · k * scale)) · v` over the visible positions; `[T, N, D]`. See `api.Ops.paged_attention`."""
    key_PKHD, value_PKHD = cache.key[layer], cache.value[layer]
    n_heads, n_kv_heads = q_TND.shape[1], key_PKHD.shape[2]
    assert n_heads % n_kv_heads == 0, f"{n_heads} query heads do not divide into {n_kv_heads} key heads"
    assert q_TND.shape[2] == key_PKHD.shape[3], f"head dimension {q_TND.shape[2]} against {key_PKHD.shape[3]}"
    for index in (block_table_SB, query_start_S1, context_len_S):
        assert index.dtype == torch.int32, f"index tensors are int32, not {index.dtype}"
    n_sequences = context_len_S.shape[0]
    assert block_table_SB.shape[0] == n_sequences == query_start_S1.shape[0] - 1, "one table row a chunk"
    q_TND = q_TND.contiguous()
    out_TND = q_TND.new_empty(q_TND.shape)
    call = _Call(
        q_TND=q_TND.numpy(),
        key_PKHD=key_PKHD.numpy(),
        value_PKHD=value_PKHD.numpy(),
        block_table_SB=block_table_SB.contiguous().numpy(),
        query_start_S1=query_start_S1.numpy(),
        context_len_S=context_len_S.numpy(),
        out_TND=out_TND.numpy(),
        scale=np.float32(scale),
        window=context_limit(cache) if window is None else window,
        capped=softcap is not None,
        softcap=np.float32(1.0 if softcap is None else softcap),
    )
    if n_threads == 1 or _count_scores(call) < MIN_PARALLEL_SCORES:
        _attend_here(call)
    else:
        numba.set_num_threads(n_threads)  # here, because Numba keeps it per calling thread
        with pool_lock:
            _attend_in_pool(call, n_threads)
    return out_TND


def context_limit(cache: KVCache) -> int:
    """Positions in the whole pool: a window of this length hides nothing."""
    return cache.n_blocks * cache.block_size


@compiled()
def _count_scores(call: _Call) -> int:
    """Scores per key head times key heads, counting every row as if it saw its chunk's whole context."""
    n_scores: int = 0
    for s in range(len(call.context_len_S)):
        n_scores += (call.query_start_S1[s + 1] - call.query_start_S1[s]) * call.context_len_S[s]
    return int(n_scores * call.key_PKHD.shape[2])


@compiled()
def _deal_items(call: _Call, n_threads: int) -> tuple[Indices, Indices]:
    """Items `[n, 4]` of (sequence, first row, row after the last, key head) and the thread each one goes to."""
    starts, n_kv_heads = call.query_start_S1, call.key_PKHD.shape[2]
    n_items = 0
    for s in range(len(call.context_len_S)):
        n_items += (starts[s + 1] - starts[s] + TILE_ROWS - 1) // TILE_ROWS * n_kv_heads
    items = np.empty((n_items, 4), np.int32)
    thread = np.empty(n_items, np.int32)
    n_scores = np.zeros(n_threads, np.int64)
    i = 0
    for s in range(len(call.context_len_S)):
        for first in range(starts[s], starts[s + 1], TILE_ROWS):
            after = min(first + TILE_ROWS, starts[s + 1])
            longest = call.context_len_S[s] - (starts[s + 1] - after)
            for kv_head in range(n_kv_heads):
                items[i, 0], items[i, 1], items[i, 2], items[i, 3] = s, first, after, kv_head
                thread[i] = np.argmin(n_scores)
                n_scores[thread[i]] += (after - first) * longest
                i += 1
    return items, thread


@compiled()
def _score(
    q_TND: Floats,
    row: int,
    head: int,
    key_PKHD: Floats,
    block: int,
    slot: np.uint64,
    kv_head: int,
    n: int,
    scale: np.float32,
    capped: bool,
    softcap: np.float32,
    scores: Floats,
) -> np.float32:
    """Fill `scores[:n]` with those of `n` slots of a block, from `slot` on, and return the highest."""
    highest = _LOWEST
    for j in range(n):
        score = np.float32(0)
        for d in range(q_TND.shape[2]):
            score += q_TND[row, head, d] * key_PKHD[block, slot + np.uint64(j), kv_head, d]
        score *= scale
        if capped:
            score = softcap * np.float32(math.tanh(score / softcap))
        scores[j] = score
        if score > highest:
            highest = score
    return highest


@compiled()
def _weigh(scores: Floats, n: int, peak: np.float32) -> np.float32:
    """Turn `scores[:n]` into weights relative to `peak`, in place, and return their sum."""
    total = np.float32(0)
    for j in range(n):
        weight = exp_of_negative(scores[j] - peak)
        scores[j] = weight
        total += weight
    return total


@compiled()
def _accumulate(
    sums: Floats,
    i: int,
    shrink: np.float32,
    weights: Floats,
    value_PKHD: Floats,
    block: int,
    slot: np.uint64,
    kv_head: int,
    n: int,
) -> None:
    """`sums[i] = sums[i] * shrink + weights[:n] · values`, four slots a pass to load and store the sums less."""
    if shrink != np.float32(1):
        for d in range(value_PKHD.shape[3]):
            sums[i, d] *= shrink
    n_by_four = n - n % 4
    for j in range(0, n_by_four, 4):
        w0, w1, w2, w3 = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        s0 = slot + np.uint64(j)
        s1, s2, s3 = s0 + np.uint64(1), s0 + np.uint64(2), s0 + np.uint64(3)
        for d in range(value_PKHD.shape[3]):
            sums[i, d] += (
                w0 * value_PKHD[block, s0, kv_head, d]
                + w1 * value_PKHD[block, s1, kv_head, d]
                + w2 * value_PKHD[block, s2, kv_head, d]
                + w3 * value_PKHD[block, s3, kv_head, d]
            )
    for j in range(n_by_four, n):
        weight = weights[j]
        for d in range(value_PKHD.shape[3]):
            sums[i, d] += weight * value_PKHD[block, slot + np.uint64(j), kv_head, d]


@compiled()
def _attend_item(call: _Call, s: int, first: int, after: int, kv_head: int, state: _State) -> None:
    """Online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867) over the blocks, rows inside."""
    # Unpacked once, and no slices below: each costs an atomic reference count, which halved the speed in a loop.
    q, key, value, table, starts, lengths, out, scale, window, capped, softcap = call
    highest, total, sums, scores = state
    block_size, group = key.shape[1], q.shape[1] // key.shape[2]
    n_rows = after - first
    first_position = lengths[s] - (starts[s + 1] - first)
    highest[:] = _LOWEST
    total[:] = np.float32(0)
    sums[:] = np.float32(0)
    first_block = max(0, first_position - window + 1) // block_size
    for b in range(first_block, (first_position + n_rows - 1) // block_size + 1):
        block = table[s, b]
        for r in range(n_rows):
            position = first_position + r
            first_slot = max(0, position - window + 1 - b * block_size)
            n = min(block_size, position + 1 - b * block_size) - first_slot
            if n <= 0:
                continue
            slot = np.uint64(first_slot)
            for g in range(group):
                i, head = r * group + g, kv_head * group + g
                peak = _score(q, first + r, head, key, block, slot, kv_head, n, scale, capped, softcap, scores)
                peak = max(peak, highest[i])
                shrink = exp_of_negative(highest[i] - peak)
                highest[i] = peak
                total[i] = total[i] * shrink + _weigh(scores, n, peak)
                _accumulate(sums, i, shrink, scores, value, block, slot, kv_head, n)
    for r in range(n_rows):
        for g in range(group):
            for d in range(out.shape[2]):
                out[first + r, kv_head * group + g, d] = sums[r * group + g, d] / total[r * group + g]


@compiled()
def _attend_share(call: _Call, items: Indices, thread: Indices, t: int) -> None:
    """Do the items of thread `t`."""
    n_states = TILE_ROWS * (call.q_TND.shape[1] // call.key_PKHD.shape[2])
    state = _State(
        np.empty(n_states, np.float32),
        np.empty(n_states, np.float32),
        np.empty((n_states, call.q_TND.shape[2]), np.float32),
        np.empty(call.key_PKHD.shape[1], np.float32),
    )
    for i in range(len(items)):
        if thread[i] == t:
            _attend_item(call, items[i, 0], items[i, 1], items[i, 2], items[i, 3], state)


@compiled()
def _attend_here(call: _Call) -> None:
    """All items in the calling thread."""
    items, thread = _deal_items(call, 1)
    _attend_share(call, items, thread, 0)


@compiled(parallel=True)
def _attend_in_pool(call: _Call, n_threads: int) -> None:
    """Every thread of Numba's pool does its share."""
    items, thread = _deal_items(call, n_threads)
    for t in prange(n_threads):
        _attend_share(call, items, thread, t)
