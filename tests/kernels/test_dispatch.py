"""What serves which device and dtype, and what is said where nothing does."""

import pytest
import torch
from bakehouse_kernels.cpu.ops import CpuOps
from bakehouse_kernels.cpu.pool import n_cores
from bakehouse_kernels.dispatch import default_block_size, select_ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_is_served_by_the_compiled_path(dtype: torch.dtype) -> None:
    n_torch_threads = torch.get_num_threads()
    assert isinstance(select_ops(torch.device("cpu"), dtype, 1), CpuOps)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(n_torch_threads)


@pytest.mark.parametrize(
    ("device", "dtype", "n_threads", "named"),
    [
        ("cuda", torch.bfloat16, 1, "cuda"),
        ("cpu", torch.float16, 1, "no CPU kernels for torch.float16; there are .* torch.float32, torch.bfloat16$"),
        ("cpu", torch.float32, 0, "n_threads is 0"),
        ("cpu", torch.float32, n_cores() + 1, f"n_threads is {n_cores() + 1}"),
    ],
)
def test_what_is_missing_is_named(device: str, dtype: torch.dtype, n_threads: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        select_ops(torch.device(device), dtype, n_threads)


@pytest.mark.parametrize(("device", "dtype"), [("cuda", torch.float32), ("cpu", torch.bfloat16)])
def test_int8_elsewhere_than_in_float32_on_the_cpu_is_refused(device: str, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"no int8 kernels for {dtype} on device '{device}'; there are int8"):
        select_ops(torch.device(device), dtype, 1, quantize="int8")


def test_the_cpu_takes_larger_blocks() -> None:
    assert default_block_size(torch.device("cpu")) == 32
    assert default_block_size(torch.device("cuda")) == 16
