"""`Ops` of the served CPU path, in float32, or with matrix products in bfloat16 or int8."""

from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor

from bakehouse_kernels.api import AttentionPlan, Ops, Packed, Recording
from bakehouse_kernels.cpu.attention import paged_attention
from bakehouse_kernels.cpu.attention_plan import plan_attention
from bakehouse_kernels.cpu.cache import copy_blocks, new_cache, rope_and_write
from bakehouse_kernels.cpu.packing import PackedWeight, WeightFormat, pack, pack_gated
from bakehouse_kernels.cpu.pool import Crew
from bakehouse_kernels.cpu.products import add_linear, linear
from bakehouse_kernels.cpu.recording import Caller, Memory, Recorder
from bakehouse_kernels.cpu.rms_norm import rms_norm
from bakehouse_kernels.cpu.survey import survey
from bakehouse_kernels.layout import KVCache, Survey
from bakehouse_kernels.reference_draw import adjust, draw


class CpuOps:
    """Compiled operations whose machine code is all ready once this is built. Any thread may call.

    What is worth it spreads over `n_threads`, which is also what torch's own operators get, in the whole process.
    """

    def __init__(
        self, n_threads: int, *, weight_format: WeightFormat = "float32", kv_dtype: torch.dtype = torch.float32
    ) -> None:
        """Takes some 40 s where the machine code is not on disk yet, otherwise 1 s.

        Weights are rounded to `weight_format` as they are packed, and inputs of products with them. `kv_dtype`:
        float32, or float16, which keys and values are rounded to as they are written.
        """
        self._crew = Crew(n_threads)
        self._caller: Caller = self._crew
        self._memory = Memory()
        self._weight_format = weight_format
        self._kv_dtype = kv_dtype
        torch.set_num_threads(n_threads)
        self._compile()

    # Nothing to compile: where results lie on the host already, the replica draws from surveys.
    adjust = staticmethod(adjust)
    draw = staticmethod(draw)
    copy_blocks = staticmethod(copy_blocks)
    plan_attention = staticmethod(plan_attention)

    def new_cache(
        self, *, n_layers: int, n_blocks: int, block_size: int, n_kv_heads: int, head_dim: int
    ) -> KVCache:
        """An uninitialised cache in panels. See `api.Ops.new_cache`."""
        return new_cache(
            n_layers=n_layers,
            n_blocks=n_blocks,
            block_size=block_size,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            dtype=self._kv_dtype,
        )

    def pack(self, weight_IO: Tensor) -> Packed:
        """The weight in panels; a copy."""
        return pack(weight_IO, self._weight_format)

    def pack_gated(self, weight_EF2: Tensor) -> Packed:
        """Gate and up in panels of both; a copy."""
        return pack_gated(weight_EF2, self._weight_format)

    def linear(self, x_TI: Tensor, packed: Packed, bias_O: Tensor | None = None) -> Tensor:
        """`x @ weight + bias`; `[T, O]`."""
        assert isinstance(packed, PackedWeight), "a weight from `pack`"
        assert not packed.gated, "a weight from `pack`, not `pack_gated`"
        return linear(x_TI, packed, bias_O, self._caller)

    def add_linear(self, x_TO: Tensor, input_TI: Tensor, packed: Packed, bias_O: Tensor | None = None) -> None:
        """`x += input @ weight + bias`."""
        assert isinstance(packed, PackedWeight), "a weight from `pack`"
        assert not packed.gated, "a weight from `pack`, not `pack_gated`"
        add_linear(x_TO, input_TI, packed, bias_O, self._caller)

    def gated_linear(self, x_TE: Tensor, packed: Packed, bias_F2: Tensor | None = None) -> Tensor:
        """`silu(x @ gate + bias) * (x @ up + bias)`; `[T, F]`."""
        assert isinstance(packed, PackedWeight), "a weight from `pack_gated`"
        assert packed.gated, "a weight from `pack_gated`, not `pack`"
        return linear(x_TE, packed, bias_F2, self._caller)

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x²) + eps) * weight`; `[T, E]`."""
        return rms_norm(x_TE, weight_E, eps, self._caller)

    def rope_and_write(
        self, qkv_TX: Tensor, cos_TD: Tensor, sin_TD: Tensor, cache: KVCache, layer: int, slots_T: Tensor
    ) -> Tensor:
        """Rotate queries and keys, write keys and values; the rotated queries, `[T, N, D]`."""
        return rope_and_write(qkv_TX, cos_TD, sin_TD, cache, layer, slots_T, self._caller)

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
        return paged_attention(
            q_TND, cache, layer, plan, scale=scale, window=window, softcap=softcap, crew=self._caller
        )

    def survey(self, logits_RV: Tensor, temperature_R: Tensor, n_best: int) -> Survey:
        """The best ids of each row, and its weights summed. See `api.Ops.survey`."""
        return survey(logits_RV, temperature_R, n_best, self._crew)

    def record(self, work: Callable[[Ops], Tensor]) -> Recording:
        """Note what `work` calls. See `api.Ops.record`."""
        recorder = Recorder(self._crew, self._memory)
        noting = copy(self)
        noting._caller = recorder
        return recorder.recording(work(noting))

    def _compile(self) -> None:
        """Call every kernel once with each set of argument types, so that no request waits for the compiler."""
        self.survey(torch.ones(2, 4), torch.ones(2), 1)
        cache = self.new_cache(n_layers=1, n_blocks=1, block_size=1, n_kv_heads=1, head_dim=2)
        zero, both = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
        plan = self.plan_attention(zero, both, both[1:])
        weight = self.pack(torch.ones(6, 6))
        ones, slot = torch.ones(1, 6), torch.zeros(1, dtype=torch.int64)

        def work(ops: Ops) -> Tensor:
            qkv_TX = ops.linear(ops.rms_norm(ones, ones[0], 1e-5), weight)
            q_TND = ops.rope_and_write(qkv_TX, ones[:, :2], ones[:, :2], cache, 0, slot)
            return ops.paged_attention(q_TND, cache, 0, plan, scale=1.0)

        work(self)
        self.record(work).play()
