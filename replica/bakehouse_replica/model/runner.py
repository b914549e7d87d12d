"""Carries out a step plan on one device: copies, batch, forward pass, draw."""

import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.layout import KVCache

from bakehouse_replica.core.types import BlockCopy, Chunk, Draw, Sample, Sampled, SamplingParams, StepPlan
from bakehouse_replica.model.batch import build_batch
from bakehouse_replica.model.decoder import Decoder
from bakehouse_replica.model.sampler import draw

WARM_UP_TOKENS = 64  # compilation does not depend on the number


class Runner:
    """Owns the KV cache; keeps no other state between steps."""

    def __init__(self, *, decoder: Decoder, cache: KVCache, ops: Ops, device: torch.device) -> None:
        self._decoder = decoder
        self._cache = cache
        self._ops = ops
        self._device = device

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> tuple[Sampled, ...]:
        """Writes all chunks' keys and values, then draws one token per seed of each chunk that asks for it."""
        self._copy(plan.copies)
        if not plan.chunks:
            return ()
        batch = build_batch(plan.chunks, block_size=self._cache.block_size, device=self._device)
        logits_RV = self._decoder.forward(batch, self._cache)
        asked = [(chunk, chunk.sample) for chunk in plan.chunks if chunk.sample is not None]
        if not asked:
            return ()
        drawn = draw(
            logits_RV,
            [sample for _, sample in asked],
            [chunk.start + len(chunk.token_ids) for chunk, _ in asked],
        )
        return tuple(
            Sampled(sequence_id=chunk.sequence_id, draws=tuple(Draw(token_ids=(id_,)) for id_ in token_ids))
            for (chunk, _), token_ids in zip(asked, drawn, strict=True)
        )

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

    def _copy(self, copies: tuple[BlockCopy, ...]) -> None:
        if copies:
            source_C = torch.tensor([copy.source for copy in copies], dtype=torch.int64, device=self._device)
            target_C = torch.tensor([copy.target for copy in copies], dtype=torch.int64, device=self._device)
            self._ops.copy_blocks(self._cache, source_C, target_C)
