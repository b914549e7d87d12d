"""Decode of sequences that share blocks: a split that several rows have in common is read once for all of them.

Its sums are made as in `split_decode`, with more rows to a tile, and its results are partials of the same kind,
which are merged with those of a row's other splits as there: so a row's bits do not tell whether it shares.
Sources: Hydragen, Juravsky et al. 2024 (arXiv 2402.05099); cascade inference, Ye et al. 2024
(https://flashinfer.ai/2024/02/02/cascade-inference.html).
"""

import triton
import triton.language as tl

from bakehouse_kernels.triton.attention_call import AttentionCall
from bakehouse_kernels.triton.attention_plan import (
    GROUP_FIELDS,
    GROUPS_AT,
    N_GROUPS,
    SHARER_FIELDS,
    SHARERS_AT,
    TritonPlan,
)
from bakehouse_kernels.triton.attention_work import MAX_SHARERS
from bakehouse_kernels.triton.key_loop import LOWEST, fold_keys, mean_and_log_total
from bakehouse_kernels.triton.launch import start_kernel
from bakehouse_kernels.triton.split_decode import Partials, split_options

_N_GROUPS: tl.constexpr = tl.constexpr(N_GROUPS)
_GROUPS_AT: tl.constexpr = tl.constexpr(GROUPS_AT)
_GROUP_FIELDS: tl.constexpr = tl.constexpr(GROUP_FIELDS)
_SHARERS_AT: tl.constexpr = tl.constexpr(SHARERS_AT)
_SHARER_FIELDS: tl.constexpr = tl.constexpr(SHARER_FIELDS)


def attend_shared(call: AttentionCall, plan: TritonPlan, partials: Partials) -> None:
    """The splits that rows have in common; modifies the result of rows of one split, and the partials."""
    options = _options(call, plan.split_tokens)
    n_units = plan.max_groups * options["N_PARTS"] * call.key.shape[1]
    start_kernel(
        _attend_shared,
        (min(n_units, options["PROGRAMS"]),),
        call.q_TND,
        call.out_TND,
        partials.mean,
        partials.log_total,
        call.key,
        call.value,
        plan.array,
        plan.max_splits,
        call.q_TND.stride(0),
        call.q_TND.stride(1),
        *call.numbers,
        **options,
    )


def _options(call: AttentionCall, split_tokens: int) -> dict[str, int]:
    alone, tiles = split_options(call, split_tokens), call.launch("shared_prefix")
    part = min(tiles.tiles["BLOCK_M"] // call.group, MAX_SHARERS)
    return {
        **alone,
        **tiles.options,
        # In which order a split is summed is said once, for a row alone.
        "BLOCK_N": alone["BLOCK_N"],
        "num_warps": alone["num_warps"],
        "PART": part,
        "N_PARTS": -(-MAX_SHARERS // part),
    }


@triton.jit(do_not_specialize=["max_splits"])
def _attend_shared(
    q,
    out,
    mean,
    log_total,
    key,
    value,
    plan,
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
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PART: tl.constexpr,
    N_PARTS: tl.constexpr,
):
    """A unit of work is a split, some of those who share it, as many as a tile holds, and a key head."""
    N_HEADS: tl.constexpr = N_KV_HEADS * GROUP
    n_units = tl.load(plan + _N_GROUPS) * (N_PARTS * N_KV_HEADS)
    groups, sharers = plan + tl.load(plan + _GROUPS_AT), plan + tl.load(plan + _SHARERS_AT)
    row_M, dim_D = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_PAD)
    for unit in range(tl.program_id(0), n_units, PROGRAMS):
        group = groups + unit // (N_PARTS * N_KV_HEADS) * _GROUP_FIELDS
        head, first_of_part = unit % N_KV_HEADS, unit // N_KV_HEADS % N_PARTS * PART
        split, first_sharer, n_sharers = tl.load(group), tl.load(group + 1), tl.load(group + 2)
        blocks = plan + tl.load(group + 3)
        n_sharers = tl.minimum(n_sharers - first_of_part, PART)
        if n_sharers > 0:
            is_used_M = row_M // GROUP < n_sharers
            is_used_MD = is_used_M[:, None] & (dim_D < HEAD_DIM)[None, :]
            # Rows that are not used repeat the first.
            sharer_M = (
                sharers + (first_sharer + first_of_part + tl.where(is_used_M, row_M // GROUP, 0)) * _SHARER_FIELDS
            )
            member_M, position_M = tl.load(sharer_M), tl.load(sharer_M + 2)
            token_M = tl.load(sharer_M + 1).to(tl.int64)
            query_head_M = head * GROUP + row_M % GROUP
            q_at_MD = (token_M * q_row_stride + query_head_M * q_head_stride)[:, None] + dim_D[None, :]
            begin, end = split * SPLIT, split * SPLIT + SPLIT
            first_split_M = tl.zeros([BLOCK_M], tl.int32)
            if WINDOWED:
                seen_from_M = tl.maximum(position_M - window + 1, 0)
                first_split_M = seen_from_M // SPLIT
                begin = tl.maximum(begin, tl.min(seen_from_M, 0))
            sums_MD, total_M, highest_M = fold_keys(
                tl.load(q + q_at_MD, mask=is_used_MD, other=0.0),
                tl.zeros([BLOCK_M, HEAD_PAD], tl.float32),
                tl.zeros([BLOCK_M], tl.float32),
                tl.full([BLOCK_M], LOWEST, tl.float32),
                position_M,
                key + head * (BLOCK_SIZE * HEAD_DIM), value + head * (BLOCK_SIZE * HEAD_DIM), blocks,
                begin // BLOCK_N * BLOCK_N, end, begin, end, scale, softcap, window,
                N_KV_HEADS, BLOCK_SIZE, HEAD_DIM, HEAD_PAD, BLOCK_N, WINDOWED, WINDOWED, CAPPED, WIDEN,
            )  # fmt: skip
            mean_MD, log_total_M = mean_and_log_total(sums_MD, total_M, highest_M)
            is_alone_M = first_split_M == position_M // SPLIT
            is_seen_M = is_used_M & (split >= first_split_M)
            at_M = (token_M * N_HEADS + query_head_M) * HEAD_DIM
            is_alone_MD = is_used_MD & (is_alone_M & is_seen_M)[:, None]
            tl.store(out + at_M[:, None] + dim_D[None, :], mean_MD.to(out.dtype.element_ty), mask=is_alone_MD)
            is_part_M = is_seen_M & ~is_alone_M
            at_M = (member_M * max_splits + split).to(tl.int64) * N_HEADS + query_head_M
            is_part_MD = is_used_MD & is_part_M[:, None]
            tl.store(mean + (at_M * HEAD_DIM)[:, None] + dim_D[None, :], mean_MD, mask=is_part_MD)
            tl.store(log_total + at_M, log_total_M, mask=is_part_M)
