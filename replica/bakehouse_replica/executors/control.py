"""The steps of a plan as one buffer of int32, which rank 0 sends to the others.

    header    magic · version · number of the step (low, high) · words of the body · CRC-32 of the body
    body      C · S · T · A · Q, then end to end: sources and targets of copies, token ids, tokens per chunk,
              starts, blocks per chunk, flags per chunk, rows to score, all block ids

A follower needs no more to do its part of the step than where tokens stand: what is drawn from them is rank 0's
affair. CRC-32 takes 31 µs for 140 kB, blake2b 177 µs; the buffer meets accidents, no adversary.

Shape legend in `bakehouse_replica.model.batch`; C counts copies of blocks.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bakehouse_replica.core.types import BlockCopy
from bakehouse_replica.model.batch import FlatChunks

Words = NDArray[np.int32]

_MAGIC = 0x6B_61_62_31
_VERSION = 1
HEADER_WORDS = 6
_N_COUNTS = 5
_WANTS_SAMPLE, _FOLLOWS_DRAW = 1, 2
_LOW_BITS = 31  # so that no word is negative


class ControlError(Exception):
    """A buffer that is not what rank 0 of the same version has sent, or not the one whose turn it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrder:
    """What a follower does: the copies, then a forward pass of the chunks (None: there are none)."""

    number: int
    copies: tuple[BlockCopy, ...]
    flat: FlatChunks | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What is known of an order before its body has come."""

    number: int
    n_words: int
    digest: int


def encode(order: StepOrder) -> Words:
    """The header and the body."""
    words = np.concatenate((np.empty(HEADER_WORDS, np.int32), *_body(order)))
    high, low = divmod(order.number, 1 << _LOW_BITS)
    words[:5] = (_MAGIC, _VERSION, low, high, len(words) - HEADER_WORDS)
    words.view(np.uint32)[5] = zlib.crc32(words[HEADER_WORDS:].data)
    return words


def read_header(words: Words) -> Header:
    """Raises `ControlError` where these are not the words of a header."""
    if len(words) != HEADER_WORDS:
        raise ControlError(f"a header of {len(words)} words, not {HEADER_WORDS}")
    magic, version, low, high, n_words = (int(word) for word in words[:5])
    if magic != _MAGIC:
        raise ControlError(f"the word {magic:#x} where {_MAGIC:#x} begins an order")
    if version != _VERSION:
        raise ControlError(f"an order in version {version}; this rank reads version {_VERSION}")
    if n_words < _N_COUNTS or low < 0 or high < 0:
        raise ControlError(f"an order of {n_words} words with the number {(low, high)}")
    return Header(number=(high << _LOW_BITS) + low, n_words=n_words, digest=int(words.view(np.uint32)[5]))


def decode(header: Header, body: Words, *, expected: int) -> StepOrder:
    """The order, whose arrays are views of `body`.

    Raises `ControlError` where it is damaged, short, or not the `expected` one's turn.
    """
    if header.number != expected:
        raise ControlError(f"step {header.number} came where step {expected} was expected")
    if len(body) != header.n_words:
        raise ControlError(f"step {header.number} has {len(body)} words, not {header.n_words}")
    digest = zlib.crc32(body.data)
    if digest != header.digest:
        raise ControlError(f"the digest of step {header.number} is {digest:#010x}, not {header.digest:#010x}")
    n_copies, n_chunks, n_tokens, n_blocks, n_scored = (int(count) for count in body[:_N_COUNTS])
    lengths = (n_copies, n_copies, n_tokens, *(n_chunks,) * 4, n_scored, n_blocks)
    assert _N_COUNTS + sum(lengths) == len(body), f"step {header.number}: counts {lengths} of {len(body)} words"
    ends = np.cumsum((_N_COUNTS, *lengths))
    source_C, target_C, token_ids_T, n_tokens_S, start_S, n_blocks_S, flags_S, score_at_Q, block_ids_A = (
        body[begin:end] for begin, end in pairwise(ends)
    )
    flat = FlatChunks(
        token_ids_T=token_ids_T,
        n_tokens_S=n_tokens_S,
        start_S=start_S,
        n_blocks_S=n_blocks_S,
        block_ids_A=block_ids_A,
        wants_sample_S=(flags_S & _WANTS_SAMPLE) != 0,
        follows_draw_S=(flags_S & _FOLLOWS_DRAW) != 0,
        score_at_Q=score_at_Q,
    )
    copies = tuple(
        BlockCopy(source=source, target=target)
        for source, target in zip(source_C.tolist(), target_C.tolist(), strict=True)
    )
    return StepOrder(number=header.number, copies=copies, flat=flat if n_chunks else None)


def _body(order: StepOrder) -> Sequence[Words]:
    flat = order.flat
    copies: Sequence[Words] = (
        np.array([copy.source for copy in order.copies], np.int32),
        np.array([copy.target for copy in order.copies], np.int32),
    )
    if flat is None:
        return (np.array((len(order.copies), 0, 0, 0, 0), np.int32), *copies)
    counts = (
        len(order.copies),
        len(flat.n_tokens_S),
        len(flat.token_ids_T),
        len(flat.block_ids_A),
        len(flat.score_at_Q),
    )
    flags_S = flat.wants_sample_S * np.int32(_WANTS_SAMPLE) + flat.follows_draw_S * np.int32(_FOLLOWS_DRAW)
    return (
        np.array(counts, np.int32),
        *copies,
        flat.token_ids_T,
        flat.n_tokens_S,
        flat.start_S,
        flat.n_blocks_S,
        flags_S,
        flat.score_at_Q,
        flat.block_ids_A,
    )
