"""transformers' continuous batching on the same shape and lengths, with random weights of its own.

Its attention is torch's own (`sdpa`), which it can always use. Flash attention has to be installed or downloaded,
and might be faster.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

ATTENTION = "sdpa"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """All prompts to their last token; `attention`: by which of transformers' implementations."""

    total_s: float
    n_output: int
    attention: str


def run_peer(
    folder: Path, prompts: Sequence[Sequence[int]], n_output: int, device: torch.device, dtype: torch.dtype
) -> PeerRun:
    """The second of two runs of `generate_batch`, greedy, with no end of text."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION).train(False)
    generation = GenerationConfig(max_new_tokens=n_output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # Its own choices on a GPU; on the CPU its masks would fill all memory.
    limits = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=128) if device.type == "cpu" else None
    for shift in (1, 0):  # other prompts first, whose blocks it cannot find again: that run compiles and captures
        inputs = [[token_id + shift for token_id in prompt] for prompt in prompts]
        begun_at = perf_counter()
        outputs = model.generate_batch(
            inputs=inputs,
            generation_config=generation,
            continuous_batching_config=limits,
            persistent_manager=True,  # lives on: whoever calls ends the process
        )
        total_s = perf_counter() - begun_at
        counts = [len(output.generated_tokens) for output in outputs.values()]
        if counts != [n_output] * len(prompts):  # it logs what fails, and returns the rest
            raise RuntimeError(
                f"generate_batch gave {sum(counts)} tokens for {len(counts)} of {len(prompts)} prompts"
            )
    n_generated = sum(len(output.generated_tokens) for output in outputs.values())
    return PeerRun(total_s=total_s, n_output=n_generated, attention=ATTENTION)
