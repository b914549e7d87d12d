"""Kernels compiled ahead for two generations of GPUs take no more than the committed table says."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import bakehouse_kernels
import pytest
import triton

TABLE = Path(bakehouse_kernels.__file__).parent / "triton" / "aot_table.json"
MORE_REGISTERS = 8  # registers are dealt out eight at a time; fewer change with any edit
# Of one program, by the CUDA C++ Programming Guide: the class of 8.x holds 8.6 and 8.9, which have less than 8.0.
SHARED_LIMITS = {"sm80": 99 << 10, "sm90": 227 << 10}


@pytest.fixture(scope="module")
def committed() -> dict[str, dict[str, int]]:
    table = json.loads(TABLE.read_text())
    if triton.__version__ != table["triton"]:
        pytest.skip(f"the table is for triton {table['triton']}; this is {triton.__version__}")
    kernels: dict[str, dict[str, int]] = table["kernels"]
    return kernels


def test_no_committed_kernel_spills_or_passes_the_devices_shared_memory(
    committed: dict[str, dict[str, int]],
) -> None:
    for name, usage in committed.items():
        assert usage["spilled_bytes"] == 0, name
        assert usage["shared_bytes"] <= SHARED_LIMITS[name.split()[0]], name


def test_every_kernel_is_compiled_for_both_generations(committed: dict[str, dict[str, int]]) -> None:
    kernels = {tuple(name.replace(": ", " ").rsplit(" ", 1)) for name in committed}
    of_class = {
        device_class: {
            (case.split(" ", 1)[1], kernel) for case, kernel in kernels if case.startswith(device_class)
        }
        for device_class in SHARED_LIMITS
    }
    assert of_class["sm80"] == of_class["sm90"]
    assert {kernel for _, kernel in of_class["sm90"]} >= {"attend_ragged", "draw", "int8_matmul", "rope_write"}


@pytest.mark.timeout(900)  # 65 s of two processors, more where others use them
def test_compiled_anew_no_kernel_takes_more(
    committed: dict[str, dict[str, int]],
    compiled_environment: Mapping[str, str],
    tmp_path: Path,
) -> None:
    environment = {
        **compiled_environment,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    program = [sys.executable, "-m", "bakehouse_kernels.triton.aot"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["kernels"]
    assert found.keys() == committed.keys(), "write the table anew: python -m bakehouse_kernels.triton.aot --write"
    worse = {
        name: (usage, committed[name])
        for name, usage in found.items()
        if usage["spilled_bytes"] > 0
        or usage["registers"] > committed[name]["registers"] + MORE_REGISTERS
        or usage["shared_bytes"] > committed[name]["shared_bytes"]
    }
    assert not worse, "\n".join(f"{name}: {now} where the table has {then}" for name, (now, then) in worse.items())


def test_an_interpreted_process_says_that_it_compiles_nothing() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, "-m", "bakehouse_kernels.triton.aot"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        "kernels are interpreted here, not compiled: unset TRITON_INTERPRET\n",
    )
