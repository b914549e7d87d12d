"""What no replica of some settings could do on this machine, found out before anything is started."""

import torch
from bakehouse_kernels.dispatch import check_ops

from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.executors.device_choice import device_of, dtype_of, kv_dtype_of
from bakehouse_replica.executors.in_process import host_memory
from bakehouse_replica.model.sharding import Shard, check_sizes
from bakehouse_replica.model.sizing import choose_max_model_len
from bakehouse_replica.model.spec import read_spec
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_replica.source import ModelFiles


def check_settings(settings: ReplicaSettings, files: ModelFiles) -> None:
    """Raises `StartupError` as a replica would; reads the model's configuration, and loads nothing.

    A replica still finds out for itself what depends on memory that others take meanwhile, or on that of a GPU.
    """
    if files.is_script:
        return
    spec = read_spec(files)
    max_model_len = choose_max_model_len(spec.context_length, settings.max_model_len)
    if settings.executor == "fake":
        return
    check_sizes(spec, settings.tensor_parallel)
    device = device_of(settings)
    dtype, kv_dtype = dtype_of(settings, device), kv_dtype_of(settings, device)
    if (
        settings.quantize != "none"
        and settings.dtype != "auto"
        and device.type == "cpu"
        and dtype != torch.float32
    ):
        raise StartupError(f"--quantize {settings.quantize} and --dtype {settings.dtype} exclude each other")
    try:
        check_ops(device, dtype, quantize=settings.quantize, kv_dtype=kv_dtype)
    except ValueError as error:
        raise StartupError(f"model {files.name!r}: {error}") from error
    if device.type == "cpu":
        host_memory(settings, spec, max_model_len, Shard(0, settings.tensor_parallel))
