"""Blocks within a memory budget, and a refusal with the numbers where one sequence does not fit."""

import pytest
from bakehouse_replica.core.capacity import KVShape, blocks_for, format_bytes, plan_blocks
from bakehouse_replica.core.errors import StartupError

# 2 (keys, values) * 30 layers * 3 heads * 64 * 4 bytes = 46,080 bytes a token
SHAPE = KVShape(n_layers=30, n_kv_heads=3, head_dim=64, element_bytes=4, block_size=16)


def test_a_block_holds_keys_and_values_of_all_layers() -> None:
    assert SHAPE.block_bytes == 46_080 * 16


@pytest.mark.parametrize(("n_tokens", "expected"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2)])
def test_a_partly_filled_block_counts_whole(n_tokens: int, expected: int) -> None:
    assert blocks_for(n_tokens, 16) == expected


def test_the_budget_is_never_exceeded() -> None:
    assert plan_blocks(SHAPE, budget_bytes=100 * SHAPE.block_bytes, max_model_len=16) == 100
    assert plan_blocks(SHAPE, budget_bytes=100 * SHAPE.block_bytes - 1, max_model_len=16) == 99


def test_c31_a_context_beyond_the_budget_names_both_and_the_largest_that_fits() -> None:
    budget_bytes = 3664 * 46_080
    with pytest.raises(StartupError) as refusal:
        plan_blocks(SHAPE, budget_bytes=budget_bytes, max_model_len=4096)
    for part in ("4096 tokens", "holds 3664 tokens", "--max-model-len to 3664", "180 MiB", "161 MiB", "18.98 MiB"):
        assert part in refusal.value.message


def test_c31_a_context_that_fits_exactly_starts() -> None:
    assert plan_blocks(SHAPE, budget_bytes=3664 * 46_080, max_model_len=3664) == 229


def test_a_budget_without_a_single_block_advises_no_context() -> None:
    with pytest.raises(StartupError, match="holds 0 tokens: raise --kv-memory by 704"):
        plan_blocks(SHAPE, budget_bytes=16 * 1024, max_model_len=1)


@pytest.mark.parametrize(
    ("n_bytes", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1024**2, "1 MiB"), (5 * 1024**4, "5120 GiB")],
)
def test_bytes_are_written_for_people(n_bytes: int, expected: str) -> None:
    assert format_bytes(n_bytes) == expected
