"""What serves which device and dtype, and what is said where nothing does."""

import os
import subprocess
import sys

import pytest
import torch
from bakehouse_kernels.cpu.ops import CpuOps
from bakehouse_kernels.cpu.pool import n_cores
from bakehouse_kernels.dispatch import Quantize, default_block_size, default_kv_dtype, select_ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_is_served_by_the_compiled_path(dtype: torch.dtype) -> None:
    n_torch_threads = torch.get_num_threads()
    assert isinstance(select_ops(torch.device("cpu"), dtype, 1), CpuOps)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(n_torch_threads)


@pytest.mark.parametrize(
    ("device", "dtype", "n_threads", "named"),
    [
        ("mps", torch.float32, 1, "no kernels for device 'mps'; there are kernels for: cpu, cuda"),
        (
            "cuda",
            torch.float16,
            1,
            "no GPU kernels for torch.float16; there .* torch.bfloat16, torch.float32$",
        ),
        ("cpu", torch.float16, 1, "no CPU kernels for torch.float16; there are .* torch.float32, torch.bfloat16$"),
        ("cpu", torch.float32, 0, "n_threads is 0"),
        ("cpu", torch.float32, n_cores() + 1, f"n_threads is {n_cores() + 1}"),
    ],
)
def test_what_is_missing_is_named(device: str, dtype: torch.dtype, n_threads: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        select_ops(torch.device(device), dtype, n_threads)


def test_int8_on_the_cpu_beside_another_dtype_than_float32_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no int8 kernels for torch.bfloat16 on the CPU; there are such for"):
        select_ops(torch.device("cpu"), torch.bfloat16, 1, quantize="int8")


def test_a_gpu_keeps_keys_and_values_in_the_dtype_of_weights() -> None:
    with pytest.raises(ValueError, match=r"keys and values of torch.float16 beside weights of torch.bfloat16"):
        select_ops(torch.device("cuda"), torch.bfloat16, 1, kv_dtype=torch.float16)


def test_cuda_without_a_device_or_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"torch [\d.]+\S* sees no CUDA device; there are kernels for: cpu"):
        select_ops(torch.device("cuda"), torch.bfloat16, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("bakehouse_kernels.dispatch.find_spec", lambda _: None)
    with pytest.raises(ValueError, match="the GPU kernels need triton, which is not installed: pip install"):
        select_ops(torch.device("cuda"), torch.bfloat16, 1)


def test_the_cpu_is_served_without_importing_triton() -> None:
    program = (
        "import sys, torch\n"
        "from bakehouse_kernels.dispatch import select_ops\n"
        "select_ops(torch.device('cpu'), torch.float32, 1)\n"
        "print([name for name in sys.modules if 'triton' in name.split('.')[:2]])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_keys_and_values_have_16_bits_where_weights_have_no_more() -> None:
    assert default_kv_dtype(torch.float32, "none") == torch.float32
    assert default_kv_dtype(torch.bfloat16, "none") == torch.float16
    assert default_kv_dtype(torch.float32, "int8") == torch.float16


@pytest.mark.parametrize(
    ("kv_dtype", "quantize"), [(None, "none"), (None, "int8"), (torch.float16, "none"), (torch.float32, "int8")]
)
def test_keys_and_values_are_kept_in_what_is_asked_for(kv_dtype: torch.dtype | None, quantize: Quantize) -> None:
    n_torch_threads = torch.get_num_threads()
    ops = select_ops(torch.device("cpu"), torch.float32, 1, quantize=quantize, kv_dtype=kv_dtype)
    torch.set_num_threads(n_torch_threads)
    cache = ops.new_cache(n_layers=1, n_blocks=1, block_size=1, n_kv_heads=1, head_dim=2)
    wanted = kv_dtype or default_kv_dtype(torch.float32, quantize)
    assert {tensor.dtype for tensor in (*cache.key, *cache.value)} == {wanted}


def test_keys_and_values_of_another_dtype_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"keys and values of torch.bfloat16; there are for: torch.float32, torch.f"
    ):
        select_ops(torch.device("cpu"), torch.float32, 1, kv_dtype=torch.bfloat16)


def test_the_cpu_takes_larger_blocks() -> None:
    assert default_block_size(torch.device("cpu")) == 32
    assert default_block_size(torch.device("cuda")) == 16
