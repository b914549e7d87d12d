"""Which rows go through the blocks together: made once per step, used by the attention of every layer."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bakehouse_kernels.api import AttentionPlan
from bakehouse_kernels.cpu.addresses import int32_at
from bakehouse_kernels.cpu.compile import compiled

Indices = NDArray[np.int32]


class Rows(NamedTuple):
    """Addresses of what is known of n rows, in the order in which tiles take them: all int32.

    `n_beginnings`: how many rows there are whose context begins with another block than that of the row before.
    """

    n: int
    n_beginnings: int
    rows: int
    positions: int
    sequences: int  # rows of the block table
    block_table: int
    table_width: int


class Run(NamedTuple):
    """Rows `first` to `after` of the plan that stand in the same block at index `b` of theirs; -1 for none."""

    b: int
    first: int
    after: int
    block: int


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """The rows, and the arrays in which they stand."""

    rows: Rows
    block_table: Indices
    ordered: Indices  # row, position and sequence of each
    n_beginnings: Indices


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
        plan = _plan(table, n_rows)
    else:
        assert isinstance(into, CpuPlan), "a plan from `plan_attention`"
        assert into.block_table.shape[0] == n_sequences, f"a plan for {into.block_table.shape[0]} chunks"
        assert into.rows.n == n_rows, f"a plan for {into.rows.n} rows"
        plan = into
        plan.block_table[:, : table.shape[1]] = table
    _order_rows(_sharers_side_by_side(table), starts, lengths, table, plan.ordered, plan.n_beginnings)
    return plan


def _plan(table: Indices, n_rows: int) -> CpuPlan:
    """Of these chunks, their rows not in order yet."""
    ordered, n_beginnings = np.empty((3, n_rows), np.int32), np.empty(1, np.int32)
    rows, positions, sequences = (array.ctypes.data for array in ordered)
    at = Rows(
        n=n_rows,
        n_beginnings=n_beginnings.ctypes.data,
        rows=rows,
        positions=positions,
        sequences=sequences,
        block_table=table.ctypes.data,
        table_width=table.shape[1],
    )
    return CpuPlan(at, table, ordered, n_beginnings)


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
    table: Indices,
    ordered: Indices,
    n_beginnings: Indices,
) -> None:
    """Fill the last two."""
    i, last_beginning = 0, -1
    n_beginnings[0] = 0
    for s in order:
        for row in range(starts[s], starts[s + 1]):
            if table[s, 0] != last_beginning:
                n_beginnings[0] += 1
                last_beginning = table[s, 0]
            position = lengths[s] - starts[s + 1] + row
            ordered[0, i], ordered[1, i], ordered[2, i] = row, position, s
            i += 1


@compiled(exact=True)
def next_run(
    rows: Rows, block_size: int, window: int, begin: int, end: int, after_block: int, b: int, r: int
) -> Run:
    """Of rows `begin` to `end`, the first run from row `r` at index `b` on; indices in order, rows inside."""
    while b < after_block:
        while r < end:
            block = _block_of(rows, block_size, window, r, b)
            after = r + 1
            while after < end and _block_of(rows, block_size, window, after, b) == block:
                after += 1
            if block >= 0:
                return Run(b, r, after, block)
            r = after
        b, r = b + 1, begin
    return Run(b, end, end, -1)


@compiled(exact=True, inlined=True)
def _block_of(rows: Rows, block_size: int, window: int, r: int, b: int) -> int:
    """The block that row `r` of the plan sees at index `b`, -1 where it sees nothing there."""
    position, first = int32_at(rows.positions, r), b * block_size
    if first > position or first + block_size <= position - window + 1:
        return -1
    block: int = int32_at(rows.block_table, int32_at(rows.sequences, r) * rows.table_width + b)
    return block
