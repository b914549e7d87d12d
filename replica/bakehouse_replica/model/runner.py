"""Carries out a step plan on one device: copies, batch, forward pass, scores, draws."""

import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.layout import KVCache
from torch import Tensor

from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import BlockCopy, Chunk, Sample, Sampled, Scored, StepPlan
from bakehouse_replica.model.batch import FlatChunks, build_batch, flatten
from bakehouse_replica.model.constraint import ConstraintSource, constraint_of
from bakehouse_replica.model.decoder import Decoder
from bakehouse_replica.model.recorded import RecordedSteps
from bakehouse_replica.model.sampler import draw
from bakehouse_replica.model.scoring import SCORE_SLICE_BYTES, follow_score, score, slice_rows_of

WARM_UP_TOKENS = 64  # compilation does not depend on the number
# Beyond, Python between the operations takes under a twentieth of a step.
MAX_RECORDED_ROWS = 128


class Runner:
    """Owns the KV cache; keeps no other state between steps.

    `constraints` serve samples with a grammar. `score_slice_bytes` bounds memory and changes no result.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        cache: KVCache,
        ops: Ops,
        device: torch.device,
        constraints: ConstraintSource | None = None,
        score_slice_bytes: int = SCORE_SLICE_BYTES,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._ops = ops
        self._device = device
        self._recorded = RecordedSteps(decoder, cache, ops)
        self._constraints = constraints
        self._score_slice_rows = slice_rows_of(decoder.n_vocabulary, score_slice_bytes)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> tuple[tuple[Sampled, ...], tuple[Scored, ...]]:
        """Writes all chunks' keys and values, then draws and scores for those that ask, in the plan's order."""
        self._copy(plan.copies)
        if not plan.chunks:
            return (), ()
        flat = flatten(plan.chunks)
        batch = build_batch(flat, block_size=self._cache.block_size, device=self._device)
        if self._is_recorded(flat):
            return self._draw(plan.chunks, self._recorded.forward(batch)), ()
        n_drawn = len(batch.sample_at_R)
        wanted = torch.cat((batch.sample_at_R, batch.score_at_Q))
        x_RE = self._decoder.forward(batch, self._cache, wanted)
        sampled = self._draw(plan.chunks, x_RE[:n_drawn])
        scored = score(self._ops, self._decoder, plan.chunks, x_RE[n_drawn:], self._score_slice_rows)
        return sampled, scored

    @torch.inference_mode()
    def follow(self, copies: tuple[BlockCopy, ...], flat: FlatChunks | None) -> None:
        """What another rank than the first does of a `run`: all but to draw and to score."""
        self._copy(copies)
        if flat is None:
            return
        batch = build_batch(flat, block_size=self._cache.block_size, device=self._device)
        if self._is_recorded(flat):
            self._decoder.logits(self._recorded.forward(batch))
            return
        n_drawn = len(batch.sample_at_R)
        x_RE = self._decoder.forward(batch, self._cache, torch.cat((batch.sample_at_R, batch.score_at_Q)))
        if n_drawn:
            self._decoder.logits(x_RE[:n_drawn])
        follow_score(self._decoder, flat, x_RE[n_drawn:], self._score_slice_rows)

    def warm_up(self) -> None:
        """One prefill and one decode step, so that no request pays for compilation; writes the first blocks."""
        sample = Sample(params=SamplingParams(top_p=0.9), seeds=(0,), output_index=0)
        n_tokens = min(WARM_UP_TOKENS, self._cache.n_blocks * self._cache.block_size - 1)
        n_blocks = n_tokens // self._cache.block_size + 1
        for start, length in ((0, n_tokens), (n_tokens, 1)):
            chunk = Chunk(
                sequence_id=0,
                token_ids=(0,) * length,
                start=start,
                block_ids=tuple(range(n_blocks)),
                sample=sample,
            )
            self.run(StepPlan(step=0, copies=(), chunks=(chunk,)))

    def _is_recorded(self, flat: FlatChunks) -> bool:
        """Whether the step is one of many alike, which differ only in what their tensors hold."""
        is_decode = bool((flat.n_tokens_S == 1).all()) and bool(flat.wants_sample_S.all())
        is_small = len(flat.n_tokens_S) <= MAX_RECORDED_ROWS
        return self._decoder.is_ops_alone and is_decode and is_small and not len(flat.score_at_Q)

    def _copy(self, copies: tuple[BlockCopy, ...]) -> None:
        if copies:
            source_C = torch.tensor([copy.source for copy in copies], dtype=torch.int64, device=self._device)
            target_C = torch.tensor([copy.target for copy in copies], dtype=torch.int64, device=self._device)
            self._ops.copy_blocks(self._cache, source_C, target_C)

    def _draw(self, chunks: tuple[Chunk, ...], x_RE: Tensor) -> tuple[Sampled, ...]:
        asked = [(chunk, chunk.sample) for chunk in chunks if chunk.sample is not None]
        if not asked:
            return ()
        drawn = draw(
            self._ops,
            self._decoder.logits(x_RE),
            [sample for _, sample in asked],
            [chunk.start + len(chunk.token_ids) for chunk, _ in asked],
            [constraint_of(self._constraints, chunk.sequence_id, sample) for chunk, sample in asked],
        )
        return tuple(
            Sampled(sequence_id=chunk.sequence_id, draws=draws)
            for (chunk, _), draws in zip(asked, drawn, strict=True)
        )
