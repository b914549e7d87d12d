"""Tiles of ragged queries against their definition, and the independence of rows from what runs beside them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.triton.attention_batches import NAN, make_batch
from tests.kernels.triton.conftest import Close

RAGGED = ((7, 7), (1, 1), (0, 20), (19, 45), (1, 33))


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "dtype", "window", "softcap"),
    [
        ((2, 2), 64, 16, torch.float32, None, None),
        ((3, 1), 64, 32, torch.bfloat16, None, None),
        ((6, 2), 80, 16, torch.float32, 9, None),
        ((4, 1), 96, 32, torch.bfloat16, None, 0.5),
        ((8, 1), 128, 16, torch.float32, 1, 50.0),
        ((4, 1), 256, 32, torch.bfloat16, 30, 2.0),
        ((2, 1), 17, 7, torch.float32, 1000, None),
    ],
)
def test_attention_equals_its_definition(
    close: Close,
    generator: torch.Generator,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
) -> None:
    batch = make_batch(
        generator,
        RAGGED,
        heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        window=window,
        softcap=softcap,
    )
    assert batch.q_TND.shape[1] == 1 or not batch.q_TND.is_contiguous()
    close(batch.attend(), batch.expected())


@pytest.mark.parametrize("window", [None, 2, 16, 17, 40])
def test_a_row_has_the_same_bits_in_any_chunk_of_several_rows(
    close: Close, generator: torch.Generator, window: int | None
) -> None:
    whole = make_batch(generator, ((37, 53),), heads=(1, 1), window=window)
    result = whole.attend()
    close(result, whole.expected())
    for first, after in ((0, 2), (2, 19), (19, 37)):
        assert whole.only(0, slice(first, after)).attend().equal(result[first:after]), f"rows {first} to {after}"


def test_a_row_has_the_same_bits_with_any_neighbours(generator: torch.Generator) -> None:
    together = make_batch(generator, RAGGED)
    result = together.attend()
    for s in range(len(RAGGED)):
        start, end = together.query_start_S1[s : s + 2].tolist()
        assert together.only(s).attend().equal(result[start:end]), f"chunk {s}"


@settings(max_examples=12)
@given(
    chunks=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 90)), max_size=5),
    group=st.sampled_from([1, 3, 4]),
    n_shared_blocks=st.integers(0, 3),
    window=st.none() | st.integers(1, 100),
)
def test_any_row_of_any_batch_has_the_bits_that_its_chunk_gives_it_alone(
    chunks: list[tuple[int, int]], group: int, n_shared_blocks: int, window: int | None
) -> None:
    together = make_batch(
        torch.Generator().manual_seed(1),
        tuple((n_rows, n_rows + n_before) for n_rows, n_before in chunks),
        heads=(group, 1),
        n_shared_blocks=n_shared_blocks,
        window=window,
        split_tokens=32,
    )
    result = together.attend()
    torch.testing.assert_close(result, together.expected())
    for s in range(len(chunks)):
        start, end = together.query_start_S1[s : s + 2].tolist()
        assert together.only(s).attend().equal(result[start:end]), f"chunk {s}"


def test_large_scores_neither_overflow_nor_lose_the_winner(close: Close, generator: torch.Generator) -> None:
    batch = make_batch(generator, ((20, 40), (1, 40)))
    batch.q_TND.mul_(300.0)
    # Scores near 1000 are known to 2^-24 of themselves, and weights to no better.
    close(batch.attend(), batch.expected(), absolute=1e-3)


def test_a_nan_reaches_exactly_the_rows_that_see_it(generator: torch.Generator) -> None:
    batch = make_batch(generator, ((20, 20), (1, 20)), heads=(4, 2), window=8)
    block = int(batch.block_table_SB[0, 0])
    batch.cache.key[1][block, 1, 5] = NAN
    is_wrong_TN = ~batch.attend().isfinite().all(dim=2)
    expected_TN = torch.zeros(21, 4, dtype=torch.bool)
    expected_TN[5:13, 2:] = True  # key head 1 serves query heads 2 and 3
    assert is_wrong_TN.equal(expected_TN)


def test_a_value_before_every_window_reaches_nobody(generator: torch.Generator) -> None:
    # The windows begin at 33, within a tile of 16 keys.
    batch = make_batch(generator, ((2, 42), (1, 41)), window=8)
    expected = batch.attend()
    for s in range(2):
        block = int(batch.block_table_SB[s, 2])
        batch.cache.value[1][block, :, 0] = NAN
        batch.cache.key[1][block, :, 0] = NAN
    assert batch.attend().equal(expected)


def test_no_rows_give_no_rows(generator: torch.Generator) -> None:
    for chunks in ((), ((0, 0),), ((0, 20), (0, 3))):
        assert make_batch(generator, chunks).attend().shape == (0, 3, 16)


def test_inputs_are_left_as_they_were(generator: torch.Generator) -> None:
    batch = make_batch(generator, ((9, 20), (1, 9)))
    indices = (batch.block_table_SB, batch.query_start_S1, batch.context_len_S)
    inputs = (batch.q_TND, batch.cache.key[1], batch.cache.value[1], *indices)
    before = [tensor.clone() for tensor in inputs]
    batch.attend()
    for tensor, copy in zip(inputs, before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


def test_heads_without_tiles_are_refused(generator: torch.Generator) -> None:
    with pytest.raises(ValueError, match="head dimension is 8; the kernels serve 16 to 256"):
        make_batch(generator, ((1, 1),), head_dim=8).attend()
    with pytest.raises(ValueError, match="17 query heads to a key head; the kernels serve up to 16"):
        make_batch(generator, ((1, 1),), heads=(17, 1)).attend()


def test_a_plan_serves_its_own_rows_and_block_size_alone(generator: torch.Generator) -> None:
    batch = make_batch(generator, ((3, 20),))
    with pytest.raises(AssertionError, match="a plan for 3 rows, not 2"):
        replace(batch, q_TND=batch.q_TND[:2]).attend(batch.plan())
    cache = replace(batch.cache, block_size=8)
    with pytest.raises(AssertionError, match="a plan for blocks of 16"):
        replace(batch, cache=cache).attend(batch.plan())
