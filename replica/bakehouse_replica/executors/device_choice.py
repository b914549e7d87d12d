"""Which device and which types of numbers a replica's settings mean on this machine."""

import torch
from bakehouse_kernels.dispatch import default_kv_dtype

from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.settings import ReplicaSettings

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_KV_DTYPES = {"float32": torch.float32, "float16": torch.float16}
# A GPU's matrix units multiply 16 bits many times faster than 32; a CPU's path is exact in float32.
_AUTO = {"cuda": torch.bfloat16, "cpu": torch.float32}


def device_of(settings: ReplicaSettings) -> torch.device:
    """`auto` is a GPU where there is one. Raises `StartupError` where one is asked for that is not there."""
    has_gpu = torch.cuda.is_available()
    if settings.device == "cuda" and not has_gpu:
        reason = "PyTorch sees no GPU" if torch.version.cuda else "this PyTorch is built without CUDA"
        raise StartupError(f"--device is cuda, but {reason}; give --device cpu, or auto for whichever there is")
    return torch.device("cuda" if has_gpu and settings.device != "cpu" else "cpu")


def dtype_of(settings: ReplicaSettings, device: torch.device) -> torch.dtype:
    """In what the device multiplies matrices."""
    return _DTYPES.get(settings.dtype) or _AUTO[device.type]


def kv_dtype_of(settings: ReplicaSettings, device: torch.device) -> torch.dtype:
    """In what it keeps keys and values."""
    asked, dtype = _KV_DTYPES.get(settings.kv_dtype), dtype_of(settings, device)
    if asked is not None:
        return asked
    return dtype if device.type == "cuda" else default_kv_dtype(dtype, settings.quantize)


def kind_of(settings: ReplicaSettings, device: torch.device) -> str:
    """In what products are, for people."""
    if settings.quantize != "none":
        return settings.quantize
    return str(dtype_of(settings, device)).removeprefix("torch.")
