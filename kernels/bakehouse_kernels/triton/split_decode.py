"""Decode over long contexts: each row's keys in splits of a fixed number of tokens, reduced in their order.

A split i of a row yields its own attention o_i and the logarithm s_i of its softmax's denominator (base 2); then
    out = sum_i 2^(s_i - S) o_i,    S = log2 sum_i 2^(s_i)
Source: Flash-Decoding, Dao et al. 2023 (https://pytorch.org/blog/flash-decoding). Unlike there, a split is as long
as the launch table says, however many rows there are: so a row's result depends on no other row. Rows that see one
split only are done at once.

Programs are as many as run at a time, and each takes every PROGRAMS-th piece of work: a recorded launch would else
need one for each split of the widest table, and to start programs that find nothing to do takes time as well.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bakehouse_kernels.triton.attention_call import AttentionCall
from bakehouse_kernels.triton.attention_plan import (
    ITEM_FIELDS,
    ITEMS_AT,
    MEMBER_FIELDS,
    MEMBERS_AT,
    N_ITEMS,
    TritonPlan,
)
from bakehouse_kernels.triton.key_loop import LOWEST, fold_keys, mean_and_log_total
from bakehouse_kernels.triton.launch import start_kernel

_N_ITEMS: tl.constexpr = tl.constexpr(N_ITEMS)
_ITEMS_AT: tl.constexpr = tl.constexpr(ITEMS_AT)
_ITEM_FIELDS: tl.constexpr = tl.constexpr(ITEM_FIELDS)
_MEMBERS_AT: tl.constexpr = tl.constexpr(MEMBERS_AT)
_MEMBER_FIELDS: tl.constexpr = tl.constexpr(MEMBER_FIELDS)
_ROWS: tl.constexpr = tl.constexpr(16)  # the fewest that a product takes, and a whole group


@dataclass(frozen=True, slots=True)
class Partials:
    """Attention `[·, N, D]`, log-denominator `[·, N]` of members' splits, at `member * max_splits + split`."""

    mean: Tensor
    log_total: Tensor


def new_partials(call: AttentionCall, plan: TritonPlan) -> Partials:
    """Uninitialised ones; none where no row has two splits."""
    n_partials = plan.n_members * plan.max_splits if plan.max_splits > 1 else 0
    _, n_heads, head_dim = call.q_TND.shape
    return Partials(
        torch.empty((n_partials, n_heads, head_dim), dtype=torch.float32, device=call.key.device),
        torch.empty((n_partials, n_heads), dtype=torch.float32, device=call.key.device),
    )


