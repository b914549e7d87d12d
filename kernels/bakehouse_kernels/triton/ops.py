"""`Ops` of a GPU: products by torch's library, all else by Triton kernels, whole steps as CUDA graphs."""

from collections.abc import Callable

import torch
from torch import Tensor

from bakehouse_kernels.api import AttentionPlan, Ops, Packed, Recording
from bakehouse_kernels.layout import KVCache
from bakehouse_kernels.reference import PlayedAnew
from bakehouse_kernels.triton.activation import gated
from bakehouse_kernels.triton.attention_plan import plan_attention
from bakehouse_kernels.triton.cache import new_cache
from bakehouse_kernels.triton.copy_blocks import copy_blocks
from bakehouse_kernels.triton.graph import GraphRecorder
from bakehouse_kernels.triton.int8_matmul import Int8Weight, int8_matmul, quantised
from bakehouse_kernels.triton.launch import device_class_of
from bakehouse_kernels.triton.paged_attention import paged_attention
from bakehouse_kernels.triton.penalties import adjust
from bakehouse_kernels.triton.rms_norm import rms_norm
from bakehouse_kernels.triton.rope_write import rope_and_write
from bakehouse_kernels.triton.sample import draw
from bakehouse_kernels.triton.survey import survey


class TritonOps:
    """Operations in bfloat16 or float32 with float32 sums; on CPU tensors in Triton's interpreter, for tests.

    Products of floating-point numbers are cuBLAS's, which chooses its algorithm, and with it the order of sums, by
    the number of rows: so a row's last bits depend on how many rows there are, not on what the others hold.
    Products in 8 bits, norms, rotations, activations, surveys and draws depend on nothing but the row, and
    attention on nothing but the row and whether it stands in a chunk of one row or of several.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, *, is_int8: bool = False) -> None:
        """`dtype`: that of weights, keys and values, and of all between products. `is_int8`: products in 8 bits.

        Raises `ValueError` on a GPU that is too old.
        """
        device_class_of(device)
        self._device = device
        self._dtype = dtype
        self._is_int8 = is_int8
        self._block_size: int | None = None
        self._recorder = GraphRecorder(device) if device.type == "cuda" else None

    adjust = staticmethod(adjust)
    copy_blocks = staticmethod(copy_blocks)
    draw = staticmethod(draw)
    paged_attention = staticmethod(paged_attention)
    rope_and_write = staticmethod(rope_and_write)
    survey = staticmethod(survey)

    def pack(self, weight_IO: Tensor) -> Packed:
        """The weight itself in the operations' dtype, or a copy rounded to 8 bits."""
        return quantised(weight_IO) if self._is_int8 else weight_IO.to(self._dtype)

    def pack_gated(self, weight_EF2: Tensor) -> Packed:
        """As `pack`: the activation has a kernel of its own."""
        return self.pack(weight_EF2)

    def linear(self, x_TI: Tensor, packed: Packed, bias_O: Tensor | None = None) -> Tensor:
        """`x @ weight + bias`; `[T, O]`."""
        if isinstance(packed, Int8Weight):
            return int8_matmul(x_TI, packed, bias_O)
        weight_IO = _weight(packed)
        if bias_O is None:
            return x_TI @ weight_IO
        return torch.addmm(bias_O.to(x_TI.dtype), x_TI, weight_IO)

    def add_linear(self, x_TO: Tensor, input_TI: Tensor, packed: Packed, bias_O: Tensor | None = None) -> None:
        """`x += input @ weight + bias`; without a bias rounded once."""
        if isinstance(packed, Int8Weight):
            int8_matmul(input_TI, packed, bias_O, x_TO)
            return
        if bias_O is not None:
            x_TO += bias_O
        x_TO.addmm_(input_TI, _weight(packed))

    def gated_linear(self, x_TE: Tensor, packed: Packed, bias_F2: Tensor | None = None) -> Tensor:
        """`silu(x @ gate + bias) * (x @ up + bias)`; `[T, F]`."""
        return gated(self.linear(x_TE, packed, bias_F2))

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x²) + eps) * weight`; `[T, E]`."""
        return rms_norm(x_TE, weight_E, eps)

    def new_cache(
        self, *, n_layers: int, n_blocks: int, block_size: int, n_kv_heads: int, head_dim: int
    ) -> KVCache:
        """An uninitialised cache, `[P, H, K, D]` in each layer; all of one `Ops` have blocks of one size."""
        assert self._block_size in (None, block_size), f"other caches have blocks of {self._block_size}"
        self._block_size = block_size
        return new_cache(
            n_layers=n_layers,
            n_blocks=n_blocks,
            block_size=block_size,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            dtype=self._dtype,
            device=self._device,
        )

    def plan_attention(
        self,
        block_table_SB: Tensor,
        query_start_S1: Tensor,
        context_len_S: Tensor,
        into: AttentionPlan | None = None,
    ) -> AttentionPlan:
        """The plan of a step over the cache that has been made. See `api.Ops.plan_attention`."""
        assert self._block_size is not None, "a cache comes before a plan"
        return plan_attention(
            block_table_SB,
            query_start_S1,
            context_len_S,
            block_size=self._block_size,
            device=self._device,
            into=into,
        )

    def record(self, work: Callable[[Ops], Tensor]) -> Recording:
        """`work` as a CUDA graph, or done anew each time where there is no CUDA. See `api.Ops.record`."""
        if self._recorder is None:
            return PlayedAnew(self, work)
        return self._recorder.recording(lambda: work(self))


def _weight(packed: Packed) -> Tensor:
    assert isinstance(packed, Tensor), "a weight from `pack`"
    return packed
