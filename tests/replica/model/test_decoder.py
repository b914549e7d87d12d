"""The decoder's logits through the paged cache, against transformers' own modelling code."""

from pathlib import Path
from random import Random

import pytest
import torch
from decoding import CPU, assert_logits_equal, load, open_model, paged_logits
from tiny_llama import N_TOKENS, random_model, tiny_config
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

CONFIGS: dict[str, dict[str, object]] = {
    "grouped heads, tied": {},
    "one key head, untied": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "head wider than its share": {"head_dim": 32, "num_key_value_heads": 4},
    "biases everywhere": {"attention_bias": True, "mlp_bias": True},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "yarn rope": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}
SEQUENCES = [Random(length).choices(range(N_TOKENS), k=length) for length in (1, 7, 29, 64)]


def assert_equal_to_transformers(model: PreTrainedModel, folder: Path, chunk_sizes: list[int]) -> None:
    model.save_pretrained(folder / "model")
    spec, weights = load(open_model(folder / "model", folder / "cache"))
    # 1e-4: float32 sums in another order; the logits themselves reach about 10.
    assert_logits_equal(paged_logits(spec, weights, SEQUENCES, chunk_sizes), model, SEQUENCES, 1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers_for_each_variant(name: str, tmp_path: Path) -> None:
    assert_equal_to_transformers(random_model(tiny_config(**CONFIGS[name])), tmp_path, [11, 1, 5])


@pytest.mark.parametrize("chunk_sizes", [[64], [1], [3], [16, 1, 1, 1, 20, 2]], ids=str)
def test_logits_do_not_depend_on_chunking(chunk_sizes: list[int], tmp_path: Path) -> None:
    assert_equal_to_transformers(random_model(tiny_config()), tmp_path, chunk_sizes)


def test_a_sliding_window_hides_what_lies_further_back(tmp_path: Path) -> None:
    fields = {key: value for key, value in tiny_config().to_dict().items() if key != "model_type"}
    config = MistralConfig.from_dict(fields | {"sliding_window": 8})
    assert_equal_to_transformers(random_model(config, MistralForCausalLM), tmp_path, [11, 1, 5])


def test_more_rows_than_the_small_head_product_takes_give_the_same_logits(
    tiny_llama_folder: Path, tmp_path: Path
) -> None:
    spec, weights = load(open_model(tiny_llama_folder, tmp_path))
    sequences = [SEQUENCES[1]] * 9
    alone = paged_logits(spec, weights, sequences[:1], [7])[0][6]
    for positions in paged_logits(spec, weights, sequences, [7]):
        torch.testing.assert_close(positions[6], alone, atol=1e-5, rtol=0)


def test_bfloat16_gives_float32_logits_near_those_of_float32(tiny_llama_folder: Path, tmp_path: Path) -> None:
    files = open_model(tiny_llama_folder, tmp_path)
    exact = paged_logits(*load(files), SEQUENCES[2:3], [29])[0][28]
    rounded = paged_logits(*load(files, torch.bfloat16), SEQUENCES[2:3], [29])[0][28]
    assert rounded.dtype is torch.float32
    assert rounded.device == CPU
    # bfloat16 keeps 8 bits: about 0.4 % of the largest logit a rounding, and a dozen roundings on the way.
    assert (rounded - exact).abs().max() < 0.05 * exact.abs().max()
