"""Dummy weights: any shape from a config.json alone, finite and always the same."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bakehouse_kernels.reference import ReferenceOps
from bakehouse_replica.build import build_engine
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.core.types import ModelSource
from bakehouse_replica.model.dummy_weights import dummy_tensors
from bakehouse_replica.model.sharding import Shard
from bakehouse_replica.model.spec import read_spec
from bakehouse_replica.model.weights import convert, load_weights
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_replica.source import ModelFiles, open_source
from bakehouse_replica.tokenizer_files import load_tokenizer
from decoding import paged_logits
from tiny_llama import random_model, tiny_config
from transformers import PreTrainedConfig, Qwen3Config, Qwen3ForCausalLM

CPU = torch.device("cpu")

LLAMA = {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
QWEN3 = {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True}


def write_config(folder: Path, fields: dict[str, object]) -> Path:
    folder.mkdir()
    shape = {
        "architectures": ["ForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(shape | fields))
    return folder


def dummy_files(folder: Path, cache_root: Path) -> ModelFiles:
    return open_source(ModelSource(model=str(folder), weights="dummy"), cache_root=cache_root)


@pytest.mark.parametrize("fields", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_logits_of_any_shape_are_finite_and_about_as_spread_as_their_inputs(
    fields: dict[str, object], tmp_path: Path
) -> None:
    files = dummy_files(write_config(tmp_path / "model", fields), tmp_path / "cache")
    spec = read_spec(files)
    weights = load_weights(files, spec, dtype=torch.float32, device=CPU)
    (found,) = paged_logits(spec, weights, [tuple(range(50))], [50], ReferenceOps())
    assert found[49].isfinite().all()
    assert 0.5 < float(found[49].std()) < 2.0
    assert not (tmp_path / "cache").exists()


def test_they_are_the_same_each_time_and_in_each_start(tmp_path: Path) -> None:
    spec = read_spec(dummy_files(write_config(tmp_path / "model", LLAMA), tmp_path / "cache"))
    first, second = (dummy_tensors(spec, dtype=torch.bfloat16, device=CPU) for _ in range(2))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
        assert tensor.dtype == torch.bfloat16
    assert not torch.equal(first["layers.0.qkv_EX"], first["layers.1.qkv_EX"])


@pytest.mark.parametrize("fields", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_each_rank_gets_its_part_of_those_of_one(fields: dict[str, object], tmp_path: Path) -> None:
    files = dummy_files(write_config(tmp_path / "model", fields), tmp_path / "cache")
    spec = read_spec(files)
    whole = dummy_tensors(spec, dtype=torch.float32, device=CPU)
    for rank in range(2):
        weights = load_weights(files, spec, dtype=torch.float32, device=CPU, shard=Shard(rank, 2))
        assert weights.embedding_VE.equal(whole["embedding_VE"].chunk(2)[rank])
        for layer, found in enumerate(weights.layers):
            assert found.down_FE.equal(whole[f"layers.{layer}.down_FE"].chunk(2)[rank])
            assert found.attention_norm_E.equal(whole[f"layers.{layer}.attention_norm_E"])
            assert (found.down_bias_E is not None) == ("mlp_bias" in fields and rank == 0)


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
        Qwen3Config.from_dict(tiny_config().to_dict() | {"model_type": "qwen3", "head_dim": 32}),
    ],
    ids=["llama", "qwen3"],
)
def test_they_have_the_names_and_shapes_of_a_converted_checkpoint(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    kind = [Qwen3ForCausalLM] if config.model_type == "qwen3" else []
    random_model(config, *kind).save_pretrained(tmp_path / "model")
    files = open_source(ModelSource(model=str(tmp_path / "model")), cache_root=tmp_path / "cache")
    spec = read_spec(files)
    converted = convert(files, spec, dtype=torch.float32)
    dummies = dummy_tensors(spec, dtype=torch.float32, device=CPU)
    assert {name: t.shape for name, t in dummies.items()} == {name: t.shape for name, t in converted.items()}


def test_a_model_with_a_checkpoint_may_be_given_dummies_which_its_digest_says(
    tiny_llama_folder: Path, tmp_path: Path
) -> None:
    own = open_source(ModelSource(model=str(tiny_llama_folder)), cache_root=tmp_path)
    dummy = dummy_files(tiny_llama_folder, tmp_path)
    assert dummy.digest.endswith("-dummy")
    assert dummy.digest.removesuffix("-dummy") != own.digest
    load_tokenizer(dummy)  # the model's own


async def test_an_engine_is_built_from_a_config_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_config(tmp_path / "model", QWEN3)
    settings = ReplicaSettings(
        source=ModelSource(model=str(folder), weights="dummy"), device="cpu", kv_memory_bytes=10_000_000
    )
    engine = build_engine(settings, replica_id="r1")
    (status,) = await engine.statuses()
    await engine.close()
    assert status.card.model_digest.endswith("-dummy")
    with pytest.raises(StartupError, match=r"lacks model\.safetensors"):
        build_engine(replace(settings, source=ModelSource(model=str(folder))), replica_id="r2")


def test_without_a_tokenizer_the_error_says_what_works(tmp_path: Path) -> None:
    files = dummy_files(write_config(tmp_path / "model", LLAMA), tmp_path / "cache")
    with pytest.raises(StartupError, match="dummy weights and no tokenizer: an engine takes token ids"):
        load_tokenizer(files)
