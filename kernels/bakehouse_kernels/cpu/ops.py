"""`Ops` of the served CPU path, in float32."""

import torch
from torch import Tensor

from bakehouse_kernels.cpu.attention import MIN_PARALLEL_SCORES, paged_attention
from bakehouse_kernels.cpu.cache import copy_blocks, write_kv
from bakehouse_kernels.cpu.linear import linear, pack
from bakehouse_kernels.cpu.pool import choose_layer
from bakehouse_kernels.cpu.rms_norm import rms_norm
from bakehouse_kernels.cpu.rope import rope
from bakehouse_kernels.cpu.silu_mul import silu_mul
from bakehouse_kernels.layout import KVCache


class CpuOps:
    """Compiled operations whose machine code is all ready once this is built. Any thread may call.

    The row operations run in the calling thread: up to 256 rows that is faster than waking others. Attention
    spreads over `n_threads`, which is also what torch's matrix products get, in the whole process.
    """

    def __init__(self, n_threads: int) -> None:
        """Takes some 10 s where the machine code is not on disk yet, otherwise 1 s."""
        self._n_threads = n_threads
        torch.set_num_threads(n_threads)
        choose_layer()
        self._compile()

    pack = staticmethod(pack)
    linear = staticmethod(linear)
    rms_norm = staticmethod(rms_norm)
    rope = staticmethod(rope)
    silu_mul = staticmethod(silu_mul)
    write_kv = staticmethod(write_kv)
    copy_blocks = staticmethod(copy_blocks)

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
        return paged_attention(
            q_TND,
            cache,
            layer,
            block_table_SB,
            query_start_S1,
            context_len_S,
            scale=scale,
            window=window,
            softcap=softcap,
            n_threads=self._n_threads,
        )

    def _compile(self) -> None:
        """Call every kernel once with each set of argument types, so that no request waits for the compiler."""
        ones = torch.ones(2, 4)
        self.rms_norm(ones, torch.ones(4), 1e-5)
        self.silu_mul(ones)
        heads = ones.view(2, 1, 4)
        for x_THD in (heads, heads[:, :, :2]):  # contiguous, and a view of a fused projection
            self.rope(x_THD, ones[:, : x_THD.shape[2]], ones[:, : x_THD.shape[2]])
        for n_rows in (1, MIN_PARALLEL_SCORES):  # in this thread, and in the pool
            self._attend_ones(n_rows)

    def _attend_ones(self, n_rows: int) -> None:
        shape = (1, n_rows, 1, 4)
        self.paged_attention(
            torch.ones(n_rows, 1, 4),
            KVCache(key=(torch.ones(shape),), value=(torch.ones(shape),)),
            0,
            torch.zeros(1, 1, dtype=torch.int32),
            torch.tensor([0, n_rows], dtype=torch.int32),
            torch.tensor([n_rows], dtype=torch.int32),
            scale=1.0,
        )
