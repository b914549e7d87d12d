"""Every operation in plain torch on any device, obvious and slow: the oracle of all kernel tests."""

import torch
from torch import Tensor
from torch.nn import functional

from bakehouse_kernels.layout import KVCache


class ReferenceOps:
    """`Ops` written as their definitions: float32 inside, the input's dtype outside, one sequence at a time."""

    def pack(self, weight_IO: Tensor) -> Tensor:
        """The weight itself."""
        return weight_IO

    def linear(self, x_TI: Tensor, packed: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """`x @ weight + bias`; `[T, O]`."""
        product = x_TI @ packed
        return product if bias_O is None else product + bias_O

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x²) + eps) * weight` over the last dimension; `[T, E]`."""
        x = x_TE.float()
        mean_square = x.square().mean(dim=-1, keepdim=True)
        return (x / torch.sqrt(mean_square + eps) * weight_E.float()).to(x_TE.dtype)

    def rope(self, x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """`x * cos + concat(-x[D/2:], x[:D/2]) * sin`; `[T, H, D]`."""
        x = x_THD.float()
        first, second = x.chunk(2, dim=-1)
        rotated = torch.cat((-second, first), dim=-1)
        cos, sin = cos_TD.float().unsqueeze(1), sin_TD.float().unsqueeze(1)
        return (x * cos + rotated * sin).to(x_THD.dtype)

    def silu_mul(self, gate_up_TF2: Tensor) -> Tensor:
        """`silu(gate) * up`, the gate being the first half; `[T, F]`."""
        gate, up = gate_up_TF2.float().chunk(2, dim=-1)
        return (functional.silu(gate) * up).to(gate_up_TF2.dtype)

    def write_kv(self, k_THD: Tensor, v_THD: Tensor, cache: KVCache, layer: int, slots_T: Tensor) -> None:
        """Write each token's key and value into its slot of `layer`; modifies the cache."""
        cache.key[layer].flatten(0, 1)[slots_T] = k_THD.to(cache.key[layer].dtype)
        cache.value[layer].flatten(0, 1)[slots_T] = v_THD.to(cache.value[layer].dtype)

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
        """Causal attention of ragged queries over the cache; `[T, N, D]`. See `api.Ops.paged_attention`."""
        out_TND = torch.empty_like(q_TND, memory_format=torch.contiguous_format)
        starts = query_start_S1.tolist()
        for s, context_len in enumerate(context_len_S.tolist()):
            rows = slice(starts[s], starts[s + 1])
            n_blocks = -(-context_len // cache.block_size)
            blocks = block_table_SB[s, :n_blocks].long()
            k_LHD = cache.key[layer][blocks].flatten(0, 1)[:context_len]
            v_LHD = cache.value[layer][blocks].flatten(0, 1)[:context_len]
            out_TND[rows] = _attend(q_TND[rows], k_LHD, v_LHD, scale, window, softcap)
        return out_TND

    def copy_blocks(self, cache: KVCache, source_C: Tensor, target_C: Tensor) -> None:
        """Copy blocks `source[i]` onto `target[i]` in all layers; modifies the cache."""
        for layer in (*cache.key, *cache.value):
            layer[target_C] = layer[source_C]


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
