"""Paged attention of ragged queries: the tiles of prefill chunks and the splits of decode rows in one launch.

    out[t, n] = sum over visible j of softmax_j(cap(q[t, n] · k[j, h] * scale)) v[j, h],   h = n // (N / H)

A query at position p of its context sees the keys j <= p and, with a window w, j > p - w only. `key_loop` has the
equation of a tile and the sources. The query heads of a group are rows of one tile, so keys and values are read
once for all of them (grouped-query attention: Ainslie et al. 2023, arXiv 2305.13245). A decode row is attended as
in a step of its own kind (`split_decode`), with the same warps and layouts: so its bits do not tell what else the
step does. What tiles leave of the memory's bandwidth is theirs (POD-Attention,
Kamath et al. 2024, arXiv 2410.18038).
"""

import triton
import triton.language as tl
from torch import Tensor

from bakehouse_kernels.api import AttentionPlan
from bakehouse_kernels.layout import KVCache
from bakehouse_kernels.triton.attention_call import AttentionCall, attention_call
from bakehouse_kernels.triton.attention_plan import HEADER, TILE_FIELDS, TritonPlan
from bakehouse_kernels.triton.attention_work import STRIP
from bakehouse_kernels.triton.key_loop import LOWEST, fold_keys, mean_and_log_total
from bakehouse_kernels.triton.launch import start_kernel
from bakehouse_kernels.triton.shared_prefix import attend_shared
from bakehouse_kernels.triton.split_decode import (
    Partials,
    attend_items,
    attend_splits,
    combine_splits,
    new_partials,
    split_options,
)

_HEADER: tl.constexpr = tl.constexpr(HEADER)
_STRIP: tl.constexpr = tl.constexpr(STRIP)
_TILE_FIELDS: tl.constexpr = tl.constexpr(TILE_FIELDS)


