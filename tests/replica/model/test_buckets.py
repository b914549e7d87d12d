"""Buckets of decode steps: which one serves a step, and what padding adds to it."""

import numpy as np
import pytest
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Chunk, Sample
from bakehouse_replica.model.batch import flatten, index_arrays
from bakehouse_replica.model.buckets import Buckets, buckets_of, padded, padding

SAMPLE = Sample(params=SamplingParams(), seeds=(0,), output_index=0)


@pytest.mark.parametrize(
    ("max_rows", "rows"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
    ],
)
def test_numbers_of_rows_double_and_then_grow_by_eight_up_to_the_largest(
    max_rows: int, rows: tuple[int, ...]
) -> None:
    assert buckets_of(max_rows=max_rows, max_blocks=1).rows == rows


@pytest.mark.parametrize(
    ("max_blocks", "widths"), [(1, (1,)), (128, (128,)), (129, (128, 129)), (8192, (128, 512, 2048, 8192))]
)
def test_widths_of_tables_grow_fourfold_up_to_the_longest_context(
    max_blocks: int, widths: tuple[int, ...]
) -> None:
    assert buckets_of(max_rows=1, max_blocks=max_blocks).widths == widths


def test_a_step_goes_to_the_least_bucket_with_room_for_it_and_to_none_beyond_the_largest() -> None:
    buckets = Buckets((1, 2, 4, 8), (16, 64))
    assert buckets.find(1, 1) == (1, 16)
    assert buckets.find(3, 16) == (4, 16)
    assert buckets.find(8, 17) == (8, 64)
    assert buckets.find(9, 1) is None
    assert buckets.find(1, 65) is None


def test_every_bucket_is_listed_once_the_largest_first() -> None:
    assert Buckets((1, 2), (16, 64)).falling() == ((2, 64), (1, 64), (2, 16), (1, 16))


def test_padding_stands_after_the_rows_in_slots_of_the_null_block_of_its_own() -> None:
    chunks = tuple(
        Chunk(sequence_id=s, token_ids=(7 + s,), start=5, block_ids=(s, 4 + s), sample=SAMPLE) for s in range(2)
    )
    flat = flatten(chunks)
    longer = padded(flat, 8, null_block=99, block_size=4)
    arrays = index_arrays(longer, 4)
    assert longer.token_ids_T.tolist() == [7, 8, 0, 0, 0, 0, 0, 0]
    assert arrays.slots_T.tolist() == [17, 21, 396, 397, 398, 399, 396, 397]
    assert arrays.context_len_S.tolist() == [6, 6, 1, 2, 3, 4, 1, 2]
    assert arrays.block_table_SB.tolist() == [[0, 4], [1, 5], *[[99, 0]] * 6]
    assert not longer.follows_draw_S.any()
    for name in flat.__slots__:
        array, padded_array = getattr(flat, name), getattr(longer, name)
        assert padded_array.dtype == array.dtype
        assert np.array_equal(padded_array[: len(array)], array)
    assert padded(flat, 2, null_block=99, block_size=4) is flat


def test_a_step_of_padding_alone_has_rows_of_the_null_block_only() -> None:
    arrays = index_arrays(padding(3, null_block=2, block_size=4), 4)
    assert arrays.slots_T.tolist() == [8, 9, 10]
    assert len(arrays.sample_at_R) == 3
