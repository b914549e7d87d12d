"""Device and dtype to `Ops`: decided once, explicitly, by whoever builds the model."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import torch

from bakehouse_kernels.api import Ops

if TYPE_CHECKING:
    from bakehouse_kernels.cpu.packing import WeightFormat

KV_DTYPES = (torch.float32, torch.float16)
GPU_DTYPES = (torch.bfloat16, torch.float32)

Quantize = Literal["none", "int8"]

_CPU_FORMATS: dict[torch.dtype, "WeightFormat"] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def select_ops(
    device: torch.device,
    dtype: torch.dtype,
    n_threads: int,
    *,
    quantize: Quantize = "none",
    kv_dtype: torch.dtype | None = None,
) -> Ops:
    """The operations that serve `dtype` on `device`, compiled, with `n_threads` compute threads.

    On the CPU, `dtype` is that of the numbers which matrix products multiply, of 8 bits with `quantize` `int8`;
    all that is around them takes and gives float32. Keys and values are kept in `kv_dtype`, by default in that of
    `default_kv_dtype`. Sets the size of torch's thread pool for the whole process.

    On a GPU (`cuda`), `dtype` is that of everything, keys and values included; `quantize` `int8` has products
    multiply 8 bits. Kernels are compiled as they are first called; `n_threads` is for the CPU.

    Raises `ValueError` naming what is missing.
    """
    check_ops(device, dtype, quantize=quantize, kv_dtype=kv_dtype)
    if device.type == "cuda":
        # Optional: triton exists for Linux only, and takes a second to import, which the CPU path does without.
        from bakehouse_kernels.triton.ops import TritonOps

        return TritonOps(device, dtype, is_int8=quantize == "int8")
    # The CPU path brings Numba, which a GPU's does without, as this one does without triton.
    from bakehouse_kernels.cpu.ops import CpuOps
    from bakehouse_kernels.cpu.pool import n_cores

    n_available = n_cores()
    if not 1 <= n_threads <= n_available:
        raise ValueError(f"n_threads is {n_threads}; this process may use 1 to {n_available} cores")
    weight_format = _CPU_FORMATS[dtype] if quantize == "none" else quantize
    return CpuOps(n_threads, weight_format=weight_format, kv_dtype=kv_dtype or default_kv_dtype(dtype, quantize))


def check_ops(
    device: torch.device,
    dtype: torch.dtype,
    *,
    quantize: Quantize = "none",
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Raises `ValueError` where `select_ops` would, number of threads aside; compiles nothing."""
    if device.type == "cuda":
        _check_gpu(dtype, kv_dtype or dtype)
        return
    if device.type != "cpu":
        raise ValueError(f"no kernels for device {device.type!r}; there are kernels for: cpu, cuda")
    if quantize != "none" and dtype != torch.float32:
        raise ValueError(f"no {quantize} kernels for {dtype} on the CPU; there are such for: torch.float32")
    if dtype not in _CPU_FORMATS:
        known = ", ".join(map(str, _CPU_FORMATS))
        raise ValueError(f"no CPU kernels for {dtype}; there are CPU kernels for: {known}")
    # Brings Numba: see `select_ops`.
    from bakehouse_kernels.cpu.tile import HAS_HALF

    kept = kv_dtype or default_kv_dtype(dtype, quantize)
    if kept not in KV_DTYPES:
        raise ValueError(
            f"no CPU kernels for keys and values of {kept}; there are for: torch.float32, torch.float16"
        )
    if kept == torch.float16 and not HAS_HALF:
        raise ValueError(
            "no CPU kernels for keys and values of torch.float16 on a processor without F16C or NEON; "
            "there are for: torch.float32"
        )


def _check_gpu(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    if dtype not in GPU_DTYPES:
        known = ", ".join(map(str, GPU_DTYPES))
        raise ValueError(f"no GPU kernels for {dtype}; there are GPU kernels for: {known}")
    if kv_dtype != dtype:
        raise ValueError(f"no GPU kernels for keys and values of {kv_dtype} beside weights of {dtype}")
    if not torch.cuda.is_available():
        raise ValueError(f"torch {torch.__version__} sees no CUDA device; there are kernels for: cpu")
    if find_spec("triton") is None:
        raise ValueError("the GPU kernels need triton, which is not installed: pip install 'triton>=3.6,<3.8'")


def default_kv_dtype(dtype: torch.dtype, quantize: Quantize) -> torch.dtype:
    """That of keys and values on the CPU where nobody asks for another; on a GPU it is `dtype`."""
    return kv_dtype_beside(_CPU_FORMATS[dtype] if quantize == "none" else quantize)


def kv_dtype_beside(weight_format: "WeightFormat") -> torch.dtype:
    """The same for weights of this format: 16 bits where they have no more."""
    return torch.float32 if weight_format == "float32" else torch.float16


def default_block_size(device: torch.device) -> int:
    """Slots in a block where nobody asks for another number."""
    return 32 if device.type == "cpu" else 16
