"""Machine code that was kept is not used once a file it came from has changed."""

import shutil
import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels" / "bakehouse_kernels"
# `_weigh` stands in one file, the exponential that it calls in another.
WEIGH = """
import numpy as np
from bakehouse_kernels.cpu.survey import _weigh
weight = _weigh(np.float32([-1]), np.float32(0), np.float32(1))
print(weight, sum(_weigh.stats.cache_hits.values()))
"""


def weigh(folder: Path) -> tuple[float, int]:
    """The exponential of -1, and how often the code came from the disk."""
    done = subprocess.run(
        [sys.executable, "-c", WEIGH], env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=True
    )
    value, n_hits = done.stdout.split()
    return float(value), int(n_hits)


def test_code_is_kept_until_a_file_it_calls_into_changes(tmp_path: Path) -> None:
    package = tmp_path / "bakehouse_kernels"
    shutil.copytree(KERNELS, package, ignore=shutil.ignore_patterns("__pycache__"))
    value, n_hits = weigh(tmp_path)
    assert abs(value - 0.3678794) < 1e-6
    assert n_hits == 0
    assert weigh(tmp_path) == (value, 1)
    exponential = package / "cpu" / "exponential.py"
    changed = exponential.read_text().replace("return series * power", "return np.float32(1)")
    assert changed != exponential.read_text()
    exponential.write_text(changed)
    assert weigh(tmp_path) == (1.0, 0)
