"""How kernels are launched: tile sizes, warps and stages, from one committed table per class of devices.

A table (`launch_tables/<class>.json`) lists under each kernel's name its launches; each has the largest sizes that
it serves (`up_to`), and the first that serves a call is taken. The last one serves everything. Tables are written
by `python -m bakehouse_kernels.tune`.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch

DeviceClass = Literal["sm80", "sm90", "interpreter"]
DEVICE_CLASSES: tuple[DeviceClass, ...] = get_args(DeviceClass)
TABLES = Path(__file__).with_name("launch_tables")

_OLDEST_MAJOR = 8  # bfloat16 products and asynchronous copies came with compute capability 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Sizes of tiles by the names of the kernel's constants, warps of a program, stages of its pipelined loops."""

    tiles: Mapping[str, int]
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """All of it, as keyword arguments of a kernel."""
        return {**self.tiles, "num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A launch, and the largest sizes it serves, by name; it serves any size that is not named."""

    up_to: Mapping[str, int]
    launch: Launch

    def serves(self, sizes: Mapping[str, int]) -> bool:
        """Whether no size exceeds its limit. `KeyError` where a limited size is not given."""
        return all(sizes[name] <= limit for name, limit in self.up_to.items())


Table = Mapping[str, tuple[Entry, ...]]
"""The launches of one class of devices, by the kernel's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A kernel that is launched, what with, and the keyword arguments: constants, warps and stages."""

    kernel: Any
    arguments: tuple[object, ...]
    options: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What would have been launched on a device of a class, in its order."""

    device_class: DeviceClass
    launches: list[Started] = field(default_factory=list)


_tried: ContextVar[Table | None] = ContextVar("tried", default=None)
_notes: ContextVar[Notes | None] = ContextVar("notes", default=None)


def device_class_of(device: torch.device) -> DeviceClass:
    """The class whose table serves `device`; on the CPU that of Triton's interpreter, within `noting` its own.

    Raises `ValueError` on a GPU that is too old.
    """
    if (notes := _notes.get()) is not None:
        return notes.device_class
    if device.type == "cpu":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    if major < _OLDEST_MAJOR:
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; "
            f"the kernels need {_OLDEST_MAJOR}.0 or newer"
        )
    return "sm80" if major == _OLDEST_MAJOR else "sm90"


def launch_of(op: str, device_class: DeviceClass, **sizes: int) -> Launch:
    """How `op` is launched for a call of these sizes."""
    entries = (_tried.get() or table_of(device_class))[op]
    return next(entry.launch for entry in entries if entry.serves(sizes))


def start_kernel(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
    """Launch a kernel, or note it within `noting`."""
    notes = _notes.get()
    if notes is None:
        kernel[grid](*arguments, **options)
    else:
        notes.launches.append(Started(kernel=kernel, arguments=arguments, options=options))


@contextmanager
def noting(device_class: DeviceClass) -> Iterator[Notes]:
    """Within, what would be launched on a device of the class is noted instead: results stay uninitialised."""
    notes = Notes(device_class=device_class)
    before = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(before)


@contextmanager
def trying(table: Table) -> Iterator[None]:
    """Within, kernels are launched by this table, on whatever device."""
    before = _tried.set(table)
    try:
        yield
    finally:
        _tried.reset(before)


@cache
def table_of(device_class: DeviceClass) -> Table:
    """The committed table of a class."""
    return parsed((TABLES / f"{device_class}.json").read_text())


def parsed(text: str) -> Table:
    """A table from its JSON. Raises `ValueError` on a kernel whose last launch does not serve everything."""
    table = {op: tuple(_entry(record) for record in records) for op, records in json.loads(text).items()}
    for op, entries in table.items():
        if not entries or entries[-1].up_to:
            raise ValueError(f"the last launch of {op} is missing or has limits; it must serve every size")
    return table


def written(table: Table) -> str:
    """The JSON of a table, one launch a line."""
    ops = []
    for op, entries in table.items():
        lines = ",\n".join(f"    {json.dumps(_record(entry))}" for entry in entries)
        ops.append(f"  {json.dumps(op)}: [\n{lines}\n  ]")
    return "{\n" + ",\n".join(ops) + "\n}\n"


def _entry(record: Mapping[str, Mapping[str, int]]) -> Entry:
    options = dict(record["launch"])
    num_warps, num_stages = options.pop("num_warps"), options.pop("num_stages")
    return Entry(up_to=record["up_to"], launch=Launch(tiles=options, num_warps=num_warps, num_stages=num_stages))


def _record(entry: Entry) -> dict[str, dict[str, int]]:
    return {"up_to": dict(entry.up_to), "launch": entry.launch.options}
