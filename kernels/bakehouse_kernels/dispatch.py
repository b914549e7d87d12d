"""Device and dtype to `Ops`: decided once, explicitly, by whoever builds the model."""

import torch

from bakehouse_kernels.api import Ops
from bakehouse_kernels.cpu.ops import CpuOps
from bakehouse_kernels.cpu.packing import Quantize
from bakehouse_kernels.cpu.pool import n_cores


def select_ops(device: torch.device, dtype: torch.dtype, n_threads: int, *, quantize: Quantize = "none") -> Ops:
    """The operations that serve `dtype` on `device`, compiled, with `n_threads` compute threads.

    With `quantize` `int8`, matrix products are of 8 bits; all that is around them stays in `dtype`. Sets the size
    of torch's thread pool for the whole process. Raises `ValueError` naming what is missing.
    """
    if quantize != "none" and (device.type, dtype) != ("cpu", torch.float32):
        raise ValueError(
            f"no {quantize} kernels for {dtype} on device {device.type!r}; there are {quantize} kernels for: "
            "torch.float32 on device 'cpu'"
        )
    if device.type != "cpu":
        raise ValueError(f"no kernels for device {device.type!r}; there are kernels for: cpu")
    if dtype != torch.float32:
        raise ValueError(f"no CPU kernels for {dtype}; there are CPU kernels for: torch.float32")
    n_available = n_cores()
    if not 1 <= n_threads <= n_available:
        raise ValueError(f"n_threads is {n_threads}; this process may use 1 to {n_available} cores")
    return CpuOps(n_threads, quantize=quantize)


def default_block_size(device: torch.device) -> int:
    """Slots in a block where nobody asks for another number."""
    return 32 if device.type == "cpu" else 16
