"""Which rows the attention kernels take together: made on the host once per step, used by every layer.

Chunks of one row (decode) are attended split by split of their context (`split_decode`); splits that several of
them have in common are taken out, and read once for all (`shared_prefix`), which gives the same bits. Other chunks
go in tiles, in one launch with the splits (`paged_attention`). So a row's bits depend on its own chunk alone.

All of it is one array of int32 on the device, moved there by one copy:
    header    how many items and groups there are, and where items, groups and sharers begin
    tiles     of each strip of a chunk's rows: first query, first row, rows from there on, position, blocks
    members   of each decode row: row, position
    items     of each split that a row has for itself: member, split, row, position, blocks
    groups    of each split that rows have in common: split, first sharer, number of sharers, blocks
    sharers   member, row, position of decode rows, those with common blocks side by side
    table     the block table
where `blocks` is the index in the array at which the sequence's blocks begin. A step of decode rows alone may be
recorded: launches then depend on nothing but the number of rows and the width of the table.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bakehouse_kernels.api import AttentionPlan
from bakehouse_kernels.triton.attention_work import Chunks, Work, max_groups, work_of
from bakehouse_kernels.triton.launch import device_class_of, launch_of

HEADER = 8
N_ITEMS, ITEMS_AT, N_GROUPS, GROUPS_AT, SHARERS_AT, MEMBERS_AT = range(6)
TILE_FIELDS, MEMBER_FIELDS, ITEM_FIELDS, GROUP_FIELDS, SHARER_FIELDS = 5, 2, 5, 4, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonPlan:
    """The array on the device, and what launches depend on.

    `n_members`: chunks of one row. `max_splits`: of any of them, each of which has room for so many partial
    results. `max_groups`: 0 where none can be.
    """

    array: Tensor
    block_size: int
    split_tokens: int
    n_rows: int
    n_tiles: int
    n_members: int
    max_splits: int
    max_groups: int


def plan_attention(
    block_table_SB: Tensor,
    query_start_S1: Tensor,
    context_len_S: Tensor,
    *,
    block_size: int,
    device: torch.device,
    into: AttentionPlan | None = None,
    split_tokens: int | None = None,
) -> TritonPlan:
    """The plan of a step, sent to `device`; the tensors are on the host, and free once this returns.

    Without `split_tokens` splits are as long as the launch table says.
    `into` is refilled on the device, after what was launched before, and returned; only a plan of chunks of one
    row each can be, by one of as many. See `api.Ops.plan_attention`.
    """
    if split_tokens is None:
        split_tokens = launch_of("combine_splits", device_class_of(device)).tiles["SPLIT"]
    chunks = _chunks(block_table_SB, query_start_S1, context_len_S)
    work = work_of(chunks, split_tokens, block_size)
    staged = _staged(chunks, work, pinned=device.type == "cuda")
    if into is None:
        plan = _new_plan(chunks, work, len(staged), split_tokens, block_size, device)
    else:
        assert isinstance(into, TritonPlan), "a plan from `plan_attention`"
        n_members = len(work.members.row_R)
        assert into.n_rows == into.n_members == n_members == len(chunks.n_rows_S), "chunks of one row, as many"
        assert (into.split_tokens, into.block_size) == (split_tokens, block_size), "splits and blocks as long"
        assert _max_splits(chunks, split_tokens, block_size) <= into.max_splits, "a table at least as wide"
        plan = into
    plan.array[: len(staged)].copy_(staged, non_blocking=True)
    return plan


def _new_plan(
    chunks: Chunks, work: Work, n_staged: int, split_tokens: int, block_size: int, device: torch.device
) -> TritonPlan:
    """Its array is uninitialised."""
    n_members, width = len(work.members.row_R), chunks.table_SB.shape[1]
    if len(work.tiles):  # never recorded, so launched as it is
        n_numbers, n_groups = n_staged, len(work.shared.groups)
        max_splits = int(work.members.n_splits_R.max(initial=1))
    else:
        max_splits = _max_splits(chunks, split_tokens, block_size)
        n_groups = max_groups(n_members, width, split_tokens, block_size)
        n_records = (
            n_members * (MEMBER_FIELDS + max_splits * ITEM_FIELDS + SHARER_FIELDS) + n_groups * GROUP_FIELDS
        )
        n_numbers = HEADER + n_records + chunks.table_SB.size
    return TritonPlan(
        array=torch.empty(n_numbers, dtype=torch.int32, device=device),
        block_size=block_size,
        split_tokens=split_tokens,
        n_rows=int(chunks.n_rows_S.sum()),
        n_tiles=len(work.tiles),
        n_members=n_members,
        max_splits=max_splits,
        max_groups=n_groups,
    )


def _max_splits(chunks: Chunks, split_tokens: int, block_size: int) -> int:
    """The most splits that a member with this table may have."""
    n_tokens: int = chunks.table_SB.shape[1] * block_size
    return max(1, -(-n_tokens // split_tokens))


def _chunks(block_table_SB: Tensor, query_start_S1: Tensor, context_len_S: Tensor) -> Chunks:
    for index in (block_table_SB, query_start_S1, context_len_S):
        assert index.dtype == torch.int32, f"index tensors are int32, not {index.dtype}"
        assert index.device.type == "cpu", f"plans are made on the host, not on {index.device}"
    n_sequences = context_len_S.shape[0]
    assert block_table_SB.shape[0] == n_sequences == query_start_S1.shape[0] - 1, "one table row a chunk"
    starts = query_start_S1.numpy().astype(np.int64)
    chunks = Chunks(block_table_SB.numpy(), starts[:-1], np.diff(starts), context_len_S.numpy().astype(np.int64))
    assert (chunks.n_rows_S <= chunks.context_len_S).all(), "rows are positions of their context"
    return chunks


def _staged(chunks: Chunks, work: Work, *, pinned: bool) -> Tensor:
    """The array on the host, sequences replaced by where their blocks begin."""
    tiles, items, shared = work.tiles, work.items, work.shared
    parts = (tiles, work.members.records, items, shared.groups, shared.sharers, chunks.table_SB)
    *begins, end = np.cumsum([HEADER, *(part.size for part in parts)]).tolist()
    tiles_at, members_at, items_at, groups_at, sharers_at, table_at = begins
    # Pinned, that the copy need not be waited for. PyTorch keeps pinned memory for the next step, and gives it out
    # again only when copies from it have ended (https://docs.pytorch.org/docs/stable/notes/cuda.html): so
    # nothing writes over a plan that is still on its way.
    staged = torch.empty(end, dtype=torch.int32, pin_memory=pinned)
    array = staged.numpy()
    array[:HEADER] = 0
    array[[N_ITEMS, ITEMS_AT, N_GROUPS, GROUPS_AT]] = len(items), items_at, len(shared.groups), groups_at
    array[[SHARERS_AT, MEMBERS_AT]] = sharers_at, members_at
    for begin, part in zip(begins, parts, strict=True):
        array[begin : begin + part.size] = part.ravel()
    width = chunks.table_SB.shape[1]
    for begin, part in ((tiles_at, tiles), (items_at, items), (groups_at, shared.groups)):
        sequence = array[begin : begin + part.size].reshape(part.shape)[:, -1]
        sequence *= width
        sequence += table_at
    return staged
