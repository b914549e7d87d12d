"""What of a GPU's memory becomes cache: arithmetic on what was measured."""

from dataclasses import replace

import pytest
from bakehouse_replica.core.capacity import KVShape
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.model.device_sizing import DeviceMemory, graph_bytes_of, plan_device_blocks

GIB = 1024**3
SHAPE = KVShape(n_layers=32, n_kv_heads=8, head_dim=128, element_bytes=2, block_size=16)  # 2 MiB a block
MEMORY = DeviceMemory(total_bytes=140 * GIB, free_bytes=120 * GIB, step_bytes=2 * GIB, graph_bytes=1 * GIB)


def test_the_cache_takes_what_step_recordings_and_margin_leave_less_the_null_block() -> None:
    assert MEMORY.margin_bytes == int(140 * GIB * 0.02)
    n_blocks = plan_device_blocks(SHAPE, MEMORY, kv_memory_bytes=None, max_model_len=8192)
    left = 120 * GIB - 3 * GIB - MEMORY.margin_bytes
    assert n_blocks == left // SHAPE.block_bytes - 1


def test_a_small_device_keeps_half_a_gibibyte_free() -> None:
    assert replace(MEMORY, total_bytes=8 * GIB).margin_bytes == GIB // 2


def test_a_budget_that_is_asked_for_is_kept_null_block_included() -> None:
    assert plan_device_blocks(SHAPE, MEMORY, kv_memory_bytes=GIB, max_model_len=4096) == 511


def test_a_budget_beyond_what_is_left_is_refused_with_the_numbers() -> None:
    with pytest.raises(StartupError, match=r"120 GiB are free .* step takes 2 GiB, recordings 1 GiB .* 119 GiB"):
        plan_device_blocks(SHAPE, MEMORY, kv_memory_bytes=119 * GIB, max_model_len=8192)


def test_a_cache_too_small_for_one_sequence_is_refused() -> None:
    crowded = replace(MEMORY, free_bytes=6 * GIB)
    with pytest.raises(StartupError, match="a context of 131072 tokens needs 16 GiB"):
        plan_device_blocks(SHAPE, crowded, kv_memory_bytes=None, max_model_len=131072)


def test_a_device_with_less_than_a_step_takes_has_nothing_left() -> None:
    assert replace(MEMORY, free_bytes=GIB).left_bytes == 0


@pytest.mark.parametrize(("n_graphs", "n_bytes"), [(1, 100), (2, 107), (35, 338)])
def test_recordings_take_what_the_first_takes_and_the_second_for_each_other(n_graphs: int, n_bytes: int) -> None:
    assert graph_bytes_of(n_graphs, first_bytes=100, second_bytes=7) == n_bytes
