"""What the scripts that measure quality say of the default model, on a text of 20k tokens."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "replica" / "benchmarks"


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 3 minutes on two quiet cores
@pytest.mark.parametrize(
    "script",
    [
        pytest.param("perplexity.py", id="bfloat16 and int8 cost little perplexity"),
        pytest.param("agreement.py", id="float32 draws the ids of the reference"),
    ],
)
def test_a_script_is_content(script: str) -> None:
    ran = subprocess.run(
        [sys.executable, BENCHMARKS / script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
