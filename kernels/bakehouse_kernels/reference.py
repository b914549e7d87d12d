"""Every operation in plain torch on any device, obvious and slow: the oracle of all kernel tests."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bakehouse_kernels.api import AttentionPlan, Ops, Packed, Recording
from bakehouse_kernels.layout import SURVEY_BLOCK, KVCache, Survey
from bakehouse_kernels.reference_draw import adjust, draw

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """The arguments of `ReferenceOps.plan_attention` as they came."""

    block_table_SB: Tensor
    query_start_S1: Tensor
    context_len_S: Tensor


class ReferenceOps:
    """`Ops` written as their definitions: float32 inside, the input's dtype outside, one sequence at a time.

    Its cache is `[P, K, H, D]` for keys and for values.
    """

    def __init__(self, *, device: torch.device = _CPU, dtype: torch.dtype = torch.float32) -> None:
        """`device` and `dtype` of the cache."""
        self._device = device
        self._dtype = dtype

    adjust = staticmethod(adjust)
    draw = staticmethod(draw)

    def pack(self, weight_IO: Tensor) -> Packed:
        """The weight itself."""
        return weight_IO

    def pack_gated(self, weight_EF2: Tensor) -> Packed:
        """The weight itself."""
        return weight_EF2

    def linear(self, x_TI: Tensor, packed: Packed, bias_O: Tensor | None = None) -> Tensor:
        """`x @ weight + bias`; `[T, O]`."""
        assert isinstance(packed, Tensor), "a weight from `pack`"
        product = x_TI @ packed
        return product if bias_O is None else product + bias_O

    def add_linear(self, x_TO: Tensor, input_TI: Tensor, packed: Packed, bias_O: Tensor | None = None) -> None:
        """`x += input @ weight + bias`."""
        x_TO += self.linear(input_TI, packed, bias_O)

    def gated_linear(self, x_TE: Tensor, packed: Packed, bias_F2: Tensor | None = None) -> Tensor:
        """`silu(x @ gate + bias) * (x @ up + bias)`; `[T, F]`."""
        gate, up = self.linear(x_TE, packed, bias_F2).float().chunk(2, dim=-1)
        return (functional.silu(gate) * up).to(x_TE.dtype)

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x²) + eps) * weight` over the last dimension; `[T, E]`."""
        x = x_TE.float()
        mean_square = x.square().mean(dim=-1, keepdim=True)
        return (x / torch.sqrt(mean_square + eps) * weight_E.float()).to(x_TE.dtype)

    def new_cache(
        self, *, n_layers: int, n_blocks: int, block_size: int, n_kv_heads: int, head_dim: int
    ) -> KVCache:
        """An uninitialised cache."""
        shape = (n_blocks, block_size, n_kv_heads, head_dim)

        def tensors() -> tuple[Tensor, ...]:
            return tuple(torch.empty(shape, dtype=self._dtype, device=self._device) for _ in range(n_layers))

        return KVCache(key=tensors(), value=tensors(), block_size=block_size)

    def rope_and_write(
        self, qkv_TX: Tensor, cos_TD: Tensor, sin_TD: Tensor, cache: KVCache, layer: int, slots_T: Tensor
    ) -> Tensor:
        """Rotate queries and keys, write keys and values; the rotated queries, `[T, N, D]`."""
        n_kv_heads, head_dim = cache.key[layer].shape[2:]
        qkv = qkv_TX.view(len(qkv_TX), qkv_TX.shape[1] // head_dim, head_dim)
        q_TND, k_THD, v_THD = qkv.tensor_split((-2 * n_kv_heads, -n_kv_heads), dim=1)
        cache.key[layer].flatten(0, 1)[slots_T] = rotated(k_THD, cos_TD, sin_TD).to(cache.key[layer].dtype)
        cache.value[layer].flatten(0, 1)[slots_T] = v_THD.to(cache.value[layer].dtype)
        return rotated(q_TND, cos_TD, sin_TD)

    def plan_attention(
        self,
        block_table_SB: Tensor,
        query_start_S1: Tensor,
        context_len_S: Tensor,
        into: AttentionPlan | None = None,
    ) -> AttentionPlan:
        """The arguments."""
        if into is None:
            return ReferencePlan(block_table_SB, query_start_S1, context_len_S)
        assert isinstance(into, ReferencePlan), "a plan from `plan_attention`"
        into.block_table_SB[:, : block_table_SB.shape[1]] = block_table_SB
        into.query_start_S1.copy_(query_start_S1)
        into.context_len_S.copy_(context_len_S)
        return into

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
        """Causal attention of ragged queries over the cache; `[T, N, D]`. See `api.Ops.paged_attention`."""
        assert isinstance(plan, ReferencePlan), "a plan from `plan_attention`"
        out_TND = torch.empty_like(q_TND, memory_format=torch.contiguous_format)
        starts = plan.query_start_S1.tolist()
        for s, context_len in enumerate(plan.context_len_S.tolist()):
            rows = slice(starts[s], starts[s + 1])
            n_blocks = -(-context_len // cache.block_size)
            blocks = plan.block_table_SB[s, :n_blocks].long()
            k_LHD = cache.key[layer][blocks].flatten(0, 1)[:context_len]
            v_LHD = cache.value[layer][blocks].flatten(0, 1)[:context_len]
            out_TND[rows] = _attend(q_TND[rows], k_LHD, v_LHD, scale, window, softcap)
        return out_TND

    def copy_blocks(self, cache: KVCache, source_C: Tensor, target_C: Tensor) -> None:
        """Copy blocks `source[i]` onto `target[i]` in all layers; modifies the cache."""
        for layer in (*cache.key, *cache.value):
            layer[target_C] = layer[source_C]

    def survey(self, logits_RV: Tensor, temperature_R: Tensor, n_best: int) -> Survey:
        """The best ids of each row, and its weights summed. See `api.Ops.survey`."""
        value_RV, id_RV = logits_RV.float().sort(dim=-1, descending=True, stable=True)
        value_RV[value_RV[:, 0].isnan()] = torch.nan
        highest_R1, temperature_R1 = value_RV[:, :1].double(), temperature_R.double()[:, None]
        weight_RV = ((logits_RV.double() - highest_R1) / temperature_R1).exp()
        weight_RV[(temperature_R == 0.0) | ~highest_R1[:, 0].isfinite()] = 0.0
        padded_RV = functional.pad(weight_RV, (0, -weight_RV.shape[1] % SURVEY_BLOCK))
        return Survey(
            value_RK=value_RV[:, :n_best],
            id_RK=id_RV[:, :n_best],
            total_R=weight_RV.sum(dim=-1),
            block_RB=padded_RV.view(padded_RV.shape[0], -1, SURVEY_BLOCK).sum(dim=-1),
        )

    def record(self, work: Callable[[Ops], Tensor]) -> Recording:
        """Does `work` anew each time."""
        return PlayedAnew(self, work)


class PlayedAnew:
    """A recording that has noted nothing: each `play` calls the work again."""

    def __init__(self, ops: Ops, work: Callable[[Ops], Tensor]) -> None:
        self._ops = ops
        self._work = work
        self._result: Tensor | None = None

    @property
    def result(self) -> Tensor:
        """What the last `play` returned."""
        assert self._result is not None, "nothing has been played"
        return self._result

    def play(self) -> None:
        """Do the work."""
        self._result = self._work(self._ops)


class RoundedReferenceOps(ReferenceOps):
    """Products of numbers rounded to bfloat16, weights and inputs, summed in float32."""

    def pack(self, weight_IO: Tensor) -> Packed:
        """The weight's numbers, rounded."""
        return weight_IO.bfloat16().float()

    def pack_gated(self, weight_EF2: Tensor) -> Packed:
        """The weight's numbers, rounded."""
        return self.pack(weight_EF2)

    def linear(self, x_TI: Tensor, packed: Packed, bias_O: Tensor | None = None) -> Tensor:
        """`x @ weight + bias` of the rounded numbers; `[T, O]`."""
        return super().linear(x_TI.bfloat16().float(), packed, bias_O)


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """`weight ≈ integers * scale`, a scale per column."""

    integers_IO: Tensor
    scale_O: Tensor


class QuantisedReferenceOps(ReferenceOps):
    """Products in 8 bits: weights rounded per column, inputs per row, to -127..127, halves to even.

    The sum of a product is an exact integer, rounded to float32 and multiplied by the product of both scales. A
    row that holds a NaN or an infinity yields NaN; one below 2^-119 counts as zero.
    """

    def pack(self, weight_IO: Tensor) -> Packed:
        """Integers and scales."""
        weight_IO = weight_IO.float()
        scale_O = weight_IO.abs().amax(dim=0) / 127
        integers_IO = torch.where(scale_O == 0, 0.0, weight_IO / scale_O).round()
        return QuantisedWeight(integers_IO.long(), scale_O)

    def pack_gated(self, weight_EF2: Tensor) -> Packed:
        """Integers and scales."""
        return self.pack(weight_EF2)

    def linear(self, x_TI: Tensor, packed: Packed, bias_O: Tensor | None = None) -> Tensor:
        """`x @ weight + bias` of the rounded numbers; `[T, O]`."""
        assert isinstance(packed, QuantisedWeight), "a weight from `pack`"
        dtype, x_TI = x_TI.dtype, x_TI.float()
        largest_T1 = x_TI.abs().amax(dim=1, keepdim=True)
        # `127 / tensor` would be 127 times a rounded reciprocal.
        factor_T1 = torch.where(largest_T1 > 2.0**-119, torch.full_like(largest_T1, 127) / largest_T1, 0.0)
        integers_TI = (x_TI * factor_T1).round().nan_to_num(nan=0.0).long()
        scale_T1 = torch.where(largest_T1.isfinite(), largest_T1 / 127, torch.nan)
        product_TO = (integers_TI @ packed.integers_IO).float() * (scale_T1 * packed.scale_O)
        return (product_TO if bias_O is None else product_TO + bias_O).to(dtype)


def rotated(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """`x * cos + concat(-x[D/2:], x[:D/2]) * sin`; `[T, H, D]`."""
    x = x_THD.float()
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    cos, sin = cos_TD.float().unsqueeze(1), sin_TD.float().unsqueeze(1)
    return (x * cos + turned * sin).to(x_THD.dtype)


def _attend(
    q_QND: Tensor, k_LHD: Tensor, v_LHD: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Q queries at the last Q positions of a context of L tokens; `[Q, N, D]`."""
    n_queries, n_heads, _ = q_QND.shape
    context_len, n_kv_heads, _ = k_LHD.shape
    group = n_heads // n_kv_heads
    k_LND = k_LHD.float().repeat_interleave(group, dim=1)
    v_LND = v_LHD.float().repeat_interleave(group, dim=1)
    scores_NQL = torch.einsum("qnd,lnd->nql", q_QND.float(), k_LND) * scale
    if softcap is not None:
        scores_NQL = softcap * torch.tanh(scores_NQL / softcap)
    key_position = torch.arange(context_len, device=q_QND.device)
    query_position = torch.arange(context_len - n_queries, context_len, device=q_QND.device).unsqueeze(1)
    visible_QL = key_position <= query_position
    if window is not None:
        visible_QL = visible_QL & (key_position > query_position - window)
    weights_NQL = scores_NQL.masked_fill(~visible_QL, float("-inf")).softmax(dim=-1)
    return torch.einsum("nql,lnd->qnd", weights_NQL, v_LND).to(q_QND.dtype)
