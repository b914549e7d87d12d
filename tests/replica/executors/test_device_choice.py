"""What settings mean on a machine with a GPU, and on one without."""

import pytest
import torch
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.executors.device_choice import device_of, dtype_of, kv_dtype_of
from bakehouse_replica.settings import ReplicaSettings

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused() -> None:
    assert device_of(ReplicaSettings()).type == "cpu"
    with pytest.raises(StartupError, match=r"--device is cuda, but .*; give --device cpu, or auto"):
        device_of(ReplicaSettings(device="cuda"))


@pytest.mark.gpu
def test_with_a_gpu_auto_is_the_gpu_and_cpu_is_the_cpu() -> None:
    assert device_of(ReplicaSettings()).type == "cuda"
    assert device_of(ReplicaSettings(device="cpu")).type == "cpu"


def test_auto_is_bfloat16_on_a_gpu_and_float32_on_the_cpu() -> None:
    assert dtype_of(ReplicaSettings(), CUDA) == kv_dtype_of(ReplicaSettings(), CUDA) == torch.bfloat16
    assert dtype_of(ReplicaSettings(), CPU) == kv_dtype_of(ReplicaSettings(), CPU) == torch.float32
    wide = ReplicaSettings(dtype="float32")
    assert dtype_of(wide, CUDA) == kv_dtype_of(wide, CUDA) == torch.float32


def test_what_is_asked_for_holds_on_both() -> None:
    asked = ReplicaSettings(dtype="bfloat16", kv_dtype="float32")
    for device in (CPU, CUDA):
        assert (dtype_of(asked, device), kv_dtype_of(asked, device)) == (torch.bfloat16, torch.float32)