def attend_splits(call: AttentionCall, plan: TritonPlan, partials: Partials) -> None:
    """The splits that a row has for itself; modifies the result of rows of one split, and the partials."""
    options = split_options(call, plan.split_tokens)
    n_units = plan.n_members * plan.max_splits * call.key.shape[1]
    start_kernel(
        _attend_splits,
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


def split_options(call: AttentionCall, split_tokens: int) -> dict[str, int]:
    """Constants, warps and stages of the kernel that attends splits."""
    return {**call.constants, **call.launch("split_decode").options, "SPLIT": split_tokens}


def combine_splits(call: AttentionCall, plan: TritonPlan, partials: Partials) -> None:
    """The rows of several splits, from their partials; modifies the result."""
    start_kernel(
        _combine_splits,
        (plan.n_members, call.q_TND.shape[1]),
        call.out_TND,
        partials.mean,
        partials.log_total,
        plan.array,
        plan.max_splits,
        call.numbers[2],
        **_combine_options(call, plan.split_tokens),
    )


def _combine_options(call: AttentionCall, split_tokens: int) -> dict[str, int]:
    return {
        "N_HEADS": call.q_TND.shape[1],
        "HEAD_DIM": call.key.shape[3],
        "HEAD_PAD": call.head_pad,
        "WINDOWED": call.window is not None,
        **call.launch("combine_splits").options,
        "SPLIT": split_tokens,
    }


@triton.jit(do_not_specialize=["max_splits"])
def _attend_splits(
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
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """The items of the plan, and nothing else."""
    attend_items(
        tl.program_id(0),
        q, out, mean, log_total, key, value, plan, max_splits, q_row_stride, q_head_stride, scale, softcap, window,
        N_KV_HEADS, GROUP, BLOCK_SIZE, HEAD_DIM, HEAD_PAD, WINDOWED, CAPPED, WIDEN, BLOCK_N, SPLIT, PROGRAMS,
    )  # fmt: skip


@triton.jit
def attend_items(
    program,
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
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Every PROGRAMS-th unit of work from `program` on: a row's split, which is an item, for a key head."""
    N_HEADS: tl.constexpr = N_KV_HEADS * GROUP
    n_units = tl.load(plan + _N_ITEMS) * N_KV_HEADS
    items = plan + tl.load(plan + _ITEMS_AT)
    head_M, dim_D = tl.arange(0, _ROWS), tl.arange(0, HEAD_PAD)
    is_used_M = head_M < GROUP
    is_used_MD = is_used_M[:, None] & (dim_D < HEAD_DIM)[None, :]
    for unit in range(program, n_units, PROGRAMS):
        # Key heads of a block lie side by side, and so do the programs that read them.
        item, head = items + unit // N_KV_HEADS * _ITEM_FIELDS, unit % N_KV_HEADS
        member, split = tl.load(item), tl.load(item + 1)
        row, position = tl.load(item + 2).to(tl.int64), tl.load(item + 3)
        blocks = plan + tl.load(item + 4)
        begin, end = split * SPLIT, tl.minimum(split * SPLIT + SPLIT, position + 1)
        first_split = 0
        if WINDOWED:
            seen_from = tl.maximum(position - window + 1, 0)
            first_split = seen_from // SPLIT
            begin = tl.maximum(begin, seen_from)
        if split >= first_split:
            query_head_M = head * GROUP + head_M
            q_at_MD = (row * q_row_stride + query_head_M * q_head_stride)[:, None] + dim_D[None, :]
            # One loop with all masks: here they cost nothing beside the memory, and a second loop, for the last
            # tile, would begin with nothing on its way.
            sums_MD, total_M, highest_M = fold_keys(
                tl.load(q + q_at_MD, mask=is_used_MD, other=0.0),
                tl.zeros([_ROWS, HEAD_PAD], tl.float32),
                tl.zeros([_ROWS], tl.float32),
                tl.full([_ROWS], LOWEST, tl.float32),
                tl.full([_ROWS], 0, tl.int32) + position,
                key + head * (BLOCK_SIZE * HEAD_DIM), value + head * (BLOCK_SIZE * HEAD_DIM), blocks,
                begin // BLOCK_N * BLOCK_N, end, begin, end, scale, softcap, window,
                N_KV_HEADS, BLOCK_SIZE, HEAD_DIM, HEAD_PAD, BLOCK_N, True, WINDOWED, CAPPED, WIDEN,
            )  # fmt: skip
            mean_MD, log_total_M = mean_and_log_total(sums_MD, total_M, highest_M)
            if first_split == position // SPLIT:
                at_M = (row * N_HEADS + query_head_M) * HEAD_DIM
                tl.store(out + at_M[:, None] + dim_D[None, :], mean_MD.to(out.dtype.element_ty), mask=is_used_MD)
            else:
                at_M = (member * max_splits + split).to(tl.int64) * N_HEADS + query_head_M
                tl.store(mean + (at_M * HEAD_DIM)[:, None] + dim_D[None, :], mean_MD, mask=is_used_MD)
                tl.store(log_total + at_M, log_total_M, mask=is_used_M)


@triton.jit(do_not_specialize=["max_splits"])
def _combine_splits(
    out,
    mean,
    log_total,
    plan,
    max_splits,
    window,
    N_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """A program for each member and query head; BLOCK_S splits are read at a time, from multiples of it on."""
    member, head = tl.program_id(0), tl.program_id(1)
    record = plan + tl.load(plan + _MEMBERS_AT) + member * _MEMBER_FIELDS
    row, position = tl.load(record).to(tl.int64), tl.load(record + 1)
    first, last = 0, position // SPLIT
    if WINDOWED:
        first = tl.maximum(position - window + 1, 0) // SPLIT
    if first == last:
        return
    split_S, dim_D = tl.arange(0, BLOCK_S), tl.arange(0, HEAD_PAD)
    is_dim_1D = (dim_D < HEAD_DIM)[None, :]
    base = (member * max_splits).to(tl.int64) * N_HEADS + head
    highest = LOWEST
    for start in range(first // BLOCK_S * BLOCK_S, last + 1, BLOCK_S):
        is_split_S = (start + split_S >= first) & (start + split_S <= last)
        at_S = base + (start + split_S) * N_HEADS
        highest = tl.maximum(highest, tl.max(tl.load(log_total + at_S, mask=is_split_S, other=float("-inf")), 0))
    sums_D, total = tl.zeros([HEAD_PAD], tl.float32), 0.0
    for start in range(first // BLOCK_S * BLOCK_S, last + 1, BLOCK_S):
        is_split_S = (start + split_S >= first) & (start + split_S <= last)
        at_S = base + (start + split_S) * N_HEADS
        weight_S = tl.exp2(tl.load(log_total + at_S, mask=is_split_S, other=float("-inf")) - highest)
        mean_SD = tl.load(
            mean + (at_S * HEAD_DIM)[:, None] + dim_D[None, :], mask=is_split_S[:, None] & is_dim_1D, other=0.0
        )
        sums_D += tl.sum(mean_SD * weight_S[:, None], 0)
        total += tl.sum(weight_S, 0)
    at_D = (row * N_HEADS + head) * HEAD_DIM + dim_D
    tl.store(out + at_D, (sums_D / total).to(out.dtype.element_ty), mask=dim_D < HEAD_DIM)
