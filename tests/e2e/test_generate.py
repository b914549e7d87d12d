"""`bakehouse generate` as its users see it: a process, files, and a second run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

RUN_TIMEOUT_S = 180


def generate(input_path: Path, output_path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bakehouse_cluster.cli", "generate"]
    options = ["--input", str(input_path), "--output", str(output_path), "--max-model-len", "512"]
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)


def test_a_file_is_answered_and_a_second_run_answers_only_what_is_missing(tmp_path: Path) -> None:
    question = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    options = {"max_tokens": 16, "temperature": 0}
    body = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 4}
    lines = [
        question | options,
        {"prompt": "The capital of France is"} | options,
        {"custom_id": "rye", "method": "POST", "url": "/v1/completions", "body": body},
        {"prompt": "x", "max_tokens": -1},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))

    first = generate(source, target)
    assert first.returncode == 0, first.stderr
    answers = {
        record.get("line", record.get("custom_id")): record
        for record in map(json.loads, target.read_text().splitlines())
    }
    assert set(answers) == {1, 2, "rye", 4}
    assert "Paris" in answers[1]["text"]
    assert "Paris" in answers[2]["text"]
    assert answers["rye"]["response"]["body"]["usage"]["completion_tokens"] == 4
    assert "max_tokens" in answers[4]["error"]["message"]

    kept = target.read_text().splitlines(keepends=True)[:2]
    target.write_text("".join(kept) + '{"line": 9, "te')
    second = generate(source, target)
    assert second.returncode == 0, second.stderr
    again = target.read_text().splitlines(keepends=True)
    assert again[:2] == kept
    assert len(again) == 4

    third = generate(source, target)
    assert third.returncode == 0
    assert "holds all 4 answers already" in third.stderr
    assert target.read_text().splitlines(keepends=True) == again


def test_a_missing_input_is_one_line(tmp_path: Path) -> None:
    answer = generate(tmp_path / "absent.jsonl", tmp_path / "out.jsonl")
    assert answer.returncode != 0
    assert answer.stderr.startswith("bakehouse: ")
    assert answer.stderr.count("\n") == 1
    assert "absent.jsonl" in answer.stderr
