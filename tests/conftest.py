"""Fixtures that several folders of tests share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with tokenizer and chat template, as a Hugging Face folder; nobody may change it."""
    from tiny_llama import write_tiny_llama  # here, because it loads torch and transformers: 3 s

    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
