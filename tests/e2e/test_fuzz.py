"""A fuzzer that knows nothing but our OpenAPI document, against a real server on a scripted model."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from servers import Server, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

MIN_CASES = 2000
RUN_TIMEOUT_S = 1200
SCRIPT = {
    "pieces": ["</s>", "bread", " and", " salt"],
    "eos": 0,
    "default": {"pieces": ["bread", " and", " salt"]},
    "max_model_len": 256,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fuzz")
    script = folder / "fuzzed.json"
    script.write_text(json.dumps(SCRIPT))
    with running(folder / "log", f"scripted:{script}") as ready:
        yield ready


def test_no_request_that_a_fuzzer_makes_is_answered_by_a_server_error(server: Server, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    fuzzer = str(Path(sys.executable).with_name("schemathesis"))
    phases = ["--phases", "examples,coverage,fuzzing", "--max-examples", "60", "--seed", "1", "--workers", "2"]
    checks = ["--checks", "not_a_server_error", "--continue-on-failure", "--request-timeout", "30"]
    outputs = ["--report", "json", "--report-json-path", str(report)]
    run = subprocess.run(
        [fuzzer, "run", f"{server.url}/openapi.json", *phases, *checks, *outputs],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        cwd=tmp_path,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    cases = json.loads(report.read_text())["test_cases"]
    print(cases)
    assert cases["generated"] >= MIN_CASES
    assert cases["with_failures"] == cases["errored"] == 0
    health = httpx.get(f"{server.url}/health", timeout=60).json()
    assert [replica["load"]["n_held_blocks"] for replica in health["replicas"]] == [0]
