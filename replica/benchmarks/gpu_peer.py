"""transformers' continuous batching on the same shape and lengths, with random weights of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig


@dataclass(frozen=True, slots=True)
class PeerRun:
    """All prompts to their last token."""

    total_s: float
    n_output: int


def run_peer(
    folder: Path, prompts: Sequence[Sequence[int]], n_output: int, device: torch.device, dtype: torch.dtype
) -> PeerRun:
    """The second of two runs of `generate_batch`, greedy, with no end of text."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train(False)
    generation = GenerationConfig(
        max_new_tokens=n_output,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        use_cuda_graph=device.type == "cuda",
    )
    inputs = [list(prompt) for prompt in prompts]
    model.generate_batch(inputs=[prompt[:8] for prompt in inputs[:2]], generation_config=generation)
    begun_at = perf_counter()
    outputs = model.generate_batch(inputs=inputs, generation_config=generation)
    total_s = perf_counter() - begun_at
    return PeerRun(total_s, sum(len(output.generated_tokens) for output in outputs.values()))
