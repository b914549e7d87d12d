"""A rotated model is the same model, and its rows have no channels that stand out."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from bakehouse_replica.executors.on_device import load_device_model
from bakehouse_replica.model.collective import Alone
from bakehouse_replica.model.residual_rotation import ResidualRotation
from bakehouse_replica.model.weights import load_weights
from bakehouse_replica.settings import ReplicaSettings
from decoding import CPU, assert_logits_equal, load, open_model, paged_logits
from tiny_llama import random_model, tiny_config, write_tiny_llama

SEQUENCES = [[5, 9, 200, 31, 7, 7, 18], [300, 2, 3]]


@pytest.mark.parametrize("width", [64, 96, 576, 35, 1])
def test_a_rotation_keeps_lengths_and_angles(width: int) -> None:
    q_EE = ResidualRotation(width).turn(torch.eye(width))
    torch.testing.assert_close(q_EE @ q_EE.t(), torch.eye(width), atol=1e-5, rtol=0)
    assert torch.equal(q_EE, ResidualRotation(width).turn(torch.eye(width)))


def test_any_shape_is_turned_over_its_last_dimension() -> None:
    rotation = ResidualRotation(96)
    x_23E = torch.randn(2, 3, 96, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rotation.turn(x_23E), x_23E @ rotation.turn(torch.eye(96)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("row", [torch.eye(576)[17], torch.ones(576)], ids=["one channel", "all alike"])
def test_what_stands_out_is_spread(row: torch.Tensor) -> None:
    even = row.norm() / 576**0.5
    largest = ResidualRotation(576).turn(row).abs().max()
    # One channel: exactly √2 at most. All alike: random signs, beyond 5 deviations in one of 10^3.6 cases.
    assert largest < (1.4143 if row.count_nonzero() == 1 else 5) * even


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}, {"hidden_size": 96}],
    ids=str,
)
def test_a_rotated_model_gives_transformers_logits(changes: dict[str, Any], tmp_path: Path) -> None:
    files = open_model(write_tiny_llama(tmp_path / "tiny", **changes), tmp_path / "cache")
    spec, plain = load(files)
    rotated = load_weights(files, spec, dtype=torch.float32, device=CPU, rotated=True)
    assert not torch.allclose(rotated.layers[1].down_FE, plain.layers[1].down_FE)
    assert torch.equal(rotated.layers[1].attention_norm_E, torch.ones(spec.hidden_size))
    assert not torch.equal(plain.layers[1].attention_norm_E, torch.ones(spec.hidden_size))
    found = paged_logits(spec, rotated, SEQUENCES, [3, 1])
    assert_logits_equal(found, random_model(tiny_config(**changes)), SEQUENCES, 2e-4)


def test_rotated_and_plain_weights_do_not_share_a_cache_file(tiny_llama_folder: Path, tmp_path: Path) -> None:
    files = open_model(tiny_llama_folder, tmp_path)
    spec, plain = load(files)
    rotated = load_weights(files, spec, dtype=torch.float32, device=CPU, rotated=True)
    again = load_weights(files, spec, dtype=torch.float32, device=CPU, rotated=True)
    assert torch.equal(rotated.head_VE, again.head_VE)
    assert torch.equal(load(files)[1].embedding_VE, plain.embedding_VE)


def test_a_device_gets_rotated_weights_in_its_own_dtype(tiny_llama_folder: Path, tmp_path: Path) -> None:
    files = open_model(tiny_llama_folder, tmp_path)
    spec, _ = load(files)
    exact = load_weights(files, spec, dtype=torch.float32, device=CPU, rotated=True)
    rounded = load_weights(files, spec, dtype=torch.bfloat16, device=CPU, rotated=True)
    assert torch.equal(rounded.layers[1].down_FE, exact.layers[1].down_FE.bfloat16())
    assert torch.equal(rounded.head_VE, exact.head_VE.bfloat16())


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_what_a_device_rounds_to_8_bits_is_rotated(
    quantize: Literal["none", "int8"], tiny_llama_folder: Path, tmp_path: Path
) -> None:
    files = open_model(tiny_llama_folder, tmp_path)
    spec, plain = load(files)
    rotated = load_weights(files, spec, dtype=torch.float32, device=CPU, rotated=True)
    model = load_device_model(ReplicaSettings(quantize=quantize), files, spec, 64, CPU, Alone())
    expected = rotated if quantize == "int8" else plain
    assert torch.equal(model.decoder.embed(torch.arange(9)), expected.embedding_VE[:9])
