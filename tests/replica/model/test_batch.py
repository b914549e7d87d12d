"""The batch builder: prefill and decode chunks, end to end, as index tensors."""

from dataclasses import replace
from random import Random

import torch
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Chunk, Sample, Score
from bakehouse_replica.model.batch import BatchTensors, build_batch, flatten

SAMPLE = Sample(params=SamplingParams(), seeds=(0,), output_index=0)


def batch_of(*chunks: Chunk, block_size: int = 4) -> BatchTensors:
    return build_batch(flatten(chunks), block_size=block_size, device=torch.device("cpu"))


def chunk(token_ids: tuple[int, ...], start: int, block_ids: tuple[int, ...], *, samples: bool = True) -> Chunk:
    return Chunk(
        sequence_id=0, token_ids=token_ids, start=start, block_ids=block_ids, sample=SAMPLE if samples else None
    )


def test_a_prefill_and_a_decode_chunk_stand_end_to_end() -> None:
    batch = batch_of(chunk((11, 12, 13), 3, (7, 2), samples=False), chunk((5,), 8, (4, 1, 9)))
    assert batch.token_ids_T.tolist() == [11, 12, 13, 5]
    assert batch.positions_T.tolist() == [3, 4, 5, 8]
    assert batch.slots_T.tolist() == [31, 8, 9, 36]
    assert batch.query_start_S1.tolist() == [0, 3, 4]
    assert batch.context_len_S.tolist() == [6, 9]
    assert batch.block_table_SB.tolist() == [[7, 2, 0], [4, 1, 9]]
    assert batch.sample_at_R.tolist() == [3]


def test_index_tensors_have_the_types_that_the_kernels_read() -> None:
    batch = batch_of(chunk((1,), 0, (0,)))
    assert {batch.token_ids_T.dtype, batch.positions_T.dtype, batch.slots_T.dtype, batch.sample_at_R.dtype} == {
        torch.int64
    }
    assert {batch.query_start_S1.dtype, batch.context_len_S.dtype, batch.block_table_SB.dtype} == {torch.int32}
    assert batch.block_table_SB.is_contiguous()


def test_no_row_is_sampled_where_no_chunk_asks() -> None:
    assert batch_of(chunk((1, 2), 0, (0,), samples=False)).sample_at_R.tolist() == []


def test_the_rows_that_score_are_listed_beside_those_that_are_sampled() -> None:
    plain = chunk((1, 2, 3, 4, 5), 0, (0, 1), samples=False)
    batch = batch_of(
        replace(plain, score=Score(first_row=0, target_ids=(2, 3, 4, 5, 6), n_top=0)),
        plain,
        chunk((7,), 3, (2,)),
        replace(chunk((1, 2, 3), 0, (3,)), score=Score(first_row=1, target_ids=(3,), n_top=2)),
    )
    assert batch.score_at_Q.tolist() == [0, 1, 2, 3, 4, 12]
    assert batch.sample_at_R.tolist() == [10, 13]
    assert batch_of(plain).score_at_Q.tolist() == []


def test_every_slot_lies_in_the_block_that_the_table_names_for_its_position() -> None:
    random = Random(7)
    chunks = []
    for _ in range(50):
        start, length = random.randrange(40), random.randrange(1, 20)
        n_blocks = -(-(start + length) // 16)
        chunks.append(chunk(tuple(range(length)), start, tuple(random.sample(range(1000), n_blocks))))
    batch = batch_of(*chunks, block_size=16)
    expected = [
        c.block_ids[p // 16] * 16 + p % 16 for c in chunks for p in range(c.start, c.start + len(c.token_ids))
    ]
    assert batch.slots_T.tolist() == expected


def test_flat_chunks_hold_what_the_chunks_say_in_arrays_that_can_cross_to_another_process() -> None:
    waiting = replace(chunk((0,), 8, (4, 1, 9)), follows_draw=True)
    flat = flatten((chunk((11, 12, 13), 3, (7, 2), samples=False), waiting))
    assert flat.token_ids_T.tolist() == [11, 12, 13, 0]
    assert flat.n_tokens_S.tolist() == [3, 1]
    assert flat.start_S.tolist() == [3, 8]
    assert flat.n_blocks_S.tolist() == [2, 3]
    assert flat.block_ids_A.tolist() == [7, 2, 4, 1, 9]
    assert flat.wants_sample_S.tolist() == [False, True]
    assert flat.follows_draw_S.tolist() == [False, True]
    assert {getattr(flat, name).dtype.name for name in flat.__slots__} == {"int32", "bool"}


def test_what_the_attention_plan_reads_stays_on_the_host() -> None:
    flat = flatten((chunk((1,), 0, (0,)),))
    batch = build_batch(flat, block_size=4, device=torch.device("meta"))
    host = {tensor.device.type for tensor in (batch.query_start_S1, batch.context_len_S, batch.block_table_SB)}
    device = {tensor.device.type for tensor in (batch.token_ids_T, batch.positions_T, batch.slots_T)}
    assert (host, device) == ({"cpu"}, {"meta"})
