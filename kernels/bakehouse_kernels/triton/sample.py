"""Draws of one token from each row of logits: filters as cuts, found without a sort, then a race.

    w[t] = exp((x[t] - max x) / temperature)      winner = argmin over kept t of E(key, t) / w[t]

top_k, top_p and min_p each keep the tokens whose distance d = (max x - x) / temperature is at most some bound. For
top_k that is the least d within which k tokens lie; for top_p the least within which the tokens weigh `top_p` of
what top_k leaves; for min_p -log(min_p). `nearest` finds the bounds without a sort (as Ye et al. 2025, FlashInfer,
arXiv 2501.01005, sample without one), `race` has the race.

Three launches: maxima of chunks of the rows, weights of blocks, and the draw, a program a row.
Shape legend: R rows, V vocabulary, C chunks of a row, B blocks of SURVEY_BLOCK ids.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bakehouse_kernels.layout import SURVEY_BLOCK, DrawTensors
from bakehouse_kernels.triton.launch import device_class_of, launch_of, start_kernel
from bakehouse_kernels.triton.nearest import FURTHEST, amount_within, distances, least_bound, raced
from bakehouse_kernels.triton.race import times, winner

_BLOCK: tl.constexpr = tl.constexpr(SURVEY_BLOCK)


def draw(logits_RV: Tensor, asks: DrawTensors) -> Tensor:
    """One token id for each row, int64 `[R]`. See `api.Ops.draw`."""
    n_rows, n_vocabulary = logits_RV.shape
    assert logits_RV.stride(1) == 1, "rows that lie together"
    assert asks.temperature_R.shape == (n_rows,), f"{tuple(asks.temperature_R.shape)} asks for {n_rows} rows"
    device = logits_RV.device
    drawn_R = torch.empty(n_rows, dtype=torch.int64, device=device)
    if n_rows == 0:
        return drawn_R
    launch = launch_of("sample", device_class_of(device))
    chunk = launch.tiles["BLOCK"]
    assert chunk % SURVEY_BLOCK == 0, f"chunks of {chunk} are not made of blocks of {SURVEY_BLOCK}"
    n_chunks = triton.cdiv(n_vocabulary, chunk)
    highest_RC = torch.empty((n_rows, n_chunks), dtype=torch.float32, device=device)
    id_RC = torch.empty((n_rows, n_chunks), dtype=torch.int32, device=device)
    weight_RB = torch.empty((n_rows, n_chunks * (chunk // SURVEY_BLOCK)), dtype=torch.float64, device=device)
    near_RG = torch.empty((n_rows, chunk), dtype=torch.int32, device=device)
    sizes = (logits_RV.stride(0), n_vocabulary, n_chunks)
    pads = {"CHUNKS_PAD": triton.next_power_of_2(n_chunks), **launch.options}
    start_kernel(_maxima, highest_RC.shape, logits_RV, highest_RC, id_RC, *sizes, **launch.options)
    start_kernel(_weights, highest_RC.shape, logits_RV, highest_RC, asks.temperature_R, weight_RB, *sizes, **pads)
    start_kernel(
        _draw,
        (n_rows,),
        logits_RV,
        highest_RC,
        id_RC,
        weight_RB,
        near_RG,
        asks.temperature_R,
        asks.top_k_R,
        asks.top_p_R,
        asks.min_p_R,
        asks.key_R,
        drawn_R,
        *sizes,
        BLOCKS_PAD=triton.next_power_of_2(weight_RB.shape[1]),
        **pads,
    )
    return drawn_R


@triton.jit
def _maxima(logits, highest, best_id, stride, n_vocabulary, n_chunks, BLOCK: tl.constexpr):
    """The highest logit of a chunk (NaN where there is one) and the smallest id that has it."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    id = chunk * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + id, mask=id < n_vocabulary, other=float("-inf")).to(tl.float32)
    is_number = value == value
    top = tl.max(tl.where(is_number, value, float("-inf")))
    first = tl.min(tl.where(value == top, id, n_vocabulary))
    is_broken = tl.min(is_number.to(tl.int32)) == 0
    tl.store(highest + row * n_chunks + chunk, tl.where(is_broken, float("nan"), top))
    tl.store(best_id + row * n_chunks + chunk, first)


