"""The comparison with the definition notices what is broken on purpose: a mask, a stride, a table index."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import bakehouse_kernels
import pytest

PACKAGE = Path(bakehouse_kernels.__file__).parent
KERNEL = "triton/key_loop.py"

# What the kernel says, and what it is made to say; no mutation reads outside of the cache.
MUTATIONS = {
    "none": ("", ""),
    "a query sees the token after it": ("<= position_M[:, None])", "<= position_M[:, None] + 1)"),
    "blocks of all key heads are as far apart as those of one": ("(N_KV_HEADS * BLOCK_SIZE)", "BLOCK_SIZE"),
    "every block is taken for the first": ("blocks + key_L // BLOCK_SIZE", "blocks + key_L // BLOCK_SIZE * 0"),
}

# Compares once for each folder that holds a package, and prints for which the results are as defined.
COMPARE = """
import importlib, json, sys
import torch, triton

def is_as_defined(folder):
    for name in [name for name in sys.modules if name.startswith(("bakehouse_kernels", "tests."))]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    batches = importlib.import_module("tests.kernels.triton.attention_batches")
    assert sys.modules["bakehouse_kernels"].__file__.startswith(folder)
    chunks = ((3, 3), (1, 33))
    batch = batches.make_batch(torch.Generator().manual_seed(1), chunks, heads=(2, 2))
    return torch.allclose(batch.attend(), batch.expected(), atol=5e-6, rtol=2e-5)

print(json.dumps([is_as_defined(folder) for folder in sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def as_defined(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bool]:
    """Of each mutation, whether the results are those of the definition."""
    folders = []
    for index, (before, after) in enumerate(MUTATIONS.values()):
        folder = tmp_path_factory.mktemp(f"mutation{index}")
        shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        source = folder / PACKAGE.name / KERNEL
        text = source.read_text()
        assert before in text, f"{KERNEL} does not say {before!r} any more"
        source.write_text(text.replace(before, after) if before else text)
        folders.append(str(folder))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join((os.getcwd(), *sys.path))}
    program = [sys.executable, "-c", COMPARE, *folders]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return dict(zip(MUTATIONS, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("mutation", [name for name in MUTATIONS if name != "none"])
def test_a_broken_kernel_is_noticed(as_defined: dict[str, bool], mutation: str) -> None:
    assert not as_defined[mutation]


def test_a_kernel_that_is_not_broken_passes(as_defined: dict[str, bool]) -> None:
    assert as_defined["none"]
