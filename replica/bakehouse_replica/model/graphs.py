"""Decode steps of a device, recorded at the start for a few sizes and played padded to the next one.

Unlike those of `recorded`, a recording holds a step from its token ids to the ids drawn: on a GPU it is a CUDA
graph, which launches all of it at once. All of them share inputs, logits and the memory between.

Shape legend in `bakehouse_kernels.layout`; R counts the rows after which tokens are drawn, V the vocabulary.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter

import torch
from bakehouse_kernels.api import AttentionPlan, Ops, Recording
from bakehouse_kernels.layout import KVCache
from torch import Tensor

from bakehouse_replica.model.batch import IndexArrays, index_arrays
from bakehouse_replica.model.buckets import Buckets, padding
from bakehouse_replica.model.decoder import Decoder
from bakehouse_replica.model.layers import Step
from bakehouse_replica.model.staging import Sizes, Staging, asks_of

logger = logging.getLogger(__name__)

_REPORT_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class _Graph:
    recording: Recording
    plan: AttentionPlan


class GraphedSteps:
    """Recordings of a decoder with one cache, whose last block is the null block of `buckets`."""

    def __init__(
        self,
        *,
        decoder: Decoder,
        cache: KVCache,
        ops: Ops,
        buckets: Buckets,
        staging: Staging,
        device: torch.device,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._ops = ops
        self._buckets = buckets
        self._staging = staging
        self._graphs: dict[tuple[int, int], _Graph] = {}
        # Only the first of several ranks gets logits, and draws.
        shape = (buckets.rows[-1] if decoder.is_first_rank else 0, decoder.n_vocabulary)
        self._logits_RV = torch.zeros(shape, dtype=torch.float32, device=device)

    def find(self, n_rows: int, n_blocks: int) -> tuple[int, int] | None:
        """The recorded bucket that plays a decode step of these sizes, if one does."""
        bucket = self._buckets.find(n_rows, n_blocks)
        return bucket if bucket in self._graphs else None

    def play(self, bucket: tuple[int, int], arrays: IndexArrays) -> Tensor:
        """The logits of a padded step whose inputs have been sent; the draws stand in the staging."""
        graph = self._graphs[bucket]
        plan_of(self._ops, arrays, into=graph.plan)
        graph.recording.play()
        return self._logits_RV[: bucket[0]]

    def replay(self, bucket: tuple[int, int]) -> None:
        """The last step of this bucket once more, for those who time it."""
        self._graphs[bucket].recording.play()

    @torch.inference_mode()
    def record(
        self,
        buckets: Iterable[tuple[int, int]] | None = None,
        on_recorded: Callable[[int, int], None] | None = None,
    ) -> None:
        """Record `buckets` (None: all of them); every so often tell how many are done, of how many."""
        waiting = tuple(self._buckets.falling() if buckets is None else buckets)
        begun_at = reported_at = perf_counter()
        for index, bucket in enumerate(waiting, start=1):
            self._graphs[bucket] = self._recorded(*bucket)
            if (now := perf_counter()) - reported_at > _REPORT_EVERY_S:
                reported_at = now
                logger.info("captured %d of %d CUDA graphs in %.0f s", index, len(waiting), now - begun_at)
                if on_recorded is not None:
                    on_recorded(index, len(waiting))

    def forget(self) -> None:
        """Let go of all recordings and their memory."""
        self._graphs.clear()

    def _recorded(self, n_rows: int, width: int) -> _Graph:
        null_block, block_size = self._cache.n_blocks - 1, self._cache.block_size
        arrays = index_arrays(padding(n_rows, null_block=null_block, block_size=block_size), block_size)
        plan = self._wide_plan(arrays, n_rows, width)
        sizes = Sizes(n_tokens=n_rows, n_draws=n_rows)
        inputs, staging = self._staging.inputs(sizes), self._staging
        # While recording, kernels run on what is staged: as good as padding, but for where keys and values go.
        inputs.positions_T.copy_(torch.from_numpy(arrays.positions_T))
        inputs.slots_T.copy_(torch.from_numpy(arrays.slots_T))
        inputs.gather_T.zero_()
        inputs.temperature_R.zero_()

        def work(ops: Ops) -> Tensor:
            cos_TD, sin_TD = self._decoder.rope_rows(inputs.positions_T)
            step = Step(cos_TD=cos_TD, sin_TD=sin_TD, slots_T=inputs.slots_T, plan=plan)
            embedded_TE = self._decoder.embed_drawn(staging.tokens(inputs))
            x_TE = self._decoder.layers(embedded_TE, step, self._cache, ops)
            logits, drawn_R = self._decoder.logits(x_TE), staging.drawn_R[:n_rows]
            if self._decoder.is_first_rank:
                logits_RV = self._logits_RV[:n_rows]
                logits_RV.copy_(logits)
                drawn_R.copy_(ops.draw(logits_RV, asks_of(inputs)))
            return drawn_R

        return _Graph(self._ops.record(work), plan)

    def _wide_plan(self, arrays: IndexArrays, n_rows: int, width: int) -> AttentionPlan:
        """A plan of padding, with room for tables of `width`."""
        table_SB = torch.zeros((n_rows, width), dtype=torch.int32)
        table_SB[:, 0] = torch.from_numpy(arrays.block_table_SB)[:, 0]
        return self._ops.plan_attention(
            table_SB, torch.from_numpy(arrays.query_start_S1), torch.from_numpy(arrays.context_len_S)
        )


def plan_of(ops: Ops, arrays: IndexArrays, into: AttentionPlan | None = None) -> AttentionPlan:
    """The attention plan of a step."""
    return ops.plan_attention(
        torch.from_numpy(arrays.block_table_SB),
        torch.from_numpy(arrays.query_start_S1),
        torch.from_numpy(arrays.context_len_S),
        into=into,
    )
