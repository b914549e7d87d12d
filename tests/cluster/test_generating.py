"""`bakehouse generate` around the batch: its files and its words."""

import io
import json
from pathlib import Path

import pytest
from bakehouse_cluster.config import parse_config
from bakehouse_cluster.generating import generate
from bakehouse_replica.core.errors import StartupError
from rich.console import Console


def generated(source: Path, target: Path, model: str) -> str:
    file = io.StringIO()
    generate(parse_config({"model": {"source": model}}), source, target, Console(file=file, width=300))
    return file.getvalue()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "x"}\n')
    return path


def test_a_failure_before_the_first_answer_leaves_no_file(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    with pytest.raises(StartupError, match="there is no such file or folder"):
        generated(source, target, "./nowhere")
    assert not target.exists()


def test_a_failure_leaves_a_file_that_was_there(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_bytes(b"")
    with pytest.raises(StartupError):
        generated(source, target, "./nowhere")
    assert target.exists()


def test_one_answer_is_told_as_one(source: Path, tmp_path: Path) -> None:
    target, script = tmp_path / "out.jsonl", tmp_path / "script.json"
    script.write_text(json.dumps({"pieces": ["a", "b"], "default": {"pieces": ["b"]}}))
    first, second = (generated(source, target, f"scripted:{script}") for _ in range(2))
    assert f"1 line answered in {target}, 0 of them by an error" in first
    assert second == f"{target} holds the 1 answer already\n"
