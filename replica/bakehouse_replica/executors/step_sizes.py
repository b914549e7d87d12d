"""How large the steps of a replica are: as its settings say, or else as suits its device."""

from dataclasses import dataclass

import torch

from bakehouse_replica.settings import ReplicaSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The largest step, and how many of its tokens may be of prompts while others decode."""

    max_step_tokens: int
    max_sequences: int
    max_prefill_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.max_step_tokens} tokens and {self.max_sequences} sequences a step, "
            f"{self.max_prefill_tokens} tokens of prompts while others decode"
        )


# Prompts hold decoding sequences up for as long as their tokens take: on a GPU, 2,048 of an 8B model are some
# 30 TFLOP. It needs thousands of rows in a product before it is busy. Why these: `docs/performance.md`.
_BY_DEVICE = {
    "cpu": StepSizes(max_step_tokens=512, max_sequences=64, max_prefill_tokens=256),
    "cuda": StepSizes(max_step_tokens=8192, max_sequences=256, max_prefill_tokens=2048),
}


def step_sizes(settings: ReplicaSettings, device: torch.device) -> StepSizes:
    """Those of a replica that runs on `device`; what the settings name is taken as it is."""
    usual = _BY_DEVICE[device.type]
    return StepSizes(
        max_step_tokens=settings.max_step_tokens or usual.max_step_tokens,
        max_sequences=settings.max_sequences or usual.max_sequences,
        max_prefill_tokens=settings.max_prefill_tokens or usual.max_prefill_tokens,
    )
