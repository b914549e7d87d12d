"""Decode steps whose operations are noted once for each number of rows, and then played.

All steps with as many rows read and write the same memory: a recording's inputs stay where they are, and those of
each step are copied onto them. Shape legend in `bakehouse_kernels.layout`.
"""

from dataclasses import dataclass

import torch
from bakehouse_kernels.api import Ops, Recording
from bakehouse_kernels.layout import KVCache
from torch import Tensor

from bakehouse_replica.model.batch import BatchTensors
from bakehouse_replica.model.decoder import Decoder
from bakehouse_replica.model.layers import Step
from bakehouse_replica.recently_used import RecentlyUsed

# One takes 0.1 MB and 4 ms to make, for 30 layers.
MAX_RECORDINGS = 512


@dataclass(frozen=True, slots=True)
class _Recorded:
    recording: Recording
    x_TE: Tensor
    step: Step


class RecordedSteps:
    """Recordings of a decoder with one cache, made as numbers of rows come up."""

    def __init__(self, decoder: Decoder, cache: KVCache, ops: Ops) -> None:
        self._decoder = decoder
        self._cache = cache
        self._ops = ops
        self._recorded = RecentlyUsed[tuple[int, int], _Recorded](MAX_RECORDINGS)

    def forward(self, batch: BatchTensors) -> Tensor:
        """`Decoder.forward` of a batch with one token for each chunk, to the bit; the next call overwrites it."""
        n_rows, n_blocks = batch.block_table_SB.shape
        # Tables as wide as the next power of two: a recording has to do for a while.
        width = 1 << (n_blocks - 1).bit_length()
        recorded = self._recorded.find((n_rows, width))
        if recorded is None:
            recorded = self._record(batch, width)
            self._recorded.keep((n_rows, width), recorded)
        step = recorded.step
        cos_TD, sin_TD = self._decoder.rope_rows(batch.positions_T)
        step.cos_TD.copy_(cos_TD)
        step.sin_TD.copy_(sin_TD)
        step.slots_T.copy_(batch.slots_T)
        self._ops.plan_attention(batch.block_table_SB, batch.query_start_S1, batch.context_len_S, into=step.plan)
        recorded.x_TE.copy_(self._decoder.embed(batch.token_ids_T))
        recorded.recording.play()
        return recorded.recording.result

    def _record(self, batch: BatchTensors, width: int) -> _Recorded:
        n_rows = len(batch.token_ids_T)
        cos_TD, sin_TD = self._decoder.rope_rows(batch.positions_T)
        table_SB = torch.zeros((n_rows, width), dtype=torch.int32, device=batch.block_table_SB.device)
        plan = self._ops.plan_attention(
            table_SB, batch.query_start_S1.clone(), torch.ones_like(batch.context_len_S)
        )
        step = Step(cos_TD=cos_TD, sin_TD=sin_TD, slots_T=batch.slots_T.clone(), plan=plan)
        x_TE = self._decoder.embed(batch.token_ids_T)
        recording = self._ops.record(lambda ops: self._decoder.layers(x_TE, step, self._cache, ops))
        return _Recorded(recording, x_TE, step)