def paged_attention(
    q_TND: Tensor,
    cache: KVCache,
    layer: int,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of ragged queries over the cache; `[T, N, D]`. See `api.Ops.paged_attention`."""
    assert isinstance(plan, TritonPlan), "a plan from `plan_attention`"
    assert plan.n_rows == q_TND.shape[0], f"a plan for {plan.n_rows} rows, not {q_TND.shape[0]}"
    assert plan.block_size == cache.block_size, f"a plan for blocks of {plan.block_size}"
    call = attention_call(q_TND, cache, layer, scale=scale, window=window, softcap=softcap)
    partials = new_partials(call, plan)
    if plan.n_tiles:
        attend_ragged(call, plan, partials)
    elif plan.n_members:
        attend_splits(call, plan, partials)
    if plan.max_groups:
        attend_shared(call, plan, partials)
    if plan.n_members and plan.max_splits > 1:
        combine_splits(call, plan, partials)
    return call.out_TND


def attend_ragged(call: AttentionCall, plan: TritonPlan, partials: Partials) -> None:
    """Tiles, and splits that a row has for itself; modifies the result, and the partials."""
    options = _options(call, plan.split_tokens)
    n_tile_programs = plan.n_tiles * call.key.shape[1]
    n_units = plan.n_members * plan.max_splits * call.key.shape[1]
    start_kernel(
        _attend_ragged,
        (n_tile_programs + min(n_units, options["PROGRAMS"]),),
        call.q_TND,
        call.out_TND,
        partials.mean,
        partials.log_total,
        call.key,
        call.value,
        plan.array,
        n_tile_programs,
        plan.max_splits,
        call.q_TND.stride(0),
        call.q_TND.stride(1),
        *call.numbers,
        **options,
    )


def _options(call: AttentionCall, split_tokens: int) -> dict[str, int]:
    alone, tiles = split_options(call, split_tokens), call.launch("paged_attention")
    one_strip: int = triton.next_power_of_2(STRIP * call.group)
    return {
        **alone,
        **tiles.options,
        "BLOCK_M": max(tiles.tiles["BLOCK_M"], one_strip),
        # In which order a split is summed is said once, for steps without tiles.
        "num_warps": alone["num_warps"],
    }


@triton.jit(do_not_specialize=["n_tile_programs", "max_splits"])
def _attend_ragged(
    q,
    out,
    mean,
    log_total,
    key,
    value,
    plan,
    n_tile_programs,
    max_splits,
    q_row_stride,
    q_head_stride,
    scale,
    softcap,
    window,
    N_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """A program for each strip and key head, the longest first; those for the items fill what is left."""
    program = tl.program_id(0)
    if program < n_tile_programs:
        record = plan + _HEADER + program // N_KV_HEADS * _TILE_FIELDS
        # One strip in QUERIES / STRIP begins a tile.
        if tl.load(record) % (BLOCK_M // GROUP // _STRIP * _STRIP) == 0:
            _attend_tile(
                record, program % N_KV_HEADS,
                q, out, key, value, plan, q_row_stride, q_head_stride, scale, softcap, window,
                N_KV_HEADS, GROUP, BLOCK_SIZE, HEAD_DIM, HEAD_PAD, WINDOWED, CAPPED, WIDEN, BLOCK_M, TILE_N,
            )  # fmt: skip
    else:
        attend_items(
            program - n_tile_programs,
            q, out, mean, log_total, key, value, plan, max_splits,
            q_row_stride, q_head_stride, scale, softcap, window,
            N_KV_HEADS, GROUP, BLOCK_SIZE, HEAD_DIM, HEAD_PAD, WINDOWED, CAPPED, WIDEN, BLOCK_N, SPLIT, PROGRAMS,
        )  # fmt: skip


@triton.jit
def _attend_tile(
    record,
    head,
    q,
    out,
    key,
    value,
    plan,
    q_row_stride,
    q_head_stride,
    scale,
    softcap,
    window,
    N_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """The rows of the tile that begins with this strip, for one key head."""
    QUERIES: tl.constexpr = BLOCK_M // GROUP // _STRIP * _STRIP
    first_row = tl.load(record + 1).to(tl.int64)
    n_queries = tl.minimum(tl.load(record + 2), QUERIES)
    first_position = tl.load(record + 3)
    blocks = plan + tl.load(record + 4)

    row_M, dim_D = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_PAD)
    query_M, query_head_M = row_M // GROUP, head * GROUP + row_M % GROUP
    is_used_MD = (query_M < n_queries)[:, None] & (dim_D < HEAD_DIM)[None, :]
    q_at_M = (first_row + query_M) * q_row_stride + query_head_M * q_head_stride
    q_MD = tl.load(q + q_at_M[:, None] + dim_D[None, :], mask=is_used_MD, other=0.0)
    position_M = first_position + query_M

    last_position = first_position + n_queries - 1
    begin, all_see_from = 0, 0
    if WINDOWED:
        begin = tl.maximum(first_position - window + 1, 0)
        all_see_from = tl.cdiv(tl.maximum(last_position - window + 1, 0), TILE_N) * TILE_N
    end = last_position + 1
    all_see_to = (first_position + 1) // TILE_N * TILE_N
    all_see_from = tl.minimum(all_see_from, all_see_to)

    sums_MD = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    highest_M = tl.full([BLOCK_M], LOWEST, tl.float32)
    key += head * (BLOCK_SIZE * HEAD_DIM)
    value += head * (BLOCK_SIZE * HEAD_DIM)
    # Three loops, so that the longest one asks of no key whether a row sees it: that costs a prefill more than the
    # copies of the loop.
    if WINDOWED:
        sums_MD, total_M, highest_M = fold_keys(
            q_MD, sums_MD, total_M, highest_M, position_M, key, value, blocks,
            begin // TILE_N * TILE_N, all_see_from, begin, end, scale, softcap, window,
            N_KV_HEADS, BLOCK_SIZE, HEAD_DIM, HEAD_PAD, TILE_N, True, WINDOWED, CAPPED, WIDEN,
        )  # fmt: skip
    sums_MD, total_M, highest_M = fold_keys(
        q_MD, sums_MD, total_M, highest_M, position_M, key, value, blocks,
        all_see_from, all_see_to, begin, end, scale, softcap, window,
        N_KV_HEADS, BLOCK_SIZE, HEAD_DIM, HEAD_PAD, TILE_N, False, WINDOWED, CAPPED, WIDEN,
    )  # fmt: skip
    sums_MD, total_M, highest_M = fold_keys(
        q_MD, sums_MD, total_M, highest_M, position_M, key, value, blocks,
        all_see_to, end, begin, end, scale, softcap, window,
        N_KV_HEADS, BLOCK_SIZE, HEAD_DIM, HEAD_PAD, TILE_N, True, WINDOWED, CAPPED, WIDEN,
    )  # fmt: skip
    at_M = ((first_row + query_M) * (N_KV_HEADS * GROUP) + query_head_M) * HEAD_DIM
    mean_MD, _ = mean_and_log_total(sums_MD, total_M, highest_M)
    tl.store(out + at_M[:, None] + dim_D[None, :], mean_MD.to(out.dtype.element_ty), mask=is_used_MD)
