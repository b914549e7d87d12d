"""Compiles every kernel ahead for each class of GPUs and lists what it takes.

`python -m bakehouse_kernels.triton.aot` needs no GPU and prints JSON; with `--write` that becomes the committed
table of the version of triton that is installed (`aot_tables/`), which a test compares.
"""

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import triton

from bakehouse_kernels.triton.ahead import CAPABILITIES, usage_of
from bakehouse_kernels.triton.cases import ATTENTION, CASES, launches_of_case
from bakehouse_kernels.triton.launch import DeviceClass

TABLES = Path(__file__).with_name("aot_tables")

_N_PROCESSES = 2

Usages = dict[str, dict[str, int]]
"""By class, case and kernel: registers, spilled bytes, shared bytes."""


def table_path(version: str) -> Path:
    """The table of a version of triton: one for all that differ in the last number."""
    return TABLES / f"{'.'.join(version.split('.')[:2])}.json"


def usages() -> Usages:
    """What all kernels take, compiled anew or from Triton's cache."""
    jobs = [(name, device_class) for device_class in CAPABILITIES for name in (*ATTENTION, *CASES)]
    with ProcessPoolExecutor(_N_PROCESSES, mp_context=get_context("spawn")) as pool:
        return {key: usage for found in pool.map(_of_case, jobs) for key, usage in found.items()}


def table_text(found: Usages) -> str:
    """The table as it is committed, one kernel a line."""
    lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(usage)}" for key, usage in found.items())
    return f'{{\n  "triton": {json.dumps(triton.__version__)},\n  "kernels": {{\n{lines}\n  }}\n}}\n'


def _of_case(job: tuple[str, DeviceClass]) -> Usages:
    name, device_class = job
    return {
        f"{device_class} {name}: {one.name}": usage_of(one, device_class).record
        for one in launches_of_case(name, device_class)
    }


def main() -> None:
    """Print the table, or write it."""
    if triton.knobs.runtime.interpret:
        sys.exit("kernels are interpreted here, not compiled: unset TRITON_INTERPRET")
    text = table_text(usages())
    if sys.argv[1:] == ["--write"]:
        table_path(triton.__version__).write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
