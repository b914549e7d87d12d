"""The `Ops` protocol: every operation a decoder needs, with shapes, dtypes and aliasing.

Besides it callers import `layout` (shape legend there), `dispatch`, `noise`, and `reference` for what it says.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from bakehouse_kernels.layout import DrawTensors, KVCache, LogitChanges, Survey

Packed = object
"""A weight in the form that one device's products want: opaque, made and read by the same `Ops`."""

AttentionPlan = object
"""What a device makes once per step of the step's chunks, for the attention of all layers: opaque."""


class Recording(Protocol):
    """Operations that are done again and again, on the same memory."""

    @property
    def result(self) -> Tensor:
        """Where the result stands after each `play`."""
        ...

    def play(self) -> None:
        """Do them all, in their order. Raises what they raise."""
        ...


class Ops(Protocol):
    """One device's operations. Inputs are never modified except where an op says so.

    On the CPU, what a row yields depends on nothing but that row: neighbours, tiles and threads do not change a
    bit of it. On a GPU that holds of all but matrix products of floating-point numbers: their library takes sums
    in another order at another number of rows, so there a row's last bits depend on how many rows its step has,
    but not on what the others hold.
    """

    def pack(self, weight_IO: Tensor) -> Packed:
        """The weight for `linear` and `add_linear`; perhaps a copy, perhaps rounded to fewer bits."""
        ...

    def pack_gated(self, weight_EF2: Tensor) -> Packed:
        """The fused weight of gate (first half of the columns) and up, for `gated_linear`."""
        ...

    def linear(self, x_TI: Tensor, packed: Packed, bias_O: Tensor | None = None) -> Tensor:
        """`x @ weight + bias`; `[T, O]`, in the dtype of `x`. T may be 0."""
        ...

    def add_linear(self, x_TO: Tensor, input_TI: Tensor, packed: Packed, bias_O: Tensor | None = None) -> None:
        """`x += input @ weight + bias`; modifies `x`."""
        ...

    def gated_linear(self, x_TE: Tensor, packed: Packed, bias_F2: Tensor | None = None) -> Tensor:
        """`silu(x @ gate + bias) * (x @ up + bias)` with a weight from `pack_gated`; `[T, F]`."""
        ...

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x²) + eps) * weight` over the last dimension, computed in float32; `[T, E]`."""
        ...

    def new_cache(
        self, *, n_layers: int, n_blocks: int, block_size: int, n_kv_heads: int, head_dim: int
    ) -> KVCache:
        """An uninitialised cache in this device's own layout: a slot is written before it is first read.

        Keys and values are perhaps rounded to fewer bits as they are written.
        """
        ...

    def rope_and_write(
        self, qkv_TX: Tensor, cos_TD: Tensor, sin_TD: Tensor, cache: KVCache, layer: int, slots_T: Tensor
    ) -> Tensor:
        """Rotate queries and keys, and write keys and values into their slots; the rotated queries, `[T, N, D]`.

        `qkv` holds N query heads, H key heads and H value heads of each token, end to end. The rotation is the
        half-split one, `x * cos + concat(-x[D/2:], x[:D/2]) * sin`; `cos` and `sin` are the rows of the tokens'
        positions, `[T, D]`, the two halves equal. `slots` (int64) are distinct; slot s stands in block
        `s // block_size` at offset `s % block_size`. Modifies the cache; `IndexError` on a slot outside of it, or
        where a device cannot raise, no such slot is written.
        """
        ...

    def plan_attention(
        self,
        block_table_SB: Tensor,
        query_start_S1: Tensor,
        context_len_S: Tensor,
        into: AttentionPlan | None = None,
    ) -> AttentionPlan:
        """Where `paged_attention` finds the chunks of a step, for all layers.

        Chunk s owns query rows `query_start[s] : query_start[s + 1]`, which are the *last* positions of its
        context of `context_len[s]` tokens. All int32. Entries of the block table beyond a chunk's context are
        never read. The tensors lie on the host, in any memory; on a CPU the plan reads them where they are, so
        they must not change while it is in use. `into`: a plan of this `Ops` for as many chunks of one row each
        and a table at least as wide, which nobody needs any more; the new plan stands where that one stood, and
        is returned. Asserts that it fits.
        """
        ...

    def paged_attention(
        self,
        q_TND: Tensor,
        cache: KVCache,
        layer: int,
        plan: AttentionPlan,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Causal attention of ragged queries over the cache, read through the block table; `[T, N, D]`.

        The keys of the queries' own tokens are already written. Query head n reads key head `n // (N / H)`. A
        query at position p sees positions j ≤ p, and with `window` only j > p - window. `softcap` c turns scores
        x into `c * tanh(x / c)`.
        """
        ...

    def copy_blocks(self, cache: KVCache, source_C: Tensor, target_C: Tensor) -> None:
        """Copy blocks `source[i]` onto `target[i]` (int64) in all layers; modifies the cache.

        Targets are distinct, and no target is a source of the same call.
        """
        ...

    def survey(self, logits_RV: Tensor, temperature_R: Tensor, n_best: int) -> Survey:
        """What drawing from each row needs: its `min(n_best, V)` best ids, and its weights summed.

        `n_best` is at least 1. `temperature` is float32 and normal, or 0 where no weights are wanted. Sums are
        within 1e-6 of themselves.
        """
        ...

    def adjust(self, logits_RV: Tensor, changes: LogitChanges) -> None:
        """Penalise and bias some logits (float32); modifies them.

        In this order: that of a seen token is divided by the row's repetition penalty where it is above 0, else
        multiplied with it; that of a token of the output falls by `presence + frequency * count`; the bias is
        added.
        """
        ...

    def draw(self, logits_RV: Tensor, asks: DrawTensors) -> Tensor:
        """One token id for each row, int64 `[R]`, on the device; nobody waits for it.

        At temperature 0 the best, of equal ones the smallest id. Else a token's weight is
        `exp((logit - highest) / temperature)`; `top_k`, `top_p` (of the weight that `top_k` leaves) and `min_p`
        keep the tokens from a lowest logit on, so equal logits share one fate; of the kept ones the token whose
        time, exponential noise keyed by (`key`, id) over its weight, is least wins the row. Without filters the
        race is one of blocks of `SURVEY_BLOCK` ids by their weights, then one of the tokens of the block that won.
        A row whose highest logit is not finite, or that holds a NaN, has no token: -1, as a device cannot raise.
        """
        ...

    def record(self, work: Callable[["Ops"], Tensor]) -> Recording:
        """Note the operations that `work` calls of the `Ops` it gets, to be done when the recording is played.

        `work` calls no others, and looks at no result. What it uses beside results (inputs, weights, plans,
        caches) must stay where it is as long as the recording is in use; what it returns is the recording's
        `result`. Recordings of the same `Ops` share memory: nothing but such inputs outlasts the next `play`. On a
        GPU `work` is also done once beforehand, with what its inputs hold then.
        """
        ...
