"""Fixtures that several folders of tests share."""

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

# Triton decides while it is imported, and again at each kernel, whether kernels are compiled or interpreted, and
# other packages import it, too (transformers' models do): so it is said before anything is imported. Here kernels
# are interpreted, on the CPU; tests of compiled ones start processes with TRITON_INTERPRET=0.
os.environ.setdefault("TRITON_INTERPRET", "1")

# What a shell starts in the background ignores Ctrl-C, and so would whatever tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


# The same examples each time, and as long for one as it takes: else a change fails by an example that it has
# nothing to do with, or because cores were busy for 0.2 s. `make test-all` looks for others.
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("others", settings.get_profile("same"), derandomize=False, print_blob=True)
settings.load_profile("same")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """Gives whole files to the processes of `pytest -n`, for what the tests of a module share."""
    return LoadFileScheduling(config, log)


def pytest_collection_finish() -> None:
    """Spare the garbage collector what stays to the end: with all of it, each full collection took 0.6 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with tokenizer and chat template, as a Hugging Face folder; nobody may change it."""
    from tiny_llama import write_tiny_llama  # here, because it loads torch and transformers: 3 s

    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
