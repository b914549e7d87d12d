"""The tensors that operations take and give together: the paged KV cache, surveys and draws.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawTensors:
    """How one token is drawn from each of R rows of logits; all on the device of the logits.

    `temperature_R`: float32, 0 for the best token. `top_k_R`: int32, 0 for no such filter. `top_p_R`: float64, 1
    for none. `min_p_R`: float64, 0 for none. `key_R`: int64, from which a row's noise comes.
    """

    temperature_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    key_R: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitChanges:
    """What is changed in R rows of logits, at C places; all on the device of the logits.

    `repetition_R`, `presence_R`, `frequency_R`: float32, the penalties of each row; 1, 0 and 0 for none.
    `row_C`, `id_C`: int32, the places, each there once. `is_seen_C`: bool, whether the token stands in prompt or
    output. `count_C`: int32, how often in the output. `bias_C`: float32, what is added; -inf forbids the token.
    """

    repetition_R: Tensor
    presence_R: Tensor
    frequency_R: Tensor
    row_C: Tensor
    id_C: Tensor
    is_seen_C: Tensor
    count_C: Tensor
    bias_C: Tensor
