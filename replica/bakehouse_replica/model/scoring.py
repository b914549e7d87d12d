"""Log-probabilities of prompt tokens, computed in slices that bound the memory of their logits.

Shape legend in `bakehouse_kernels.layout`; Q counts the rows that score prompt tokens, V the vocabulary.
"""

import numpy as np
from bakehouse_kernels.api import Ops
from torch import Tensor

from bakehouse_replica.core.types import Chunk, Score, Scored, TokenLogprob
from bakehouse_replica.model.batch import FlatChunks
from bakehouse_replica.model.decoder import Decoder
from bakehouse_replica.model.logprobs import token_logprobs

# Rows are scored in slices of so many bytes of logits: 55 rows of 151,936, with temporaries 139 MB at most; the
# logits of 512 rows alone take 311 MB. The head's product gains little from more (kernels, `cpu/products.py`).
SCORE_SLICE_BYTES = 32 << 20


def slice_rows_of(n_vocabulary: int, slice_bytes: int) -> int:
    """How many rows are scored at once, for `score`."""
    return max(1, slice_bytes // (4 * n_vocabulary))


def score(
    ops: Ops, decoder: Decoder, chunks: tuple[Chunk, ...], x_QE: Tensor, slice_rows: int
) -> tuple[Scored, ...]:
    """Of each chunk that asks, from what the last layer made of the rows that score, in the plan's order."""
    scored, begin = [], 0
    for chunk in chunks:
        if chunk.score is not None:
            end = begin + len(chunk.score.target_ids)
            logprobs = _logprobs(ops, decoder, chunk.score, x_QE[begin:end], slice_rows)
            scored.append(Scored(sequence_id=chunk.sequence_id, logprobs=logprobs))
            begin = end
    return tuple(scored)


def follow_score(decoder: Decoder, flat: FlatChunks, x_QE: Tensor, slice_rows: int) -> None:
    """What another rank than the first does of `score`: its part of the logits, slice by slice."""
    begin = 0
    for n_scored in _scored_rows(flat):
        for first in range(begin, begin + n_scored, slice_rows):
            decoder.logits(x_QE[first : min(first + slice_rows, begin + n_scored)])
        begin += n_scored


def _scored_rows(flat: FlatChunks) -> list[int]:
    """How many rows each chunk scores, in the order of the chunks."""
    chunk_of_Q = np.searchsorted(flat.n_tokens_S.cumsum(), flat.score_at_Q, side="right")
    scored_S: list[int] = np.bincount(chunk_of_Q, minlength=len(flat.n_tokens_S)).tolist()
    return scored_S


def _logprobs(ops: Ops, decoder: Decoder, asked: Score, x_SE: Tensor, slice_rows: int) -> tuple[TokenLogprob, ...]:
    logprobs: list[TokenLogprob] = []
    for begin in range(0, len(x_SE), slice_rows):
        logits_SV = decoder.logits(x_SE[begin : begin + slice_rows])
        logprobs += token_logprobs(ops, logits_SV, asked.target_ids[begin : begin + slice_rows], asked.n_top)
    return tuple(logprobs)
