"""Carries out step plans on a device that works while the host goes on.

A step is launched and left: its inputs go to the device by one copy, the ids drawn come back by another, and the
next step, begun meanwhile, finds them on the device. All of it stands in one stream, so a later step's writes come
after an earlier one's. Only what the host has to draw or to score makes `begin` wait.

Shape legend in `bakehouse_kernels.layout`; R counts the rows after which tokens are drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.layout import KVCache, LogitChanges
from torch import Tensor

from bakehouse_replica.core.types import BlockCopy, Draw, Sampled, Scored, StepPlan, StepResult
from bakehouse_replica.model.batch import FlatChunks, IndexArrays, flatten, index_arrays
from bakehouse_replica.model.buckets import Buckets, padded
from bakehouse_replica.model.constraint import ConstraintSource
from bakehouse_replica.model.decoder import Decoder
from bakehouse_replica.model.device_changes import changes_of
from bakehouse_replica.model.device_draw import Wanted, draw_arrays, draw_by_host, wanted_of
from bakehouse_replica.model.graphs import GraphedSteps, plan_of
from bakehouse_replica.model.layers import Step
from bakehouse_replica.model.returning import Returned, Returning
from bakehouse_replica.model.scoring import SCORE_SLICE_BYTES, follow_score, score, slice_rows_of
from bakehouse_replica.model.staging import Sizes, Staging, StepArrays, asks_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The largest step there is."""

    max_tokens: int
    max_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """What the rank that draws knows of a step beyond the places of its tokens: nothing, where others follow.

    `wanted` rows ask for tokens; `drawn_before` says which rows' tokens are which of the last step's draws.
    """

    wanted: Sequence[Wanted] = ()
    drawn_before: Mapping[int, int] = field(default_factory=dict)


class PendingStep:
    """A step on its way, or what it produced."""

    def __init__(
        self,
        *,
        step: int,
        wanted: Sequence[Wanted],
        by_host: dict[int, tuple[Draw, ...]],
        returned: Returned | None,
        scored: tuple[Scored, ...],
        begun_at: float,
    ) -> None:
        self._step = step
        self._wanted = wanted
        self._by_host = by_host
        self._returned = returned
        self._scored = scored
        self._begun_at = begun_at

    def result(self) -> StepResult:
        """Waits for the ids that the device draws. Asserts that every row had a token to draw."""
        ids = self._returned.ids() if self._returned is not None else []
        sampled = []
        for one in self._wanted:
            draws = self._by_host.get(one.row)
            if draws is None:
                assert ids[one.row] >= 0, f"the logits of sequence {one.sequence_id} have no finite maximum"
                draws = (Draw(token_ids=(ids[one.row],)),)
            sampled.append(Sampled(sequence_id=one.sequence_id, draws=draws))
        return StepResult(
            step=self._step,
            sampled=tuple(sampled),
            scored=self._scored,
            elapsed_s=perf_counter() - self._begun_at,
        )


