"""Qwen3: heads of query and key are normalised before they are rotated; the oracle is transformers' own model."""

from pathlib import Path
from random import Random

import pytest
import torch
from bakehouse_kernels.cpu.ops import CpuOps
from bakehouse_kernels.reference import ReferenceOps
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.core.executor import execute
from bakehouse_replica.core.types import Chunk, Sample, StepPlan
from bakehouse_replica.model.spec import read_spec
from decoding import assert_logits_equal, executor_of, load, open_model, paged_logits
from executors import GREEDY
from tiny_llama import N_TOKENS, random_model
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM


def write_qwen3(folder: Path, **changes: object) -> PreTrainedModel:
    fields: dict[str, object] = {
        "vocab_size": N_TOKENS,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,  # not the width over the number of heads
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    model = random_model(Qwen3Config.from_dict(fields | changes), Qwen3ForCausalLM)
    model.save_pretrained(folder)
    return model


SEQUENCES = [tuple(Random(s).choices(range(N_TOKENS), k=length)) for s, length in enumerate((19, 7))]


@pytest.mark.parametrize("chunk_sizes", [[32], [5, 1]], ids=str)
def test_logits_equal_those_of_transformers(chunk_sizes: list[int], tmp_path: Path) -> None:
    model = write_qwen3(tmp_path / "model")
    spec, weights = load(open_model(tmp_path / "model", tmp_path / "cache"))
    assert spec.has_qk_norm
    for ops in (ReferenceOps(), CpuOps(torch.get_num_threads())):
        found = paged_logits(spec, weights, SEQUENCES, chunk_sizes, ops)
        assert_logits_equal(found, model, SEQUENCES, atol=2e-4)


def test_decode_steps_go_on_from_what_was_written(tmp_path: Path) -> None:
    """Not from recordings, which note operations alone: greedy ids after each prefix are transformers'."""
    model = write_qwen3(tmp_path / "model")
    executor = executor_of(open_model(tmp_path / "model", tmp_path / "cache"), n_blocks=16)
    ids, new = list(SEQUENCES[0]), SEQUENCES[0]
    for step in range(6):
        chunk = Chunk(
            sequence_id=0,
            token_ids=tuple(new),
            start=len(ids) - len(new),
            block_ids=tuple(range(-(-len(ids) // 4))),
            sample=Sample(params=GREEDY, seeds=(0,), output_index=step),
        )
        (sampled,) = execute(executor, StepPlan(step=step, copies=(), chunks=(chunk,))).sampled
        with torch.inference_mode():
            expected = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        assert sampled.draws[0].token_ids == (expected,)
        new = sampled.draws[0].token_ids
        ids += new


def test_windows_in_some_layers_alone_are_refused(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "model", use_sliding_window=True, sliding_window=32, max_window_layers=1)
    with pytest.raises(StartupError, match="use_sliding_window True is not supported"):
        read_spec(open_model(tmp_path / "model", tmp_path / "cache"))
