"""Loads the executor of a model, or of one rank's part of it, on the device that the settings mean."""

from bakehouse_replica.executors.device_choice import device_of
from bakehouse_replica.executors.in_process import InProcessExecutor, load_executor
from bakehouse_replica.executors.on_device import DeviceExecutor, load_device_executor
from bakehouse_replica.model.collective import Collective
from bakehouse_replica.model.constraint import ConstraintSource
from bakehouse_replica.model.spec import ModelSpec
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_replica.source import ModelFiles


def load_model(
    settings: ReplicaSettings,
    files: ModelFiles,
    spec: ModelSpec,
    max_model_len: int,
    *,
    constraints: ConstraintSource | None = None,
    collective: Collective | None = None,
) -> InProcessExecutor | DeviceExecutor:
    """With a `collective`, its rank's part; all ranks load theirs at the same time. Raises `StartupError`."""
    load = load_device_executor if device_of(settings).type == "cuda" else load_executor
    return load(settings, files, spec, max_model_len, constraints=constraints, collective=collective)
