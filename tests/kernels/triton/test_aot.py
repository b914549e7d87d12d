"""Kernels compiled ahead for two generations of GPUs take no more than the committed tables say."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest
import triton
from bakehouse_kernels.triton import aot

VERSIONS = ("3.6", "3.7")  # what `dispatch` asks for
MORE_REGISTERS = 8  # registers are dealt out eight at a time; fewer change with any edit
# Of one program, by the CUDA C++ Programming Guide: the class of 8.x holds 8.6 and 8.9, which have less than 8.0.
SHARED_LIMITS = {"sm80": 99 << 10, "sm90": 227 << 10}


def committed(version: str) -> dict[str, dict[str, int]]:
    path = aot.table_path(version)
    assert path.is_file(), f"no table for triton {version}: python -m bakehouse_kernels.triton.aot --write"
    table = json.loads(path.read_text())
    assert aot.table_path(table["triton"]) == path, f"{path.name} names triton {table['triton']}"
    kernels: dict[str, dict[str, int]] = table["kernels"]
    return kernels


@pytest.mark.parametrize("version", VERSIONS)
def test_no_committed_kernel_spills_or_passes_the_devices_shared_memory(version: str) -> None:
    for name, usage in committed(version).items():
        assert usage["spilled_bytes"] == 0, name
        assert usage["shared_bytes"] <= SHARED_LIMITS[name.split()[0]], name


def test_every_kernel_is_compiled_by_all_versions_and_for_both_generations() -> None:
    first, second = (committed(version).keys() for version in VERSIONS)
    assert first == second
    kernels = {tuple(name.replace(": ", " ").rsplit(" ", 1)) for name in first}
    of_class = {
        device_class: {
            (case.split(" ", 1)[1], kernel) for case, kernel in kernels if case.startswith(device_class)
        }
        for device_class in SHARED_LIMITS
    }
    assert of_class["sm80"] == of_class["sm90"]
    assert {kernel for _, kernel in of_class["sm90"]} >= {"attend_ragged", "draw", "int8_matmul", "rope_write"}


@pytest.mark.timeout(900)  # 40 s of two processors, more where others use them
def test_compiled_anew_no_kernel_takes_more(compiled_environment: Mapping[str, str]) -> None:
    expected = committed(triton.__version__)
    program = [sys.executable, "-m", "bakehouse_kernels.triton.aot"]
    done = subprocess.run(program, env=compiled_environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["kernels"]
    assert found.keys() == expected.keys(), "write the table anew: python -m bakehouse_kernels.triton.aot --write"
    worse = {
        name: (usage, expected[name])
        for name, usage in found.items()
        if usage["spilled_bytes"] > 0
        or usage["registers"] > expected[name]["registers"] + MORE_REGISTERS
        or usage["shared_bytes"] > expected[name]["shared_bytes"]
    }
    assert not worse, "\n".join(f"{name}: {now} where the table has {then}" for name, (now, then) in worse.items())


def test_after_its_warm_up_a_server_compiles_nothing(compiled_environment: Mapping[str, str]) -> None:
    program = [sys.executable, "-m", "tests.kernels.triton.specialisations"]
    done = subprocess.run(program, env=compiled_environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    in_tables = {name.rsplit(" ", 1)[1] for name in committed(triton.__version__)}
    assert set(answer["kernels"]) == in_tables
    assert answer["compiled_while_serving"] == []


def test_an_interpreted_process_says_that_it_compiles_nothing() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    with pytest.raises(SystemExit, match="kernels are interpreted here, not compiled: unset TRITON_INTERPRET"):
        aot.main()
