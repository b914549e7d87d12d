"""What settings leave open about steps suits the device; what they say is taken."""

import torch
from bakehouse_replica.executors.step_sizes import StepSizes, step_sizes
from bakehouse_replica.settings import ReplicaSettings

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_gpu_has_larger_steps_than_a_cpu() -> None:
    unset = ReplicaSettings()
    assert step_sizes(unset, CPU) == StepSizes(max_step_tokens=512, max_sequences=64, max_prefill_tokens=256)
    assert step_sizes(unset, GPU) == StepSizes(max_step_tokens=8192, max_sequences=256, max_prefill_tokens=2048)


def test_what_is_set_is_taken_on_any_device() -> None:
    set_ = ReplicaSettings(max_step_tokens=100, max_sequences=3, max_prefill_tokens=7)
    sizes = StepSizes(max_step_tokens=100, max_sequences=3, max_prefill_tokens=7)
    assert step_sizes(set_, CPU) == step_sizes(set_, GPU) == sizes
    assert str(sizes) == "100 tokens and 3 sequences a step, 7 tokens of prompts while others decode"


def test_one_that_is_set_leaves_the_others_to_the_device() -> None:
    assert step_sizes(ReplicaSettings(max_sequences=3), GPU).max_step_tokens == 8192
