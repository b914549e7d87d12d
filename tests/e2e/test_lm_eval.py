"""lm-eval as its users run it, against a running server: likelihoods by `echo` and `logprobs` over real HTTP."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import Server, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

TASKS = Path(__file__).parent / "lm_eval"
RUN_TIMEOUT_S = 300


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("serve") / "log", "--max-model-len", "2048") as ready:
        yield ready


def test_a_task_over_a_local_file_runs_end_to_end(server: Server, tmp_path: Path) -> None:
    model_args = f"base_url={server.url}/v1/completions,model=smollm2,num_concurrent=2,max_length=2048"
    tasks = ["--tasks", "capitals", "--include_path", ".", "--output_path", str(tmp_path), "--log_samples"]
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "lm_eval",
            "run",
            "--model",
            "local-completions",
            "--model_args",
            model_args,
            *tasks,
        ],
        cwd=TASKS,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    (report,) = tmp_path.rglob("results_*.json")
    results = json.loads(report.read_text())["results"]["capitals"]
    assert results["acc,none"] >= 5 / 6
    (samples,) = tmp_path.rglob("samples_capitals_*.jsonl")
    likelihoods = [json.loads(line)["resps"] for line in samples.read_text().splitlines()]
    assert len(likelihoods) == 6
    assert all(float(choice[0][0]) < 0 for sample in likelihoods for choice in sample)
