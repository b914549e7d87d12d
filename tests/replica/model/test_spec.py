"""What a configuration says is read completely, or refused by name."""

import json
from pathlib import Path

import pytest
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.model.spec import ModelSpec, read_spec
from decoding import open_model
from gguf_files import write_gguf
from tiny_llama import N_TOKENS, random_model, tiny_config


def spec_of(folder: Path, changes: dict[str, object]) -> ModelSpec:
    """The spec of a folder whose config.json differs from the tiny one by `changes`; its weights are not read."""
    config = tiny_config().to_dict() | {"architectures": ["LlamaForCausalLM"]} | changes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"not read here")
    return read_spec(open_model(folder, folder / "cache"))


def test_every_field_comes_from_the_configuration(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, {"attention_bias": True, "rms_norm_eps": 1e-5, "tie_word_embeddings": False})
    assert (spec.n_layers, spec.hidden_size, spec.feed_forward_size) == (2, 64, 96)
    assert (spec.n_heads, spec.n_kv_heads, spec.head_dim) == (4, 2, 16)
    assert (spec.vocabulary_size, spec.context_length, spec.norm_eps) == (N_TOKENS, 256, 1e-5)
    assert (spec.has_tied_head, spec.has_qkv_bias, spec.has_output_bias) == (False, True, True)
    assert spec.has_feed_forward_bias is False
    assert spec.window is None
    assert spec.rope_frequencies[0] == 1.0
    assert spec.rope_frequencies[4] == pytest.approx(0.01)


def test_heads_that_are_not_grouped_need_no_count_of_their_own(tmp_path: Path) -> None:
    config = tiny_config().to_dict()
    del config["num_key_value_heads"], config["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"not read here")
    spec = read_spec(open_model(tmp_path, tmp_path / "cache"))
    assert (spec.n_kv_heads, spec.head_dim) == (4, 16)


def test_the_count_of_parameters_is_that_of_the_matrices(tmp_path: Path) -> None:
    tied, untied = spec_of(tmp_path, {}), spec_of(tmp_path, {"tie_word_embeddings": False})
    matrices = [tensor.numel() for tensor in random_model(tiny_config()).parameters() if tensor.ndim == 2]
    assert tied.n_parameters == sum(matrices)
    assert untied.n_parameters == sum(matrices) + N_TOKENS * 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model type 'mamba' is not supported .supported: llama, mistral"),
        ({"model_type": None}, "model type None is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architecture 'LlamaForSequenceClassification'"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised weights .*gptq"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
            "rope type 'dynamic'",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5",
        ),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=message) as refusal:
        spec_of(tmp_path, changes)
    assert str(tmp_path) in refusal.value.message
    assert "\n" not in refusal.value.message


def test_a_gguf_file_says_the_same_as_the_folder_it_was_made_from(tmp_path: Path) -> None:
    model = random_model(tiny_config(rms_norm_eps=2.0**-17))  # a number that float32 holds exactly
    model.save_pretrained(tmp_path / "folder")
    path = write_gguf(tmp_path / "model.gguf", model)
    assert read_spec(open_model(path, tmp_path)) == read_spec(open_model(tmp_path / "folder", tmp_path))


def test_linear_rope_scaling_of_a_gguf_file_slows_every_pair(tmp_path: Path) -> None:
    model = random_model(tiny_config())
    plain = read_spec(open_model(write_gguf(tmp_path / "plain.gguf", model), tmp_path))
    scaling: dict[str, int | str | float] = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    scaled = read_spec(open_model(write_gguf(tmp_path / "scaled.gguf", model, scalars=scaling), tmp_path))
    assert scaled.rope_frequencies == tuple(frequency / 4 for frequency in plain.rope_frequencies)


@pytest.mark.parametrize(
    ("architecture", "scalars", "message"),
    [
        ("gemma3", {}, "GGUF architecture 'gemma3' is not supported .supported: llama"),
        ("llama", {"llama.expert_count": 8}, "number of experts 8"),
        ("llama", {"llama.rope.scaling.type": "yarn"}, "rope type 'yarn'"),
        ("llama", {"llama.rope.dimension_count": 8}, "number of rotated dimensions 8"),
    ],
)
def test_gguf_metadata_that_is_not_supported_is_refused_by_name(
    architecture: str, scalars: dict[str, int | str | float], message: str, tmp_path: Path
) -> None:
    path = write_gguf(
        tmp_path / "model.gguf", random_model(tiny_config()), architecture=architecture, scalars=scalars
    )
    with pytest.raises(StartupError, match=message):
        read_spec(open_model(path, tmp_path))


def test_a_file_that_only_looks_like_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF is a good beginning, but not a model" * 10)
    with pytest.raises(StartupError, match=r"model.gguf is not a readable GGUF file"):
        read_spec(open_model(tmp_path / "model.gguf", tmp_path))
