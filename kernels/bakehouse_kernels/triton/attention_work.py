"""The pieces of work of a step's attention, as arrays of numbers: tiles, members, items, groups.

`attention_plan` says what their columns are, all but the last column of blocks, which holds the sequence here.
Records stand in int32 arrays, `[n, fields]`. R counts members, the chunks of one row.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Records = NDArray[np.int32]
Numbers = NDArray[np.int64]

STRIP = 8
"""Queries that one tile record stands for: tiles of rows hold a multiple of them."""

MAX_SHARERS = 8
"""Rows that share a split and are taken together, at most: with 4 query heads each, a tile of 32 rows."""

# One more launch takes some 4 µs, as long as reading 8 splits of 512 tokens (2 MB each with 8 key heads of 128).
# Groups that save fewer reads do not pay; that rows which read a block at one time find it in the device's cache
# makes them pay even less.
MIN_READS_SAVED = 8


class Chunks(NamedTuple):
    """What a step's attention is planned from."""

    table_SB: NDArray[np.int32]
    first_row_S: Numbers
    n_rows_S: Numbers
    context_len_S: Numbers


@dataclass(frozen=True, slots=True)
class Members:
    """The chunks of one row, and how many splits each has."""

    sequence_R: Numbers
    row_R: Numbers
    position_R: Numbers
    n_splits_R: Numbers

    @property
    def records(self) -> Records:
        """Row and position."""
        return np.stack([self.row_R, self.position_R], axis=1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Shared:
    """Splits that members have in common: of each member how many leading ones, the groups, and who is in them."""

    n_splits_R: Numbers
    groups: Records
    sharers: Records


@dataclass(frozen=True, slots=True)
class Work:
    """All that is to be done in a step."""

    tiles: Records
    members: Members
    items: Records
    shared: Shared


def work_of(chunks: Chunks, split_tokens: int, block_size: int) -> Work:
    """The work on these chunks."""
    members = members_of(chunks, split_tokens)
    shared = shared_of(chunks, members, split_tokens, block_size)
    return Work(tiles_of(chunks), members, items_of(members, shared.n_splits_R, split_tokens), shared)


def max_groups(n_members: int, table_width: int, split_tokens: int, block_size: int) -> int:
    """The most groups that members with a table of this width may have."""
    n_full = 0 if split_tokens % block_size else table_width * block_size // split_tokens
    return n_full * (n_members // 2) if n_full * (n_members - 1) >= MIN_READS_SAVED else 0


def members_of(chunks: Chunks, split_tokens: int) -> Members:
    """The chunks of one row."""
    sequence_R = np.flatnonzero(chunks.n_rows_S == 1)
    position_R = chunks.context_len_S[sequence_R] - 1
    return Members(sequence_R, chunks.first_row_S[sequence_R], position_R, position_R // split_tokens + 1)


def tiles_of(chunks: Chunks) -> Records:
    """Of each strip of a chunk of several rows: first query, row, rows from there on, position, sequence."""
    sequences = np.flatnonzero(chunks.n_rows_S > 1)
    sequence, strip = _numbered(sequences, -(-chunks.n_rows_S[sequences] // STRIP))
    first_query = strip * STRIP
    n_rows, row = chunks.n_rows_S[sequence], chunks.first_row_S[sequence] + first_query
    position = chunks.context_len_S[sequence] - n_rows + first_query
    tiles = np.stack([first_query, row, n_rows - first_query, position, sequence], axis=1)
    return _longest_first(tiles, position)


def items_of(members: Members, n_shared_R: Numbers, split_tokens: int) -> Records:
    """Of each split that a member has for itself: member, split, row, position, sequence."""
    everyone = np.arange(members.sequence_R.size)
    member, split = _numbered(everyone, members.n_splits_R - n_shared_R)
    split += n_shared_R[member]
    position = members.position_R[member]
    items = np.stack([member, split, members.row_R[member], position, members.sequence_R[member]], axis=1)
    return _longest_first(items, np.minimum(position + 1 - split * split_tokens, split_tokens))


def nothing_shared(n_members: int) -> Shared:
    """No groups."""
    return Shared(np.zeros(n_members, np.int64), np.zeros((0, 4), np.int32), np.zeros((0, 3), np.int32))


def shared_of(chunks: Chunks, members: Members, split_tokens: int, block_size: int) -> Shared:
    """The leading splits that members see all of and find in the same blocks; none where that does not pay.

    A group is split, first sharer, number of sharers, sequence; a sharer is member, row, position.
    """
    n_members = members.sequence_R.size
    if not max_groups(n_members, chunks.table_SB.shape[1], split_tokens, block_size):
        return nothing_shared(n_members)
    n_full_R = (members.position_R + 1) // split_tokens
    _, kind_R, n_of_kind = np.unique(
        chunks.table_SB[members.sequence_R, 0], return_inverse=True, return_counts=True
    )
    candidates = np.flatnonzero((n_of_kind[kind_R] > 1) & (n_full_R > 0))
    if candidates.size < 2:
        return nothing_shared(n_members)
    blocks_a_split = split_tokens // block_size
    n_full = n_full_R[candidates]
    table = chunks.table_SB[members.sequence_R[candidates], : n_full.max() * blocks_a_split]
    order = _order(table)
    sharers, n_full = candidates[order], n_full[order]
    n_common = np.minimum(_n_equal_leading(table[order]) // blocks_a_split, np.minimum(n_full[1:], n_full[:-1]))
    groups = _groups(n_common)
    if int((groups[:, 2] - 1).sum()) < MIN_READS_SAVED:
        return nothing_shared(n_members)
    n_shared_R = np.zeros(n_members, np.int64)
    n_shared_R[sharers] = np.maximum(np.append(n_common, 0), np.append(0, n_common))
    sequence = members.sequence_R[sharers[groups[:, 1]]]
    return Shared(
        n_shared_R,
        np.column_stack([groups, sequence]).astype(np.int32),
        np.stack([sharers, members.row_R[sharers], members.position_R[sharers]], axis=1).astype(np.int32),
    )


def _groups(n_common: Numbers) -> Numbers:
    """Split, first row, number of rows, where rows i and i + 1 have the first `n_common[i]` splits in common."""
    groups = []
    # Between two of the numbers that occur, all splits are shared by the same rows.
    for low, high in pairwise(np.unique(np.append(n_common, 0)).tolist()):
        edges = np.diff(np.concatenate([[0], n_common >= high, [0]]))
        begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) + 1
        run, part = _numbered(np.arange(begins.size), -(-(ends - begins) // MAX_SHARERS))
        first = begins[run] + part * MAX_SHARERS
        n_rows = np.minimum(ends[run] - first, MAX_SHARERS)
        split = np.repeat(np.arange(low, high), first.size)
        groups.append(np.stack([split, np.tile(first, high - low), np.tile(n_rows, high - low)], axis=1))
    return np.concatenate(groups) if groups else np.zeros((0, 3), np.int64)


def _order(table: NDArray[np.int32]) -> Numbers:
    """The rows in the order of their bytes: those with a common beginning are neighbours."""
    return np.argsort(table.astype(">i4").view(f"S{4 * table.shape[1]}")[:, 0], kind="stable")


def _n_equal_leading(table: NDArray[np.int32]) -> Numbers:
    """How many leading numbers each row but the first has in common with the one before."""
    differs = table[1:] != table[:-1]
    n_equal: Numbers = np.where(differs.any(axis=1), differs.argmax(axis=1), table.shape[1])
    return n_equal


def _numbered(things: Numbers, counts: Numbers) -> tuple[Numbers, Numbers]:
    """Each thing as often as its count says, and beside it 0, 1, 2 and so on."""
    ends = np.cumsum(counts)
    return np.repeat(things, counts), np.arange(counts.sum()) - np.repeat(ends - counts, counts)


def _longest_first(work: Numbers, length: Numbers) -> Records:
    """The longest begin first: so programs end at about the same time."""
    return work[np.argsort(-length, kind="stable")].astype(np.int32)
