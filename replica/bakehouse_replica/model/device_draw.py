"""Which tokens of a step the device draws by itself, and how the host draws the others.

A row that asks for one token needs nothing of the host: its draw is launched with the step, and its id can be read
by the next step before the host has seen it. What penalties and biases change in its logits (`device_changes`) is
launched before that. Log-probabilities, lists of allowed tokens, grammars and forks go through `sampler`, for
which the host waits.

Penalties count the tokens of the output, which the host has to know: so the scheduler asks for no such draw while
the one before it is in flight (`Sequence.may_run_ahead`), and overlapping changes nothing here.

Shape legend: R rows of logits, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from bakehouse_kernels.api import Ops
from numpy.typing import NDArray
from torch import Tensor

from bakehouse_replica.core.types import Chunk, Draw, Sample
from bakehouse_replica.model.constraint import Constraint, ConstraintSource, constraint_of
from bakehouse_replica.model.device_changes import is_for_device
from bakehouse_replica.model.noise import noise_key
from bakehouse_replica.model.sampler import draw
from bakehouse_replica.model.scoring import SCORE_SLICE_BYTES, slice_rows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One row that asks for tokens: `position` is where the new one will stand; `is_for_device`: who draws it."""

    row: int
    sequence_id: int
    sample: Sample
    position: int
    constraint: Constraint | None
    is_for_device: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawArrays:
    """`DrawTensors` on the host; rows that the device does not draw take the best token, which nobody reads."""

    temperature_R: NDArray[np.float32]
    top_k_R: NDArray[np.int32]
    top_p_R: NDArray[np.float64]
    min_p_R: NDArray[np.float64]
    key_R: NDArray[np.int64]


def wanted_of(
    chunks: Sequence[Chunk], constraints: ConstraintSource | None, n_vocabulary: int
) -> tuple[Wanted, ...]:
    """The rows of a step that ask for tokens, in the order of their chunks."""
    wanted: list[Wanted] = []
    for chunk in chunks:
        if (sample := chunk.sample) is None:
            continue
        constraint = constraint_of(constraints, chunk.sequence_id, sample)
        wanted.append(
            Wanted(
                row=len(wanted),
                sequence_id=chunk.sequence_id,
                sample=sample,
                position=chunk.start + len(chunk.token_ids),
                constraint=constraint,
                is_for_device=is_for_device(sample, constraint, n_vocabulary),
            )
        )
    return tuple(wanted)


def draw_arrays(wanted: Sequence[Wanted], n_rows: int) -> DrawArrays:
    """What is asked of `n_rows`, of which those beyond `wanted` are padding."""
    assert len(wanted) <= n_rows, f"{len(wanted)} rows ask, of {n_rows}"
    arrays = DrawArrays(
        temperature_R=np.zeros(n_rows, np.float32),
        top_k_R=np.zeros(n_rows, np.int32),
        top_p_R=np.ones(n_rows, np.float64),
        min_p_R=np.zeros(n_rows, np.float64),
        key_R=np.zeros(n_rows, np.int64),
    )
    for one in wanted:
        params = one.sample.params
        if params.temperature == 0.0 or not one.is_for_device:
            continue
        arrays.temperature_R[one.row] = params.temperature
        arrays.top_k_R[one.row] = params.top_k or 0
        arrays.top_p_R[one.row] = params.top_p
        arrays.min_p_R[one.row] = params.min_p
        arrays.key_R[one.row] = noise_key(one.sample.seeds[0], one.position)
    return arrays


def draw_by_host(
    ops: Ops, logits_RV: Tensor, drawn_R: Tensor, wanted: Sequence[Wanted]
) -> dict[int, tuple[Draw, ...]]:
    """By row, the draws that the device does not do alone; waits for the logits, and writes the ids to `drawn`.

    So the next step may read them there like the device's own. Rows are drawn in slices, as prompts are scored.
    """
    found: dict[int, tuple[Draw, ...]] = {}
    n_slice = slice_rows_of(logits_RV.shape[1], SCORE_SLICE_BYTES)
    for begin in range(0, len(wanted), n_slice):
        rows = wanted[begin : begin + n_slice]
        index_A = torch.tensor([one.row for one in rows], device=logits_RV.device)
        draws = draw(
            ops,
            logits_RV.index_select(0, index_A),
            [one.sample for one in rows],
            [one.position for one in rows],
            [one.constraint for one in rows],
        )
        ids = [first.token_ids[0] if (first := row[0]).token_ids else 0 for row in draws]
        drawn_R[index_A] = torch.tensor(ids, device=drawn_R.device)
        found |= {one.row: row for one, row in zip(rows, draws, strict=True)}
    return found
