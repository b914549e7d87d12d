"""Decode rows whose contexts are attended split by split: against their definition, and each row for itself."""

from dataclasses import replace

import pytest
import torch
from bakehouse_kernels.triton.attention_plan import plan_attention

from tests.kernels.triton.attention_batches import CPU, make_batch
from tests.kernels.triton.conftest import Close

# One token, one split (of 64 tokens) less one, full, one more, many with a short last one, and of full ones alone.
DECODE = ((1, 1), (1, 63), (1, 64), (1, 65), (1, 261), (1, 192))


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "dtype", "window", "softcap"),
    [
        ((1, 1), 64, 16, torch.float32, None, None),
        ((3, 1), 80, 32, torch.bfloat16, None, None),
        ((4, 1), 16, 16, torch.float32, 1, None),
        ((8, 1), 96, 32, torch.bfloat16, 64, 0.5),
        ((4, 2), 64, 16, torch.float32, 100, 50.0),
        ((16, 1), 128, 16, torch.bfloat16, 1000, None),
        ((2, 1), 256, 7, torch.float32, 65, None),
    ],
)
def test_decode_equals_its_definition(
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
        DECODE,
        heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        window=window,
        softcap=softcap,
        split_tokens=64,
    )
    close(batch.attend(), batch.expected())


@pytest.mark.parametrize("window", [None, 70])
def test_a_row_has_the_same_bits_with_any_neighbours(generator: torch.Generator, window: int | None) -> None:
    together = make_batch(generator, (*DECODE, (9, 40)), window=window, split_tokens=64)
    result = together.attend()
    for s in range(len(DECODE)):
        assert together.only(s).attend().equal(result[s : s + 1]), f"chunk {s}"


def test_splits_are_as_long_as_asked_whatever_the_batch(generator: torch.Generator) -> None:
    batch = make_batch(generator, ((1, 129), (1, 20)), split_tokens=64)
    finer = replace(batch, split_tokens=32)
    assert batch.plan().max_splits == 3
    assert finer.plan().max_splits == 6
    torch.testing.assert_close(batch.attend(), finer.attend())


def test_without_a_number_splits_are_as_long_as_the_launch_table_says(generator: torch.Generator) -> None:
    batch = make_batch(generator, ((1, 20),))
    plan = plan_attention(
        batch.block_table_SB, batch.query_start_S1, batch.context_len_S, block_size=16, device=CPU
    )
    assert plan.split_tokens == 64


def test_a_split_whose_scores_are_far_below_the_others_weighs_nothing(
    close: Close, generator: torch.Generator
) -> None:
    batch = make_batch(generator, ((1, 200),), split_tokens=64)
    batch.q_TND.abs_()
    first_blocks = batch.block_table_SB[0, :8].long()
    batch.cache.key[1][first_blocks] = -100.0
    close(batch.attend(), batch.expected())