class DeviceRunner:
    """Owns the KV cache, whose last block is the null block of padding; keeps what the last step drew.

    `constraints` serve samples with a grammar. Nothing is recorded before `record`. Of several ranks the first one
    begins steps and the others follow them: the same operations, recordings and padding, but for what is drawn.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        cache: KVCache,
        ops: Ops,
        device: torch.device,
        limits: StepLimits,
        buckets: Buckets,
        constraints: ConstraintSource | None = None,
        score_slice_bytes: int = SCORE_SLICE_BYTES,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._ops = ops
        self._device = device
        self._constraints = constraints
        self._score_slice_rows = slice_rows_of(decoder.n_vocabulary, score_slice_bytes)
        n_draws = max(limits.max_sequences, buckets.rows[-1])
        n_tokens = max(limits.max_tokens, n_draws)
        largest = Sizes(n_tokens=n_tokens, n_draws=n_draws, n_scored=n_tokens, n_copies=n_draws)
        self._staging = Staging(largest, max_draws=n_draws, device=device)
        self._returning = Returning(n_draws, device)
        self._graphs = GraphedSteps(
            decoder=decoder, cache=cache, ops=ops, buckets=buckets, staging=self._staging, device=device
        )
        self._last_step = -1
        self._last_row_of: dict[int, int] = {}

    @property
    def graphs(self) -> GraphedSteps:
        """The recordings, for whoever starts the runner."""
        return self._graphs

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> PendingStep:
        """Launches a step: copies, keys and values of all chunks, draws and scores in the plan's order."""
        begun_at = perf_counter()
        wanted = wanted_of(plan.chunks, self._constraints, self._decoder.n_vocabulary)
        for_host = [one for one in wanted if not one.is_for_device]
        scored: tuple[Scored, ...] = ()
        by_host: dict[int, tuple[Draw, ...]] = {}
        if not plan.chunks:
            self._copy_only(plan.copies)
        else:
            flat = flatten(plan.chunks)
            drawing = Drawing(wanted=wanted, drawn_before=self._drawn_before(plan, flat))
            logits_RV, x_QE = self._launch(plan.copies, flat, drawing)
            if logits_RV is not None:
                by_host = draw_by_host(self._ops, logits_RV, self._staging.drawn_R, for_host)
            if x_QE is not None:
                scored = score(self._ops, self._decoder, plan.chunks, x_QE, self._score_slice_rows)
        is_awaited = len(for_host) < len(wanted)
        returned = self._returning.fetch(self._staging.drawn_R[: len(wanted)]) if is_awaited else None
        self._last_step, self._last_row_of = plan.step, {one.sequence_id: one.row for one in wanted}
        return PendingStep(
            step=plan.step, wanted=wanted, by_host=by_host, returned=returned, scored=scored, begun_at=begun_at
        )

    @torch.inference_mode()
    def follow(self, copies: tuple[BlockCopy, ...], flat: FlatChunks | None) -> None:
        """What another rank than the first does of the step that this one begins; returns once it is launched."""
        if flat is None:
            self._copy_only(copies)
            return
        _, x_QE = self._launch(copies, flat, Drawing())
        if x_QE is not None:
            follow_score(self._decoder, flat, x_QE, self._score_slice_rows)

    def rehearse(self, plan: StepPlan) -> None:
        """A whole step for its own sake; all ranks rehearse the same ones in the same order."""
        if self._decoder.is_first_rank:
            self.begin(plan).result()
        else:
            self.follow(plan.copies, flatten(plan.chunks))

    def _launch(
        self, copies: tuple[BlockCopy, ...], flat: FlatChunks, drawing: Drawing
    ) -> tuple[Tensor | None, Tensor | None]:
        """The logits of the rows that draw, and the hidden states of those that score, where there are any."""
        bucket = None
        if is_decode(flat):
            bucket = self._graphs.find(len(flat.n_tokens_S), int(flat.n_blocks_S.max()))
        if bucket is not None:
            null_block, block_size = self._cache.n_blocks - 1, self._cache.block_size
            flat = padded(flat, bucket[0], null_block=null_block, block_size=block_size)
        arrays = index_arrays(flat, self._cache.block_size)
        inputs = self._send(copies, flat, arrays, drawing)
        if copies:
            self._ops.copy_blocks(self._cache, inputs.source_C, inputs.target_C)
        n_draws = len(arrays.sample_at_R)
        asking = [(one.row, one.sample) for one in drawing.wanted if one.is_for_device]
        changes = changes_of(asking, n_draws, self._device)
        if bucket is None:
            return self._called(arrays, inputs, changes)
        logits_RV = self._graphs.play(bucket, arrays)
        if changes is not None:  # the recording has drawn from the logits as the model left them
            self._draw(logits_RV, inputs, changes)
        return logits_RV, None

    def _draw(self, logits_RV: Tensor, inputs: StepArrays[Tensor], changes: LogitChanges | None) -> None:
        """Changes the rows that the device draws, and draws."""
        if changes is not None:
            self._ops.adjust(logits_RV, changes)
        self._staging.drawn_R[: len(logits_RV)].copy_(self._ops.draw(logits_RV, asks_of(inputs)))

    def _called(
        self, arrays: IndexArrays, inputs: StepArrays[Tensor], changes: LogitChanges | None
    ) -> tuple[Tensor | None, Tensor | None]:
        cos_TD, sin_TD = self._decoder.rope_rows(inputs.positions_T)
        step = Step(cos_TD=cos_TD, sin_TD=sin_TD, slots_T=inputs.slots_T, plan=plan_of(self._ops, arrays))
        x_TE = self._decoder.embed_drawn(self._staging.tokens(inputs))
        wanted = torch.cat((inputs.sample_at_R, inputs.score_at_Q))
        x_RE = self._decoder.layers(x_TE, step, self._cache, self._ops, wanted)
        n_drawn = len(inputs.sample_at_R)
        logits_RV = None
        if n_drawn:
            logits_RV = self._decoder.logits(x_RE[:n_drawn])
        if logits_RV is not None and self._decoder.is_first_rank:
            self._draw(logits_RV, inputs, changes)
        return logits_RV, x_RE[n_drawn:] if len(inputs.score_at_Q) else None

    def _send(
        self, copies: tuple[BlockCopy, ...], flat: FlatChunks, arrays: IndexArrays, drawing: Drawing
    ) -> StepArrays[Tensor]:
        n_draws = len(arrays.sample_at_R)
        asks = draw_arrays(drawing.wanted, n_draws)
        sizes = Sizes(
            n_tokens=len(flat.token_ids_T),
            n_draws=n_draws,
            n_scored=len(flat.score_at_Q),
            n_copies=len(copies),
        )
        source_T = np.full(len(flat.token_ids_T), -1, np.int64)
        source_T[list(drawing.drawn_before)] = list(drawing.drawn_before.values())
        return self._staging.send(
            StepArrays(
                token_ids_T=flat.token_ids_T,
                gather_T=self._staging.gather(source_T),
                positions_T=arrays.positions_T,
                slots_T=arrays.slots_T,
                sample_at_R=arrays.sample_at_R,
                score_at_Q=flat.score_at_Q,
                source_C=np.array([copy.source for copy in copies], np.int64),
                target_C=np.array([copy.target for copy in copies], np.int64),
                key_R=asks.key_R,
                top_p_R=asks.top_p_R,
                min_p_R=asks.min_p_R,
                temperature_R=asks.temperature_R,
                top_k_R=asks.top_k_R,
            ),
            sizes,
        )

    def _drawn_before(self, plan: StepPlan, flat: FlatChunks) -> dict[int, int]:
        """See `Drawing`."""
        following = np.flatnonzero(flat.follows_draw_S).tolist()
        if not following:
            return {}
        assert plan.step == self._last_step + 1, f"step {plan.step} follows draws of step {self._last_step}"
        row_at_S = (flat.n_tokens_S.cumsum() - 1).tolist()
        return {row_at_S[s]: self._last_row_of[plan.chunks[s].sequence_id] for s in following}

    def _copy_only(self, copies: tuple[BlockCopy, ...]) -> None:
        if copies:
            empty = np.zeros(0, np.int64)
            pairs = np.array([(copy.source, copy.target) for copy in copies], np.int64)
            named = dict.fromkeys(StepArrays.__dataclass_fields__, empty)
            named |= {"source_C": pairs[:, 0], "target_C": pairs[:, 1]}
            inputs = self._staging.send(StepArrays(**named), Sizes(n_tokens=0, n_draws=0, n_copies=len(copies)))
            self._ops.copy_blocks(self._cache, inputs.source_C, inputs.target_C)


def is_decode(flat: FlatChunks) -> bool:
    """Whether every chunk is one token after which one is drawn, and nothing is scored."""
    return bool((flat.n_tokens_S == 1).all()) and bool(flat.wants_sample_S.all()) and not len(flat.score_at_Q)
