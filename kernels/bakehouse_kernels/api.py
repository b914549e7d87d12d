"""The `Ops` protocol: every operation a decoder needs, with shapes, dtypes and aliasing.

The only module of this package that callers import, besides `layout` (shape legend there) and `dispatch`.
"""

from typing import Protocol

from torch import Tensor

from bakehouse_kernels.layout import KVCache


class Ops(Protocol):
    """One device's operations. Inputs are never modified except where an op says so."""

    def pack(self, weight_IO: Tensor) -> Tensor:
        """The weight in the form that `linear` wants: opaque, perhaps a copy, for this device's `linear` only."""
        ...

    def linear(self, x_TI: Tensor, packed: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """`x @ weight + bias` with a weight from `pack`; `[T, O]`, in the dtype of `x`. T may be 0."""
        ...

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x²) + eps) * weight` over the last dimension, computed in float32; `[T, E]`."""
        ...

    def rope(self, x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """Rotary embedding, half-split layout: `x * cos + concat(-x[D/2:], x[:D/2]) * sin`; `[T, H, D]`.

        `cos` and `sin` are the rows of the tokens' positions, `[T, D]`, the two halves equal.
        """
        ...

    def silu_mul(self, gate_up_TF2: Tensor) -> Tensor:
        """`silu(gate) * up` of a fused projection `[T, 2F]` whose first half is the gate; `[T, F]`."""
        ...

    def write_kv(self, k_THD: Tensor, v_THD: Tensor, cache: KVCache, layer: int, slots_T: Tensor) -> None:
        """Write each token's key and value into slot `slots[t]` (int64) of `layer`; modifies the cache."""
        ...

    def paged_attention(
        self,
        q_TND: Tensor,
        cache: KVCache,
        layer: int,
        block_table_SB: Tensor,
        query_start_S1: Tensor,
        context_len_S: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Causal attention of ragged queries over the cache, read through the block table; `[T, N, D]`.

        Chunk s owns query rows `query_start[s] : query_start[s + 1]`, which are the *last* positions of its
        context of `context_len[s]` tokens (its own keys are already written). Query head n reads key head
        `n // (N / H)`. A query at position p sees positions j ≤ p, and with `window` only j > p - window.
        `softcap` c turns scores x into `c * tanh(x / c)`. Index tensors are int32. Entries of the block
        table beyond a chunk's context are never read.
        """
        ...

    def copy_blocks(self, cache: KVCache, source_C: Tensor, target_C: Tensor) -> None:
        """Copy blocks `source[i]` onto `target[i]` (int64) in all layers; modifies the cache.

        Targets are distinct, and no target is a source of the same call.
        """
        ...
