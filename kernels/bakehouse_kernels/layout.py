"""The paged KV cache.

Shape legend, used as suffixes here and in every file of kernels and model:
    T tokens of all chunks of a step, end to end      S chunks (sequences) of a step
    N query heads      H key/value heads      D head dimension      E hidden size      F feed-forward width
    B blocks in the widest block table      K slots in a block (block_size)      P blocks in the pool
    I inputs and O outputs of a matrix product      X width of fused query, key and value, (N + 2H)·D
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """Keys and values of all layers, made by `Ops.new_cache` and read by the same `Ops`.

    The first dimension of each tensor is the block; what follows is the device's own affair. Slot s stands in
    block `s // block_size` at offset `s % block_size`.
    """

    key: tuple[Tensor, ...]
    value: tuple[Tensor, ...]
    block_size: int

    @property
    def n_blocks(self) -> int:
        """Blocks in the pool."""
        return self.key[0].shape[0]


SURVEY_BLOCK = 256  # near the root of the usual vocabularies, most of which it divides


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What `Ops.survey` finds in R rows of V logits; a weight is `exp((logit - highest) / temperature)`.

    `value_RK` and `id_RK`: the K best logits (float32) and their ids (int64), the higher first, of equal ones the
    smaller id. A row with a NaN has nothing but NaN for values.
    `total_R`: the sum of all weights. `block_RB`: the sums over ids `b * SURVEY_BLOCK` to
    `(b + 1) * SURVEY_BLOCK`. Both float64, and 0 where the row's temperature is 0 or its highest logit not finite.
    """

    value_RK: Tensor
    id_RK: Tensor
    total_R: Tensor
    block_RB: Tensor
