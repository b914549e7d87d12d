"""Which rows go through the blocks together: made once per step, used by the attention of every layer."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bakehouse_kernels.api import AttentionPlan
from bakehouse_kernels.cpu.compile import compiled

Indices = NDArray[np.int32]


class CpuPlan(NamedTuple):
    """Rows in the order in which tiles take them, their positions, and their sequences (rows of the table)."""

    block_table: Indices
    rows: Indices
    positions: Indices
    sequences: Indices


def plan_attention(
    block_table_SB: Tensor, query_start_S1: Tensor, context_len_S: Tensor, into: AttentionPlan | None = None
) -> CpuPlan:
    """The plan of a step. See `api.Ops.plan_attention`."""
    for index in (block_table_SB, query_start_S1, context_len_S):
        assert index.dtype == torch.int32, f"index tensors are int32, not {index.dtype}"
    n_sequences = context_len_S.shape[0]
    assert block_table_SB.shape[0] == n_sequences == query_start_S1.shape[0] - 1, "one table row a chunk"
    table, starts, lengths = (
        index.contiguous().numpy() for index in (block_table_SB, query_start_S1, context_len_S)
    )
    n_rows = int(starts[-1])
    if into is None:
        plan = CpuPlan(table, *np.empty((3, n_rows), np.int32))
    else:
        assert isinstance(into, CpuPlan), "a plan from `plan_attention`"
        assert into.block_table.shape[0] == n_sequences, f"a plan for {into.block_table.shape[0]} chunks"
        assert len(into.rows) == n_rows, f"a plan for {len(into.rows)} rows"
        plan = into
        plan.block_table[:, : table.shape[1]] = table
    _order_rows(_sharers_side_by_side(table), starts, lengths, plan.rows, plan.positions, plan.sequences)
    return plan


def _sharers_side_by_side(table: Indices) -> NDArray[np.int64]:
    """The sequences in the order of their block tables, read as strings of bytes: common beginnings meet."""
    if len(table) < 2 or not table.shape[1]:
        return np.arange(len(table))
    return np.argsort(table.astype(">i4").view(f"S{4 * table.shape[1]}")[:, 0], kind="stable")


@compiled()
def _order_rows(
    order: NDArray[np.int64],
    starts: Indices,
    lengths: Indices,
    rows: Indices,
    positions: Indices,
    sequences: Indices,
) -> None:
    """Fill the last three."""
    i = 0
    for s in order:
        for row in range(starts[s], starts[s + 1]):
            position = lengths[s] - starts[s + 1] + row
            rows[i], positions[i], sequences[i] = row, position, s
            i += 1