@triton.jit
def _highest_of(highest, row, n_chunks, CHUNKS_PAD: tl.constexpr):
    """The highest logit of a row, NaN or infinite where it has no token."""
    chunk = tl.arange(0, CHUNKS_PAD)
    top = tl.load(highest + row * n_chunks + chunk, mask=chunk < n_chunks, other=float("-inf"))
    is_number = top == top
    best = tl.max(tl.where(is_number, top, float("-inf")))
    return tl.where(tl.min(is_number.to(tl.int32)) == 0, float("nan"), best)


@triton.jit(do_not_specialize=["temperatures"])
def _weights(
    logits,
    highest,
    temperatures,
    weights,
    stride,
    n_vocabulary,
    n_chunks,
    CHUNKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The weights of the blocks of a chunk, where a row's are drawn from."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    best = _highest_of(highest, row, n_chunks, CHUNKS_PAD)
    if temperature > 0.0 and tl.abs(best) < float("inf"):
        id = chunk * BLOCK + tl.arange(0, BLOCK)
        distance = distances(logits + row * stride, n_vocabulary, id, best, temperature)
        weight = tl.exp(-distance).to(tl.float64)
        sums = tl.sum(tl.reshape(weight, (BLOCK // _BLOCK, _BLOCK)), axis=1)
        block = chunk * (BLOCK // _BLOCK) + tl.arange(0, BLOCK // _BLOCK)
        tl.store(weights + row * n_chunks * (BLOCK // _BLOCK) + block, sums)


@triton.jit(do_not_specialize=["temperatures", "top_ks", "top_ps", "min_ps", "keys"])
def _draw(
    logits,
    highest,
    best_id,
    weights,
    near,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    keys,
    drawn,
    stride,
    n_vocabulary,
    n_chunks,
    CHUNKS_PAD: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for each row."""
    row = tl.program_id(0).to(tl.int64)
    temperature, key = tl.load(temperatures + row), tl.load(keys + row)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    best = _highest_of(highest, row, n_chunks, CHUNKS_PAD)
    n_blocks = n_chunks * (BLOCK // _BLOCK)
    if not (tl.abs(best) < float("inf")):
        tl.store(drawn + row, tl.full([], -1, tl.int64))
    elif temperature == 0.0:
        chunk = tl.arange(0, CHUNKS_PAD)
        inside = chunk < n_chunks
        top = tl.load(highest + row * n_chunks + chunk, mask=inside, other=float("-inf"))
        id = tl.load(best_id + row * n_chunks + chunk, mask=inside, other=n_vocabulary)
        tl.store(drawn + row, tl.min(tl.where(top == best, id, n_vocabulary)).to(tl.int64))
    elif top_k == 0 and top_p == 1.0 and min_p == 0.0:
        block = tl.arange(0, BLOCKS_PAD)
        weight = tl.load(weights + row * n_blocks + block, mask=block < n_blocks, other=0.0)
        first = winner(times(key, -1 - block.to(tl.int64), weight), block.to(tl.int64)) * _BLOCK
        id = first + tl.arange(0, _BLOCK)
        distance = distances(logits + row * stride, n_vocabulary, id, best, temperature)
        tl.store(drawn + row, winner(times(key, id, tl.exp(-distance).to(tl.float64)), id))
    else:
        block = tl.arange(0, BLOCKS_PAD)
        total = tl.sum(tl.load(weights + row * n_blocks + block, mask=block < n_blocks, other=0.0))
        bound = tl.full([], FURTHEST, tl.int32)
        if min_p > 0.0:
            bound = (-tl.log(min_p)).to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
            bound = tl.minimum(bound, FURTHEST)
        tokens = logits + row * stride
        gathered = near + row * BLOCK
        within = tl.full([], FURTHEST, tl.int32)
        if top_k > 0:
            within = least_bound(
                tokens, gathered, n_vocabulary, best, temperature, top_k.to(tl.float64), within, True, BLOCK
            )
            bound = tl.minimum(bound, within)
        if top_p < 1.0:
            if top_k > 0:
                total = amount_within(tokens, n_vocabulary, best, temperature, within, False, BLOCK)
            within = least_bound(
                tokens, gathered, n_vocabulary, best, temperature, top_p * total, within, False, BLOCK
            )
            bound = tl.minimum(bound, within)
        tl.store(drawn + row, raced(tokens, gathered, n_vocabulary, best, temperature, bound, key, BLOCK))
