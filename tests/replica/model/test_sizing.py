"""How a replica divides memory, decided before any weight is loaded."""

from pathlib import Path
from typing import Literal

import psutil
import pytest
import torch
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.model.sizing import (
    MemoryPlan,
    _container_bytes,
    available_memory_bytes,
    choose_max_model_len,
    plan_memory,
)
from bakehouse_replica.model.spec import ModelSpec

MIB = 1024**2
SPEC = ModelSpec(  # the shape of SmolLM2-135M
    n_layers=30,
    hidden_size=576,
    n_heads=9,
    n_kv_heads=3,
    head_dim=64,
    feed_forward_size=1536,
    vocabulary_size=49152,
    context_length=8192,
    norm_eps=1e-5,
    rope_frequencies=(1.0,) * 32,
    has_tied_head=True,
)
TOKEN_BYTES = 2 * 30 * 3 * 64 * 4


def plan(
    *,
    available_mib: int,
    kv_mib: int | None = None,
    max_model_len: int = 1024,
    dtype: torch.dtype = torch.float32,
    quantize: Literal["none", "int8"] = "none",
    kv_dtype: torch.dtype = torch.float32,
) -> MemoryPlan:
    return plan_memory(
        SPEC,
        dtype=dtype,
        quantize=quantize,
        kv_dtype=kv_dtype,
        block_size=16,
        max_model_len=max_model_len,
        kv_memory_bytes=None if kv_mib is None else kv_mib * MIB,
        available_bytes=available_mib * MIB,
    )


def test_by_default_the_cache_takes_at_most_one_gib() -> None:
    chosen = plan(available_mib=64 * 1024)
    assert 1023 * MIB < chosen.kv_bytes <= 1024 * MIB
    assert chosen.kv_bytes == chosen.n_blocks * 16 * TOKEN_BYTES
    assert chosen.weight_bytes == pytest.approx((134_515_008 + 49_152 * 576) * 4, rel=1e-3)


def test_by_default_the_cache_takes_a_quarter_of_what_the_weights_leave() -> None:
    chosen = plan(available_mib=2048)
    left = 2048 * MIB - chosen.weight_bytes - 768 * MIB
    assert left / 4 - 16 * TOKEN_BYTES < chosen.kv_bytes <= left / 4


def test_an_asked_amount_is_taken_as_it_is() -> None:
    assert plan(available_mib=8192, kv_mib=2000).kv_bytes == pytest.approx(2000 * MIB, rel=1e-3)


def test_half_precision_halves_the_packed_weights_alone() -> None:
    single, half = plan(available_mib=8192, kv_mib=512), plan(available_mib=8192, kv_mib=512, dtype=torch.bfloat16)
    embedding_bytes = 49_152 * 576 * 4
    assert (half.weight_bytes - embedding_bytes) * 2 == single.weight_bytes - embedding_bytes
    assert half.n_blocks == single.n_blocks


def test_keys_and_values_in_16_bits_take_half_as_much() -> None:
    single, half = (
        plan(available_mib=8192, kv_mib=512),
        plan(available_mib=8192, kv_mib=512, kv_dtype=torch.float16),
    )
    assert half.weight_bytes == single.weight_bytes
    assert half.n_blocks in (2 * single.n_blocks, 2 * single.n_blocks + 1)


def test_int8_keeps_the_embedding_wide_and_a_scale_and_a_sum_for_each_output() -> None:
    chosen = plan(available_mib=8192, kv_mib=512, quantize="int8")
    n_outputs = 30 * (15 * 64 + 576 + 2 * 1536 + 576) + 49_152
    n_norms = 61 * 576  # in the model's 134,515,008 numbers, but not in a plan
    assert chosen.weight_bytes == 49_152 * 576 * 4 + (134_515_008 - n_norms) + n_outputs * 8
    assert chosen.n_blocks == plan(available_mib=8192, kv_mib=512).n_blocks


@pytest.mark.parametrize(("available_mib", "kv_mib"), [(600, None), (4096, 3000)])
def test_too_little_memory_is_refused_with_the_numbers(available_mib: int, kv_mib: int | None) -> None:
    with pytest.raises(StartupError, match=r"too little memory: .* are available, but the weights take 621 MiB"):
        plan(available_mib=available_mib, kv_mib=kv_mib)


def test_c31_a_context_beyond_the_cache_is_refused_with_the_largest_that_fits() -> None:
    with pytest.raises(
        StartupError, match=r"a context of 8192 tokens needs 360 MiB .* lower --max-model-len to 2272"
    ):
        plan(available_mib=8192, kv_mib=100, max_model_len=8192)


def test_the_models_own_context_length_is_default_and_limit() -> None:
    assert choose_max_model_len(SPEC.context_length, None) == 8192
    assert choose_max_model_len(SPEC.context_length, 8192) == 8192
    for asked in (0, 1, 8193):
        with pytest.raises(StartupError, match=f"--max-model-len is {asked}; it must be from 2 to .* 8192"):
            choose_max_model_len(SPEC.context_length, asked)


def test_a_container_counts_its_own_limit(tmp_path: Path) -> None:
    def container(limit: str) -> int:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("700\n")
        (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 150\nactive_file 90\n")
        return _container_bytes(tmp_path, 9000)

    assert container("1000") == 450
    assert container("500") == 0
    assert container("max") == 9000
    assert _container_bytes(tmp_path / "none", 9000) == 9000


def test_what_is_available_is_no_more_than_the_machine_has() -> None:
    assert 0 < available_memory_bytes() <= psutil.virtual_memory().total
