"""Machine code that was kept is not used once a file it came from has changed."""

import shutil
import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels" / "bakehouse_kernels"
# `_gate` stands in one file, the exponential that it calls in another.
GATE = """
import numpy as np
from bakehouse_kernels.cpu.products import _gate
out = np.zeros(1, np.float32)
_gate(np.float32([-1]), np.float32([1]), out)
print(out[0], sum(_gate.stats.cache_hits.values()))
"""


def gate(folder: Path) -> tuple[float, int]:
    """The activation of -1, and how often the code came from the disk."""
    done = subprocess.run(
        [sys.executable, "-c", GATE], env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=True
    )
    value, n_hits = done.stdout.split()
    return float(value), int(n_hits)


def test_code_is_kept_until_a_file_it_calls_into_changes(tmp_path: Path) -> None:
    package = tmp_path / "bakehouse_kernels"
    shutil.copytree(KERNELS, package, ignore=shutil.ignore_patterns("__pycache__"))
    value, n_hits = gate(tmp_path)
    assert abs(value + 0.2689414) < 1e-6
    assert n_hits == 0
    assert gate(tmp_path) == (value, 1)
    exponential = package / "cpu" / "exponential.py"
    changed = exponential.read_text().replace("return series * power", "return np.float32(1)")
    assert changed != exponential.read_text()
    exponential.write_text(changed)
    assert gate(tmp_path) == (-0.5, 0)
