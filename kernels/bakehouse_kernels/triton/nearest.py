"""The tokens of a row that are nearest to its best, inside kernels: how many or how heavy they are, and who wins.

A token's *distance* is (max x - x) / temperature, its weight exp(-distance). The number and the weight of the
tokens within a bound rise with the bound, and floats of one sign are ordered like their bits: bisection over 31
bits finds the least bound within which they amount to a goal, exactly, ties included. Sums are float64, in one
order. Mostly so few tokens lie within 4, 8 or 16 that one tile holds them: then they are gathered once, and
bisection goes over the tile instead of the vocabulary.

All bounds are the bits of a float32. `tokens` points to a row's logits, `gathered` to room for BLOCK ids.
"""

import torch
import triton
import triton.language as tl

from bakehouse_kernels.triton.race import times, winner

FURTHEST: tl.constexpr = tl.constexpr(0x7F7FFFFF)  # the largest finite number; what is masked lies beyond
_LEAST_TEMPERATURE: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).tiny)
_FOUR: tl.constexpr = tl.constexpr(0x40800000)
_SIXTEEN: tl.constexpr = tl.constexpr(0x41800000)  # a token there has 1e-7 of the best's weight
_DOUBLING: tl.constexpr = tl.constexpr(0x00800000)  # one more in the exponent


@triton.jit
def distances(tokens, n_vocabulary, id, best, temperature):
    """Of the tokens `id`; infinite where one is masked or there is none."""
    value = tl.load(tokens + id, mask=id < n_vocabulary, other=float("-inf")).to(tl.float32)
    return tl.div_rn(best - value, tl.maximum(temperature, _LEAST_TEMPERATURE))


@triton.jit
def amount_within(tokens, n_vocabulary, best, temperature, bound, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """The number of tokens within the bound, or their weight."""
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for begin in range(0, n_vocabulary, BLOCK):
        distance = distances(tokens, n_vocabulary, begin + tl.arange(0, BLOCK), best, temperature)
        amount = 1.0 if COUNTS else tl.exp(-distance)
        total += tl.where(distance.to(tl.int32, bitcast=True) <= bound, amount, 0.0).to(tl.float64)
    return tl.sum(total)


@triton.jit
def _gather(tokens, gathered, n_vocabulary, best, temperature, bound, BLOCK: tl.constexpr):
    """Writes the ids within the bound, in their order, as far as there is room; the number of all of them."""
    n_found = tl.full([], 0, tl.int32)
    # What was gathered before may still be read.
    tl.debug_barrier()
    for begin in range(0, n_vocabulary, BLOCK):
        id = begin + tl.arange(0, BLOCK)
        is_near = distances(tokens, n_vocabulary, id, best, temperature).to(tl.int32, bitcast=True) <= bound
        place = n_found + tl.cumsum(is_near.to(tl.int32)) - 1
        tl.store(gathered + place, id, mask=is_near & (place < BLOCK))
        n_found += tl.sum(is_near.to(tl.int32))
    tl.debug_barrier()
    return n_found


@triton.jit
def _gathered_ids(gathered, n_found, n_vocabulary, BLOCK: tl.constexpr):
    """The ids that have been gathered, then such as there is no token of."""
    place = tl.arange(0, BLOCK)
    return tl.load(gathered + place, mask=place < n_found, other=n_vocabulary)


@triton.jit
def least_bound(
    tokens, gathered, n_vocabulary, best, temperature, goal, limit, COUNTS: tl.constexpr, BLOCK: tl.constexpr
):
    """The least bound within which tokens amount to `goal` (float64), or `limit` where that is not beyond it."""
    low, high = tl.full([], -1, tl.int32), limit
    reach, is_open = tl.full([], _FOUR, tl.int32), tl.full([], 1, tl.int32)
    while (is_open != 0) & (reach <= _SIXTEEN):
        bound = tl.minimum(reach, limit)
        if amount_within(tokens, n_vocabulary, best, temperature, bound, COUNTS, BLOCK) >= goal:
            high = bound
            is_open = tl.full([], 0, tl.int32)
        else:
            low = bound
        reach += _DOUBLING
    n_found = _gather(tokens, gathered, n_vocabulary, best, temperature, high, BLOCK)
    fits = n_found <= BLOCK
    id = _gathered_ids(gathered, n_found, n_vocabulary, BLOCK)
    distance = distances(tokens, n_vocabulary, id, best, temperature)
    bits = distance.to(tl.int32, bitcast=True)
    amounts = (tl.full((BLOCK,), 1.0, tl.float32) if COUNTS else tl.exp(-distance)).to(tl.float64)
    while high - low > 1:
        middle = low + (high - low) // 2
        if fits:
            amount = tl.sum(tl.where(bits <= middle, amounts, 0.0))
        else:
            amount = amount_within(tokens, n_vocabulary, best, temperature, middle, COUNTS, BLOCK)
        if amount >= goal:
            high = middle
        else:
            low = middle
    return high


@triton.jit
def raced(tokens, gathered, n_vocabulary, best, temperature, bound, key, BLOCK: tl.constexpr):
    """The id (int64) that wins the race of the tokens within the bound."""
    n_found = _gather(tokens, gathered, n_vocabulary, best, temperature, bound, BLOCK)
    if n_found <= BLOCK:
        id = _gathered_ids(gathered, n_found, n_vocabulary, BLOCK).to(tl.int64)
        weight = tl.exp(-distances(tokens, n_vocabulary, id, best, temperature)).to(tl.float64)
        won = winner(times(key, id, weight), id)
    else:
        first = tl.full((BLOCK,), float("inf"), tl.float64)
        first_id = tl.zeros((BLOCK,), dtype=tl.int64)
        for begin in range(0, n_vocabulary, BLOCK):
            id = begin + tl.arange(0, BLOCK).to(tl.int64)
            distance = distances(tokens, n_vocabulary, id, best, temperature)
            weight = tl.where(distance.to(tl.int32, bitcast=True) <= bound, tl.exp(-distance), 0.0)
            time = times(key, id, weight.to(tl.float64))
            first_id = tl.where(time < first, id, first_id)
            first = tl.minimum(time, first)
        won = winner(first, first_id)
    return won
