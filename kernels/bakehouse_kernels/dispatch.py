"""Device and dtype to `Ops`: decided once, explicitly, by whoever builds the model."""

from typing import Literal

import torch

from bakehouse_kernels.api import Ops
from bakehouse_kernels.cpu.ops import CpuOps
from bakehouse_kernels.cpu.packing import WeightFormat
from bakehouse_kernels.cpu.pool import n_cores
from bakehouse_kernels.cpu.tile import HAS_HALF

KV_DTYPES = (torch.float32, torch.float16)

Quantize = Literal["none", "int8"]

_CPU_FORMATS: dict[torch.dtype, WeightFormat] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


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
    `default_kv_dtype`. Sets the size of torch's thread pool for the whole process. Raises `ValueError` naming what
    is missing.
    """
    if quantize != "none" and (device.type, dtype) != ("cpu", torch.float32):
        raise ValueError(
            f"no {quantize} kernels for {dtype} on device {device.type!r}; there are {quantize} kernels for: "
            "torch.float32 on device 'cpu'"
        )
    if device.type != "cpu":
        raise ValueError(f"no kernels for device {device.type!r}; there are kernels for: cpu")
    if dtype not in _CPU_FORMATS:
        known = ", ".join(map(str, _CPU_FORMATS))
        raise ValueError(f"no CPU kernels for {dtype}; there are CPU kernels for: {known}")
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
    n_available = n_cores()
    if not 1 <= n_threads <= n_available:
        raise ValueError(f"n_threads is {n_threads}; this process may use 1 to {n_available} cores")
    weight_format = _CPU_FORMATS[dtype] if quantize == "none" else quantize
    return CpuOps(n_threads, weight_format=weight_format, kv_dtype=kept)


def default_kv_dtype(dtype: torch.dtype, quantize: Quantize) -> torch.dtype:
    """That of keys and values where nobody asks for another."""
    return kv_dtype_beside(_CPU_FORMATS[dtype] if quantize == "none" else quantize)


def kv_dtype_beside(weight_format: WeightFormat) -> torch.dtype:
    """The same for weights of this format: 16 bits where they have no more."""
    return torch.float32 if weight_format == "float32" else torch.float16


def default_block_size(device: torch.device) -> int:
    """Slots in a block where nobody asks for another number."""
    return 32 if device.type == "cpu" else 16
