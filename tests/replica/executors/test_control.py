"""Orders arrive as they were sent, or are refused by what is wrong with them."""

from dataclasses import fields, replace
from random import Random

import numpy as np
import pytest
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import BlockCopy, Chunk, Sample, Score
from bakehouse_replica.executors.control import (
    HEADER_WORDS,
    ControlError,
    StepOrder,
    Words,
    decode,
    encode,
    read_header,
)
from bakehouse_replica.model.batch import FlatChunks, flatten

SAMPLE = Sample(params=SamplingParams(), seeds=(0,), output_index=0)


def random_order(random: Random, number: int) -> StepOrder:
    chunks = []
    for index in range(random.randint(0, 5)):
        n_tokens, start = random.randint(1, 9), random.randint(0, 40)
        chunks.append(
            Chunk(
                sequence_id=index,
                token_ids=tuple(random.choices(range(50_000), k=n_tokens)),
                start=start,
                block_ids=tuple(random.sample(range(1 << 30), (start + n_tokens - 1) // 4 + 1)),
                sample=random.choice((SAMPLE, None)),
                score=random.choice((Score(first_row=0, target_ids=(1,) * n_tokens, n_top=0), None)),
                follows_draw=n_tokens == 1 and random.random() < 0.5,
            )
        )
    copies = tuple(BlockCopy(source=random.randrange(99), target=100 + n) for n in range(random.randint(0, 3)))
    return StepOrder(number=number, copies=copies, flat=flatten(tuple(chunks)) if chunks else None)


def read(words: Words, expected: int) -> StepOrder:
    return decode(read_header(words[:HEADER_WORDS]), words[HEADER_WORDS:], expected=expected)


def assert_equal(left: FlatChunks | None, right: FlatChunks | None) -> None:
    assert (left is None) == (right is None)
    if left is not None:
        for field in fields(left):
            one, other = getattr(left, field.name), getattr(right, field.name)
            assert one.dtype == other.dtype, field.name
            assert one.tolist() == other.tolist(), field.name


@pytest.mark.parametrize("number", [1, 2**31 - 1, 2**31, 5 * 2**40 + 3])
def test_an_order_arrives_as_it_was_sent(number: int) -> None:
    for seed in range(60):
        order = random_order(Random(seed), number)
        arrived = read(encode(order), number)
        assert (arrived.number, arrived.copies) == (order.number, order.copies)
        assert_equal(arrived.flat, order.flat)


def test_no_word_can_change_unnoticed() -> None:
    words = encode(random_order(Random(3), 7))
    for place in range(len(words)):
        for bit in (0, 13, 31):
            damaged = words.copy()
            damaged.view(np.uint32)[place] ^= np.uint32(1 << bit)
            with pytest.raises(ControlError):
                read(damaged, 7)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 5, "0x5 where 0x"),
        (1, 9, "version 9; this rank reads version 1"),
        (2, 8, "step 8 came where step 7 was expected"),
        (5, 1, "the digest of step 7 is 0x[0-9a-f]{8}, not 0x00000001"),
        (HEADER_WORDS + 9, 12345, "the digest of step 7"),
    ],
)
def test_what_is_wrong_is_named(place: int, value: int, message: str) -> None:
    words = encode(random_order(Random(3), 7))
    words[place] = value
    with pytest.raises(ControlError, match=message):
        read(words, 7)


def test_short_orders_are_refused() -> None:
    words = encode(random_order(Random(3), 7))
    with pytest.raises(ControlError, match=f"step 7 has {len(words) - HEADER_WORDS - 1} words, not"):
        read(words[:-1], 7)
    with pytest.raises(ControlError, match="a header of 3 words"):
        read_header(words[:3])


@pytest.mark.parametrize("expected", [6, 8])
def test_an_order_out_of_turn_is_refused(expected: int) -> None:
    order = replace(random_order(Random(4), 7))
    with pytest.raises(ControlError, match=f"step 7 came where step {expected} was expected"):
        read(encode(order), expected)
