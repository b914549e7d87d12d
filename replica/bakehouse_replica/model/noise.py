"""Noise for drawing tokens, keyed by (seed, position, token): the same on every machine and device.

Token t of weight w_t runs for an exponential time E_t, and the least E_t / w_t wins: with probability w_t / Σw.
(Gumbel-max, argmax of log w_t + g_t, is the logarithm of this race.) Each token has noise of its own, so rounding
in the logits changes the winner only where the first two are all but level. One uniform number a row, laid against
the cumulative distribution, has as many edges as the vocabulary has tokens, and each of them moves. Logits of
SmolLM2 off by 1e-5 of themselves change 1 of 12,000 tokens here and 324 there, in 158 of 200 texts of 60 tokens
(at temperature 1; `replica/benchmarks/sampling.py`).

Over a whole vocabulary the race has two rounds: blocks of ids by the sums of their weights, then the tokens of the
block that won. The distribution is the same, for V / C + C hashes instead of V.

The hash is that of the kernels (`bakehouse_kernels.noise`), started from a BLAKE2 of seed and position.

Shape legend: N draws, V vocabulary, K tokens in the race, B blocks, C tokens of a block.
"""

import hashlib
import struct

import torch
from bakehouse_kernels.noise import exponential
from torch import Tensor


def noise_key(seed: int, position: int) -> int:
    """Where the noise of `position` under `seed` starts: a signed 64-bit integer."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, position), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def race(weight_NK: Tensor, id_NK: Tensor, key_N: Tensor) -> Tensor:
    """The id that wins each draw, `[N]`. Weights (float64) are at least 0, in any scale; one in each is above."""
    winner_N1 = (exponential(key_N[:, None], id_NK) / weight_NK).argmin(dim=-1, keepdim=True)
    return id_NK.gather(1, winner_N1)[:, 0]


def race_of_blocks(weight_NB: Tensor, key_N: Tensor) -> Tensor:
    """The block that wins the first round of each draw, `[N]`; weights as for `race`."""
    # Negative counters: no block shares its noise with a token.
    counter_NB = -1 - torch.arange(weight_NB.shape[1], device=weight_NB.device).expand_as(weight_NB)
    return -1 - race(weight_NB, counter_NB, key_N)
