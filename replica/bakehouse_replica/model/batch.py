"""Turns a step's chunks into the index tensors of one forward pass: the only place where ids become tensors.

First into arrays end to end, which say what the chunks say and can cross to another process, then into tensors.

Shape legend in `bakehouse_kernels.layout`; R counts the rows after which tokens are drawn, Q those that score
prompt tokens, S1 is S + 1, A all entries of all block tables.
"""

from array import array
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bakehouse_replica.core.types import Chunk

# More than steps have chunks.
_MAX_KEPT_TABLES = 4096

Indices = NDArray[np.int32]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatChunks:
    """What a forward pass needs of the chunks of one step, which stand end to end in their order.

    `score_at` lists the rows, of all the step's T, that predict the target of a `Score`.
    """

    token_ids_T: Indices
    n_tokens_S: Indices
    start_S: Indices
    n_blocks_S: Indices
    block_ids_A: Indices
    wants_sample_S: Flags
    follows_draw_S: Flags
    score_at_Q: Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexArrays:
    """Where the rows of a step stand, as `BatchTensors` says, on the host."""

    positions_T: NDArray[np.int64]
    slots_T: NDArray[np.int64]
    query_start_S1: Indices
    context_len_S: Indices
    block_table_SB: Indices
    sample_at_R: Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTensors:
    """The chunks of one step, end to end; prefill and decode look alike.

    Chunk s owns the rows `query_start[s] : query_start[s + 1]`, the last positions of a context of
    `context_len[s]` tokens. `slots` are where each token's key and value go. `sample_at` lists the rows after
    which tokens are drawn, `score_at` those that predict the target of a `Score`, both in the plan's order.
    Entries of `block_table` beyond a chunk's own blocks are 0 and never read. What `Ops.plan_attention` reads
    stays on the host.
    """

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    slots_T: Tensor  # int64
    query_start_S1: Tensor  # int32, on the host
    context_len_S: Tensor  # int32, on the host
    block_table_SB: Tensor  # int32, on the host
    sample_at_R: Tensor  # int64
    score_at_Q: Tensor  # int64


def flatten(chunks: tuple[Chunk, ...]) -> FlatChunks:
    """`chunks`, of which there is at least one, each with at least one token."""
    n_chunks = len(chunks)
    token_ids_of = [chunk.token_ids for chunk in chunks]
    block_ids_of = [chunk.block_ids for chunk in chunks]
    n_tokens_S = np.fromiter(map(len, token_ids_of), np.int32, n_chunks)
    return FlatChunks(
        token_ids_T=np.fromiter(chain.from_iterable(token_ids_of), np.int32, int(n_tokens_S.sum())),
        n_tokens_S=n_tokens_S,
        start_S=np.fromiter([chunk.start for chunk in chunks], np.int32, n_chunks),
        n_blocks_S=np.fromiter(map(len, block_ids_of), np.int32, n_chunks),
        block_ids_A=np.frombuffer(b"".join(map(_packed, block_ids_of)), np.int32),
        wants_sample_S=np.fromiter([chunk.sample is not None for chunk in chunks], np.bool_, n_chunks),
        follows_draw_S=np.fromiter([chunk.follows_draw for chunk in chunks], np.bool_, n_chunks),
        score_at_Q=_score_rows(chunks, n_tokens_S),
    )


def index_arrays(flat: FlatChunks, block_size: int) -> IndexArrays:
    """What the chunks' rows read and write."""
    n_chunks = len(flat.n_tokens_S)
    query_start_S1 = np.zeros(n_chunks + 1, np.int32)
    np.cumsum(flat.n_tokens_S, out=query_start_S1[1:])
    block_table_SB = _block_table(flat.n_blocks_S, flat.block_ids_A)
    chunk_of_T = np.repeat(np.arange(n_chunks), flat.n_tokens_S)
    positions_T = np.arange(len(chunk_of_T)) + (flat.start_S - query_start_S1[:-1])[chunk_of_T]
    block_T = block_table_SB[chunk_of_T, positions_T // block_size].astype(np.int64)
    return IndexArrays(
        positions_T=positions_T,
        slots_T=block_T * block_size + positions_T % block_size,
        query_start_S1=query_start_S1,
        context_len_S=flat.start_S + flat.n_tokens_S,
        block_table_SB=block_table_SB,
        sample_at_R=query_start_S1[1:][flat.wants_sample_S] - 1,
    )


def build_batch(flat: FlatChunks, *, block_size: int, device: torch.device) -> BatchTensors:
    """The tensors of a step, on `device` but for those of the host."""
    arrays = index_arrays(flat, block_size)

    def move(indices: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(indices.astype(np.int64, copy=False)).to(device)

    return BatchTensors(
        token_ids_T=move(flat.token_ids_T),
        positions_T=move(arrays.positions_T),
        slots_T=move(arrays.slots_T),
        query_start_S1=torch.from_numpy(arrays.query_start_S1),
        context_len_S=torch.from_numpy(arrays.context_len_S),
        block_table_SB=torch.from_numpy(arrays.block_table_SB),
        sample_at_R=move(arrays.sample_at_R),
        score_at_Q=move(flat.score_at_Q),
    )


def _score_rows(chunks: tuple[Chunk, ...], n_tokens_S: Indices) -> Indices:
    scores = [(s, score) for s, chunk in enumerate(chunks) if (score := chunk.score) is not None]
    if not scores:
        return np.zeros(0, np.int32)
    starts_S = n_tokens_S.cumsum() - n_tokens_S
    rows = [starts_S[s] + score.first_row + np.arange(len(score.target_ids)) for s, score in scores]
    return np.concatenate(rows).astype(np.int32)


def _block_table(n_blocks_S: Indices, block_ids_A: Indices) -> Indices:
    table = np.zeros((len(n_blocks_S), int(n_blocks_S.max())), np.int32)
    # A boolean mask is filled row by row, which is the order of the ids: no Python work per chunk.
    table[np.arange(table.shape[1], dtype=np.int32) < n_blocks_S[:, None]] = block_ids_A
    return table


class _PackedTables:
    """Block tables as bytes, those of the last steps kept.

    The scheduler sends the same tuple until a block is added, so a decode step finds all tables but one in 16.
    They are found by identity: to hash 256 tables of 128 blocks takes 0.18 ms, half of all that `flatten` does.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[tuple[int, ...], bytes]] = {}

    def __call__(self, block_ids: tuple[int, ...]) -> bytes:
        kept = self._kept.get(id(block_ids))
        if kept is not None:  # and holds on to the tuple, so that no other has its address
            return kept[1]
        if len(self._kept) == _MAX_KEPT_TABLES:
            self._kept.clear()
        packed = array("i", block_ids).tobytes()
        self._kept[id(block_ids)] = (block_ids, packed)
        return packed


_packed = _PackedTables()
