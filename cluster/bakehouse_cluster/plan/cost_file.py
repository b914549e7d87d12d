"""The JSON file that says what a step costs on some machine (format `bakehouse-cost`, version 1).

The file is the dataclass `CostFile` as it stands, field by field; times in seconds. A calibration writes it; one
written by hand has no `fit`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.executors.simulated import StepCost
from bakehouse_replica.model.spec import ModelSpec
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

_Count = Annotated[int, Field(ge=1)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_HOW_TO_MAKE_ONE = "`bakehouse plan calibrate --output FILE` measures one on the machine that is to serve"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How well the cost describes the steps from which it was fitted, or others that were kept apart for that.

    `error_p50`, `error_p90`, `error_max`: of single steps, |predicted - measured| as a share of measured.
    `error_total`: of the time of all steps together, predicted / measured - 1.
    """

    n_steps: _Count
    measured_s: _Finite
    error_p50: _Finite
    error_p90: _Finite
    error_max: _Finite
    error_total: _Finite


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFile:
    """`device` and `model`: of what the cost was measured. `shape`: the model's sizes, see `shape_of`. `weights`,
    `kv_dtype`: in what products were, and keys and values; `n_ranks` shared them. `machine`: where, in words.
    `max_context`: no step had longer ones.

    `fit`: over steps that were held out; `fit_by_kind`: over those of decodes alone, prompts alone, and both.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    cost: StepCost
    device: Literal["cpu", "cuda"]
    model: str
    shape: str = ""
    weights: str = ""
    kv_dtype: str = ""
    n_ranks: _Count | None = None
    machine: str = ""
    max_context: _Count | None = None
    fit: Fit | None = None
    fit_by_kind: dict[str, Fit] = field(default_factory=dict)
    format: Literal["bakehouse-cost"] = "bakehouse-cost"
    version: Literal[1] = 1


_ADAPTER = TypeAdapter(CostFile)


def shape_of(spec: ModelSpec) -> str:
    """What the cost of a model's steps depends on, in words: equal for models of equal sizes, by any name."""
    return (
        f"{spec.n_layers} layers of {spec.hidden_size}, {spec.n_heads} heads and {spec.n_kv_heads} KV heads of "
        f"{spec.head_dim}, feed-forward {spec.feed_forward_size}, vocabulary {spec.vocabulary_size}"
    )


def write_cost(file: CostFile, path: Path) -> None:
    """Raises `StartupError` where it cannot be written."""
    try:
        path.write_bytes(_ADAPTER.dump_json(file, indent=2) + b"\n")
    except OSError as error:
        raise StartupError(f"{path} cannot be written: {error.strerror}") from error


def read_cost(path: Path) -> CostFile:
    """Raises `StartupError`, which says how to make one, where the file cannot be read or is no such file."""
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except OSError as error:
        raise StartupError(f"--cost {path}: {error.strerror}; {_HOW_TO_MAKE_ONE}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        said = first["msg"].removeprefix("Value error, ")
        raise StartupError(f"--cost {path}: {where}: {said}; {_HOW_TO_MAKE_ONE}") from error
