"""The benchmark of GPUs runs from end to end in small, on the CPU: the table last, JSON beside it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "replica" / "benchmarks"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "gpu.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env=environment,
    )


@pytest.mark.slow
def test_a_small_run_measures_every_section_and_ends_with_the_table(tmp_path: Path) -> None:
    done = run("--device", "cpu", "--tiny", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["problems"] == {}
    sections = found["sections"]
    assert all(one["is_good"] for one in sections["ops"]["checks"])
    for shape in ("llama-3-8b", "qwen3-0.6b"):
        steps = sections[f"steps-{shape}"]
        assert [(one["batch"], one["context"]) for one in steps["decode"]] == [(1, 20), (3, 20), (1, 60), (3, 60)]
        assert len(steps["prefill"]) == 4
        assert {"plan", "launch", "device", "sample (in device)", "publish"} <= steps["breakdown_ms"].keys()
        assert steps["served"]["n_output"] == sections[f"peer-{shape}"]["n_output"] == 3 * 6
    *_, last = done.stdout.strip().splitlines()
    assert "transformers with sdpa" in last
    assert last.endswith("times")


def test_a_part_of_it_checks_operations_and_times_a_shape(tmp_path: Path) -> None:
    done = run("--device", "cpu", "--tiny", "--out", str(tmp_path), "--only", "limits", "ops", "steps-qwen3-0.6b")
    assert done.returncode == 0, done.stdout + done.stderr
    sections = json.loads((tmp_path / "all.json").read_text())["sections"]
    assert len(sections["ops"]["checks"]) > 40
    assert all(one["is_good"] for one in sections["ops"]["checks"])
    assert len(sections["steps-qwen3-0.6b"]["decode"]) == 4
    assert sections["steps-llama-3-8b"] == {}
    assert "qwen3-0.6b   ms a decode step: plan" in done.stdout.strip().splitlines()[-1]


def test_a_section_that_fails_is_named_and_loses_no_other(tmp_path: Path) -> None:
    (tmp_path / "qwen3-0.6b").write_text("in the way of the folder")
    names = ("limits", "peer-qwen3-0.6b")
    done = run("--device", "cpu", "--tiny", "--out", str(tmp_path), "--only", *names)
    assert done.returncode == 1
    assert json.loads((tmp_path / "all.json").read_text())["problems"].keys() == {"peer-qwen3-0.6b"}
    assert "FAILED peer-qwen3-0.6b: FileExistsError" in done.stdout
    assert "TB/s" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_script_says_how_to_try_it(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path))
    assert done.returncode == 2
    assert "--device cpu --tiny" in done.stderr
