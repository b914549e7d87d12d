"""Weights from every kind of file are the same weights, and converting them is safe to repeat and to interrupt."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.model.spec import read_spec
from bakehouse_replica.model.weights import DecoderWeights, load_weights
from decoding import CPU, assert_logits_equal, load, open_model, paged_logits
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from tiny_llama import random_model, tiny_config, write_tiny_llama
from torch import Tensor

SEQUENCES = [[5, 9, 200, 31, 7, 7, 18], [300, 2, 3]]


def assert_same(left: DecoderWeights, right: DecoderWeights) -> None:
    assert torch.equal(left.head_VE, right.head_VE)
    for one, other in zip(left.layers, right.layers, strict=True):
        assert torch.equal(one.qkv_EX, other.qkv_EX)
        assert torch.equal(one.down_FE, other.down_FE)


def test_matrices_are_contiguous_from_input_to_output(tiny_llama_folder: Path, tmp_path: Path) -> None:
    spec, weights = load(open_model(tiny_llama_folder, tmp_path))
    state = load_file(tiny_llama_folder / "model.safetensors")
    layer = weights.layers[1]
    width = (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_dim
    assert layer.qkv_EX.shape == (spec.hidden_size, width)
    assert layer.gate_up_EF2.is_contiguous()
    assert torch.equal(layer.down_FE.t(), state["model.layers.1.mlp.down_proj.weight"])
    assert weights.head_VE is weights.embedding_VE


def test_shards_give_the_same_weights_as_one_file(tiny_llama_folder: Path, tmp_path: Path) -> None:
    sharded = write_tiny_llama(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert_same(
        load(open_model(sharded, tmp_path / "one"))[1], load(open_model(tiny_llama_folder, tmp_path / "two"))[1]
    )


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "attention_bias": True}], ids=str)
def test_a_gguf_file_with_interleaved_heads_gives_transformers_logits(
    changes: dict[str, object], tmp_path: Path
) -> None:
    model = random_model(tiny_config(**changes))
    path = write_gguf(tmp_path / "tiny.gguf", model)
    spec, weights = load(open_model(path, tmp_path / "cache"))
    assert_logits_equal(paged_logits(spec, weights, SEQUENCES, [3, 1]), model, SEQUENCES, 1e-4)


def test_quantised_matrices_become_the_numbers_they_stand_for(tmp_path: Path) -> None:
    model = random_model(tiny_config())
    kind = GGMLQuantizationType.Q8_0
    spec, weights = load(open_model(write_gguf(tmp_path / "q8.gguf", model, quantization=kind), tmp_path))
    assert spec.has_tied_head
    original = model.state_dict()["model.layers.0.mlp.down_proj.weight"].numpy()
    expected = torch.from_numpy(dequantize(quantize(original, kind), kind))
    assert torch.equal(weights.layers[0].down_FE, expected.t())
    assert not torch.equal(weights.layers[0].down_FE, torch.from_numpy(original).t())


def test_rope_factors_of_a_gguf_file_divide_the_frequencies(tmp_path: Path) -> None:
    factors = tuple(1.0 + pair for pair in range(8))
    model = random_model(tiny_config())
    plain = read_spec(open_model(write_gguf(tmp_path / "plain.gguf", model), tmp_path))
    scaled_files = open_model(write_gguf(tmp_path / "scaled.gguf", model, rope_factors=factors), tmp_path)
    scaled, _ = load(scaled_files)
    pairs = zip(plain.rope_frequencies, factors, strict=True)
    assert scaled.rope_frequencies == tuple(frequency / factor for frequency, factor in pairs)
    assert read_spec(scaled_files) == scaled  # now from the cached metadata


def test_a_second_start_needs_only_the_cache(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    files = open_model(folder, tmp_path / "cache")
    spec, first = load(files)
    (folder / "model.safetensors").unlink()
    assert_same(first, load_weights(files, spec, dtype=torch.float32, device=CPU))


def test_each_dtype_has_a_cache_of_its_own(tiny_llama_folder: Path, tmp_path: Path) -> None:
    files = open_model(tiny_llama_folder, tmp_path)
    spec, exact = load(files)
    rounded = load_weights(files, spec, dtype=torch.bfloat16, device=CPU)
    assert torch.equal(rounded.layers[0].qkv_EX, exact.layers[0].qkv_EX.bfloat16())
    assert load(files)[1].layers[0].qkv_EX.dtype is torch.float32


def test_a_damaged_cache_is_made_again_and_leftovers_of_a_killed_start_go(
    tiny_llama_folder: Path, tmp_path: Path
) -> None:
    files = open_model(tiny_llama_folder, tmp_path)
    _, first = load(files)
    cached = next(files.cache_dir.glob("weights-*.safetensors"))
    half = cached.read_bytes()[:1000]
    cached.unlink()  # not shortened in place: `first` still reads the mapped file
    cached.write_bytes(half)
    (files.cache_dir / f".{cached.name}.leftover").write_bytes(b"half")
    assert_same(first, load(files)[1])
    assert_same(first, load(files)[1])
    assert not list(files.cache_dir.glob(".*leftover"))


def test_a_cache_that_cannot_be_written_does_not_stop_the_start(tiny_llama_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("a file where the cache folder should be")
    files = open_model(tiny_llama_folder, tmp_path / "occupied")
    assert_same(load(files)[1], load(open_model(tiny_llama_folder, tmp_path / "cache"))[1])


def test_of_two_replicas_that_start_together_one_converts(tiny_llama_folder: Path, tmp_path: Path) -> None:
    files = open_model(tiny_llama_folder, tmp_path)
    spec = read_spec(files)
    barrier = Barrier(2)
    shares: list[float] = []

    def start(_: int) -> DecoderWeights:
        barrier.wait(timeout=10)
        return load_weights(files, spec, dtype=torch.float32, device=CPU, on_progress=shares.append)

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(start, range(2))
    assert_same(one, other)
    assert shares == [0.5, 1.0]
    assert [path.suffix for path in files.cache_dir.iterdir() if path.name.startswith(".")] == []


def _without_a_norm(state: dict[str, Tensor]) -> None:
    del state["model.norm.weight"]


def _with_a_query_norm(state: dict[str, Tensor]) -> None:
    state["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)


def _with_a_narrow_projection(state: dict[str, Tensor]) -> None:
    state["model.layers.1.mlp.up_proj.weight"] = torch.zeros(95, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_a_norm, "lack model.norm.weight"),
        (_with_a_query_norm, "no place in this decoder, such as model.layers.0.self_attn.q_norm.weight"),
        (_with_a_narrow_projection, r"model.layers.1.mlp.up_proj.weight has shape \(95, 64\).* says \(96, 64\)"),
    ],
)
def test_weights_that_do_not_fit_the_configuration_are_refused_by_name(
    change: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path
) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartupError, match=message):
        load(open_model(folder, tmp_path / "cache"))


def test_an_output_head_that_the_configuration_ties_is_not_used(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "untied", tie_word_embeddings=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    _, weights = load(open_model(folder, tmp_path / "cache"))
    assert weights.head_VE is weights.embedding_VE
