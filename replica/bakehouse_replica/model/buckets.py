"""Which decode steps are recorded, and how a step is padded to the size of a recording.

A step of R rows is played from the recording of the least bucket that holds R; the rows beyond are padding: each
has a context of its own in a null block, one that no sequence ever owns.
"""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from bakehouse_replica.model.batch import FlatChunks

_SMALL = (1, 2, 4)
_STEP = 8  # rows that a tile of a product takes anyway: beyond 8, padding costs little
_WIDTH_GROWTH = 4  # what is launched for a table of blocks grows with its width, and most contexts are short
_LEAST_WIDTH = 128


@dataclass(frozen=True, slots=True)
class Buckets:
    """The sizes that are recorded, rising: numbers of rows, and numbers of blocks of the longest context."""

    rows: tuple[int, ...]
    widths: tuple[int, ...]

    def find(self, n_rows: int, n_blocks: int) -> tuple[int, int] | None:
        """The least bucket with room for so many rows of so many blocks; None where no one is large enough."""
        row_index, width_index = bisect_left(self.rows, n_rows), bisect_left(self.widths, n_blocks)
        if row_index == len(self.rows) or width_index == len(self.widths):
            return None
        return self.rows[row_index], self.widths[width_index]

    def falling(self) -> tuple[tuple[int, int], ...]:
        """All of them, the largest first: later ones then fit into the memory of those before."""
        return tuple((n_rows, width) for width in reversed(self.widths) for n_rows in reversed(self.rows))


def buckets_of(*, max_rows: int, max_blocks: int) -> Buckets:
    """Rows 1, 2, 4, 8, 16, 24, … up to `max_rows`; widths 128, 512, 2048, … up to `max_blocks`."""
    rows = (*_SMALL, *range(_STEP, max_rows + _STEP, _STEP))
    widths, width = [], _LEAST_WIDTH
    while width < max_blocks:
        widths.append(width)
        width *= _WIDTH_GROWTH
    kept = {min(n_rows, max_rows) for n_rows in rows}
    return Buckets(tuple(sorted(kept)), (*widths, max_blocks))


def padded(flat: FlatChunks, n_rows: int, *, null_block: int, block_size: int) -> FlatChunks:
    """A step of one row a chunk, with rows added up to `n_rows`, which write to `null_block` alone.

    Added rows have slots of their own as long as the block has.
    """
    n_added = n_rows - len(flat.n_tokens_S)
    assert n_added >= 0, f"{len(flat.n_tokens_S)} rows for a bucket of {n_rows}"
    if n_added == 0:
        return flat

    def longer(array: np.ndarray, added: int | np.ndarray) -> np.ndarray:
        return np.concatenate((array, np.broadcast_to(np.asarray(added, array.dtype), n_added)))

    return FlatChunks(
        token_ids_T=longer(flat.token_ids_T, 0),
        n_tokens_S=longer(flat.n_tokens_S, 1),
        start_S=longer(flat.start_S, np.arange(n_added) % block_size),
        n_blocks_S=longer(flat.n_blocks_S, 1),
        block_ids_A=longer(flat.block_ids_A, null_block),
        wants_sample_S=longer(flat.wants_sample_S, 1),
        follows_draw_S=longer(flat.follows_draw_S, 0),
        score_at_Q=flat.score_at_Q,
    )


def padding(n_rows: int, *, null_block: int, block_size: int) -> FlatChunks:
    """A step of padding alone."""
    none = np.zeros(0, np.int32)
    empty = FlatChunks(
        token_ids_T=none,
        n_tokens_S=none,
        start_S=none,
        n_blocks_S=none,
        block_ids_A=none,
        wants_sample_S=none.astype(np.bool_),
        follows_draw_S=none.astype(np.bool_),
        score_at_Q=none,
    )
    return padded(empty, n_rows, null_block=null_block, block_size=block_size)
