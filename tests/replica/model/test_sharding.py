"""All ranks' parts together are the whole model, each once, and a rank reads and keeps no more than its own."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.model.sharding import (
    UNDIVIDED,
    Shard,
    check_sizes,
    cut,
    local_spec,
    own_ranges,
    own_tokens,
)
from bakehouse_replica.model.spec import ModelSpec, read_spec
from bakehouse_replica.model.weights import DecoderWeights, convert, load_weights
from decoding import CPU, open_model
from tiny_llama import write_tiny_llama
from torch import Tensor

EVERY_BIAS: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
# Lengths that no size divides, so that shares differ.
UNEVEN: dict[str, Any] = {"intermediate_size": 97, "vocab_size": 321}


def spec_of(n_heads: int, n_kv_heads: int) -> ModelSpec:
    return ModelSpec(
        n_layers=1,
        hidden_size=576,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=64,
        feed_forward_size=1536,
        vocabulary_size=49152,
        context_length=64,
        norm_eps=1e-5,
        rope_frequencies=(1.0,) * 32,
    )


@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "fitting"),
    [
        (9, 3, {1, 3, 9}),  # SmolLM2-135M
        (32, 8, {1, 2, 4, 8, 16, 32}),  # Llama-3-8B
        (12, 4, {1, 2, 4, 12}),  # of 6 ranks, one would have query heads of two key heads
        (7, 1, {1, 7}),
        (1, 1, {1}),
    ],
    ids=str,
)
def test_a_size_is_refused_that_does_not_divide_the_heads_and_those_that_do_are_named(
    n_heads: int, n_kv_heads: int, fitting: set[int]
) -> None:
    spec = spec_of(n_heads, n_kv_heads)
    for size in range(1, 2 * n_heads + 2):
        if size in fitting:
            check_sizes(spec, size)
            continue
        with pytest.raises(StartupError, match=f"--tensor-parallel is {size}, ") as refused:
            check_sizes(spec, size)
        named = refused.value.message.split("; ")[1].replace("only", "").replace("or", ",").split("would")[0]
        assert {int(number) for number in named.split(",") if number.strip()} == fitting


def test_query_heads_stand_beside_the_key_heads_that_they_read() -> None:
    spec = spec_of(n_heads=9, n_kv_heads=3)
    for size in (3, 9):
        for rank in range(size):
            shard = Shard(rank, size)
            local, found = local_spec(spec, shard), own_ranges("qkv_EX", spec, shard)
            assert found is not None
            query, key, value = found[1]
            assert (len(query), len(key), len(value)) == (9 // size * 64, 64, 64)
            assert (local.n_heads, local.n_kv_heads) == (9 // size, 1)
            key_head = query.start // 64 // 3
            assert (key.start, value.start) == (9 * 64 + key_head * 64, 12 * 64 + key_head * 64)


def pieced_together(name: str, whole: Tensor, spec: ModelSpec, size: int) -> Tensor:
    """What all ranks hold of a weight, put where it belongs; each copy of a key head must be the same."""
    together = torch.full_like(whole, torch.nan)
    for rank in range(size):
        shard = Shard(rank, size)
        part = cut(name, whole, spec, shard)
        found = own_ranges(name, spec, shard)
        assert part is not None
        if found is None:
            assert torch.equal(part, whole)
            return part
        axis, ranges = found
        begin = 0
        for own in ranges:
            piece = part.narrow(axis, begin, len(own))
            there = together.narrow(axis, own.start, len(own))
            is_copy = name.startswith("qkv") and size > spec.n_kv_heads
            assert there.isnan().all() or (is_copy and torch.equal(there, piece))
            there.copy_(piece)
            begin += len(own)
        assert begin == part.shape[axis]
    return together


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("changes", [EVERY_BIAS, EVERY_BIAS | UNEVEN], ids=["even", "uneven"])
def test_the_parts_of_all_ranks_are_the_whole_model(changes: dict[str, Any], size: int, tmp_path: Path) -> None:
    files = open_model(write_tiny_llama(tmp_path / "model", **changes), tmp_path / "cache")
    spec = read_spec(files)
    for name, whole in convert(files, spec, dtype=torch.float32).items():
        field = name.rpartition(".")[2]
        if field in ("output_bias_E", "down_bias_E"):  # added once
            parts = [cut(field, whole, spec, Shard(rank, size)) for rank in range(size)]
            assert parts[0] is not None
            assert torch.equal(parts[0], whole)
            assert parts[1:] == [None] * (size - 1)
            continue
        assert torch.equal(pieced_together(field, whole, spec, size), whole), name


@pytest.mark.parametrize(("length", "size"), [(320, 4), (321, 4), (1536, 9), (49152, 9), (10, 7), (31, 2)])
def test_shares_differ_by_no_more_than_a_tile(length: int, size: int) -> None:
    shares = [own_tokens(length, Shard(rank, size)) for rank in range(size)]
    assert [token for share in shares for token in share] == list(range(length))
    widths = sorted(len(share) for share in shares)
    assert widths[0] > 0
    assert widths[-1] - widths[0] <= 16


def tensors_of(weights: DecoderWeights) -> dict[str, Tensor]:
    parts = {
        "embedding_VE": weights.embedding_VE,
        "final_norm_E": weights.final_norm_E,
        "head_VE": weights.head_VE,
    }
    for index, layer in enumerate(weights.layers):
        for field in fields(layer):
            weight = getattr(layer, field.name)
            if weight is not None:
                parts[f"layers.{index}.{field.name}"] = weight
    return parts


@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("is_cached", [True, False], ids=["cached", "uncached"])
def test_a_rank_loads_its_part_and_keeps_nothing_else(is_cached: bool, rotated: bool, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", **EVERY_BIAS)
    files = open_model(model, tmp_path / "cache")
    spec = read_spec(files)
    if not is_cached:  # no folder can be made where a file is
        files = replace(files, cache_dir=model / "config.json")
    whole = convert(files, spec, dtype=torch.float32, rotated=rotated)
    for rank in range(2):
        shard = Shard(rank, 2)
        loaded = tensors_of(
            load_weights(files, spec, dtype=torch.float32, device=CPU, rotated=rotated, shard=shard)
        )
        expected = {name: cut(name.rpartition(".")[2], tensor, spec, shard) for name, tensor in whole.items()}
        assert loaded.keys() == {name for name, part in expected.items() if part is not None}
        for name, tensor in loaded.items():
            part = expected[name]
            assert part is not None
            assert torch.equal(tensor, part), name
            assert tensor.untyped_storage().nbytes() == part.numel() * 4, name


def test_an_undivided_model_is_one_rank_s_part_of_itself() -> None:
    spec = spec_of(n_heads=9, n_kv_heads=3)
    assert local_spec(spec, UNDIVIDED) == spec
