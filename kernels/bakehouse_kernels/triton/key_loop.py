"""The loop over keys that all attention kernels share: online softmax over tiles of keys found by the block table.

For a tile of rows (queries times the query heads that share a key head), with s = q · kᵀ * scale, perhaps capped
to `softcap * tanh(s / softcap)`, a tile of keys folds into the state (highest m, total l, sums o) as
    m' = max(m, max s)      p = 2^(s - m')      l' = l * 2^(m - m') + sum p      o' = o * 2^(m - m') + p · v
where s counts in units of log 2, so that the exponential is one instruction.

Sources: online softmax, Milakov and Gimelshein 2018 (arXiv 1805.02867); its tiles, FlashAttention-2, Dao 2023
(arXiv 2307.08691); keys and values in blocks, PagedAttention, Kwon et al. 2023 (arXiv 2309.06180).

Tiles of keys begin at multiples of BLOCK_N of the context, whatever tile of rows looks at them, and one of which
a row sees nothing leaves its state as it was, to the bit: so a row's result does not depend on its neighbours.
But an infinite or undefined *value* of its own sequence may reach a row that does not see it, where a row of the
same tile does: nothing times a NaN is one.

Shape legend in `bakehouse_kernels.layout`; M rows of a tile, L keys of a tile.
"""

import triton
import triton.language as tl

# Below every score, yet finite: `score - LOWEST` and `LOWEST - LOWEST` are no NaN.
LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def fold_keys(
    q_MD,
    sums_MD,
    total_M,
    highest_M,
    position_M,  # of the row's query in its context
    key,  # of this key head in block 0
    value,
    blocks,  # the sequence's row of the block table
    low,  # the tiles begin at `low`, a multiple of BLOCK_N, and before `high`
    high,
    begin,  # with MASKED, no key outside `begin` to `end` is read
    end,
    scale,
    softcap,
    window,
    N_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """The state after the keys; without MASKED all rows see all of them."""
    dim_D = tl.arange(0, HEAD_PAD)
    is_dim_1D = (dim_D < HEAD_DIM)[None, :]
    for start in tl.range(low, high, BLOCK_N):
        key_L = start + tl.arange(0, BLOCK_N)
        if MASKED:
            is_read_L = (key_L >= begin) & (key_L < end)
            block_L = tl.load(blocks + key_L // BLOCK_SIZE, mask=is_read_L, other=0)
        else:
            block_L = tl.load(blocks + key_L // BLOCK_SIZE)
        # A cache may hold more numbers than 32 bits count.
        slot_L = block_L.to(tl.int64) * (N_KV_HEADS * BLOCK_SIZE) + key_L % BLOCK_SIZE
        at_LD = slot_L[:, None] * HEAD_DIM + dim_D[None, :]
        if MASKED:
            k_LD = tl.load(key + at_LD, mask=is_read_L[:, None] & is_dim_1D, other=0.0)
            v_LD = tl.load(value + at_LD, mask=is_read_L[:, None] & is_dim_1D, other=0.0)
        elif HEAD_DIM == HEAD_PAD:
            k_LD = tl.load(key + at_LD)
            v_LD = tl.load(value + at_LD)
        else:
            k_LD = tl.load(key + at_LD, mask=is_dim_1D, other=0.0)
            v_LD = tl.load(value + at_LD, mask=is_dim_1D, other=0.0)
        score_ML = product(q_MD, tl.trans(k_LD), None, WIDEN)
        if CAPPED:
            # tanh(x) = 1 - 2 / (1 + e^2x): right at both ends, where e^2x is 0 or infinite.
            power_ML = tl.exp2(score_ML * (scale / softcap * 2.0 * LOG2_E))
            score_ML = softcap * LOG2_E * (1.0 - 2.0 / (1.0 + power_ML))
        else:
            score_ML = score_ML * (scale * LOG2_E)
        if MASKED:
            sees_ML = is_read_L[None, :] & (key_L[None, :] <= position_M[:, None])
            if WINDOWED:
                sees_ML = sees_ML & (key_L[None, :] > position_M[:, None] - window)
            score_ML = tl.where(sees_ML, score_ML, float("-inf"))
        new_highest_M = tl.maximum(highest_M, tl.max(score_ML, 1))
        weight_ML = tl.exp2(score_ML - new_highest_M[:, None])
        shrink_M = tl.exp2(highest_M - new_highest_M)
        total_M = total_M * shrink_M + tl.sum(weight_ML, 1)
        sums_MD = product(weight_ML.to(v_LD.dtype), v_LD, sums_MD * shrink_M[:, None], WIDEN)
        highest_M = new_highest_M
    return sums_MD, total_M, highest_M


@triton.jit
def product(a, b, sums, WIDEN: tl.constexpr):
    """`a · b`, added to `sums` where there are any, in float32.

    With WIDEN, factors of 16 bits are widened first: Triton's interpreter keeps a bfloat16 as an integer and would
    multiply those. The result is the same, as the products of 16-bit numbers are exact in float32.
    """
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def mean_and_log_total(sums_MD, total_M, highest_M):
    """The weighted mean, and the logarithm of the weights' sum to base 2; 0 and LOWEST where nothing was seen."""
    total_M = tl.where(total_M == 0.0, 1.0, total_M)
    return sums_MD / total_M[:, None], highest_M + tl.log2(total_M)
