"""What one call of the paged attention is given, and the memory that its threads work in."""

from typing import NamedTuple

import numpy as np

from bakehouse_kernels.cpu.compile import compiled
from bakehouse_kernels.cpu.tile import SHAPE

COLUMNS = SHAPE.columns
FLOAT_BYTES = 4
LINE_BYTES = 64  # of the caches


class Call(NamedTuple):
    """The arguments of one call as the compiled functions take them: addresses and numbers.

    An array that one function hands to another is counted, and is ten numbers to hand over: with arrays in here
    more than half of the time went there. `softcap` counts only where `capped`.
    """

    q: int  # float32 [T, N, D]
    out: int  # [T, N, D]
    key: int  # the layer's [P, H, K / C, D, C], C columns of a tile
    value: int  # of [P, H, D / C, K, C]
    element: np.float32 | np.int16  # int16 where keys and values are float16: its type chooses what is compiled
    n_kv_heads: int
    group: int  # query heads to a key head
    head_dim: int
    block_size: int
    n_key_panels: int
    n_value_panels: int
    key_panel_bytes: int
    value_panel_bytes: int
    scale: np.float32
    window: int
    capped: bool
    softcap: np.float32


class Scratch(NamedTuple):
    """Addresses of one thread's working memory for H key heads with M states each; all float32.

    A state is that of one query head of one row.
    """

    sums: int  # [H, D / C, M, C]
    scores: int  # [K / C, M, C]: of one block and key head, then the weights
    q: int  # [H, M, D]
    highest: int  # [H, M]: score so far
    total: int  # [H, M]: of the weights, relative to the highest
    factor: int  # [M]: for the sums so far
    n_heads: int
    n_states: int


@compiled(exact=True)
def n_numbers(call: Call, n_heads: int, n_states: int) -> int:
    """Of one thread's scratch, and so many more that it can begin with a line."""
    n_each = n_heads * (call.n_value_panels * COLUMNS + call.head_dim + 2) + call.n_key_panels * COLUMNS + 1
    return n_states * n_each + LINE_BYTES // FLOAT_BYTES


@compiled(exact=True)
def scratch_at(call: Call, address: int, n_heads: int, n_states: int) -> Scratch:
    """One thread's, in its part of the room."""
    sums = -(-address // LINE_BYTES) * LINE_BYTES
    scores = sums + n_heads * call.n_value_panels * n_states * COLUMNS * FLOAT_BYTES
    q = scores + call.n_key_panels * n_states * COLUMNS * FLOAT_BYTES
    highest = q + n_heads * n_states * call.head_dim * FLOAT_BYTES
    total = highest + n_heads * n_states * FLOAT_BYTES
    factor = total + n_heads * n_states * FLOAT_BYTES
    return Scratch(sums, scores, q, highest, total, factor, n_heads, n_states)
