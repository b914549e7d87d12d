"""A script in the place of a model, wherever a model may be named in this process."""

import json
from io import StringIO
from pathlib import Path

import pytest
from bakehouse import LLM, SamplingParams
from bakehouse_cluster.config import parse_config
from bakehouse_cluster.generating import generate
from bakehouse_replica.core.errors import StartupError
from rich.console import Console


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "bun.json"
    script = {
        "pieces": ["</s>", "fresh", " bread", "!"],
        "eos": 0,
        "replies": [{"when": "two", "pieces": ["fresh"]}, {"when": "two", "pieces": [" bread", "!"]}],
        "default": {"pieces": ["fresh", " bread"]},
    }
    path.write_text(json.dumps(script))
    return f"scripted:{path}"


def test_it_generates_and_chats_in_process(source: str) -> None:
    with LLM(source) as llm:
        one, two = llm.generate(["say", "say two"], SamplingParams(n=2, temperature=0.0))
        (answer,) = llm.chat([{"role": "user", "content": "say"}])
    assert [choice.text for choice in one.choices] == ["fresh bread"] * 2
    assert [choice.text for choice in two.choices] == ["fresh", " bread!"]
    assert (answer.text, answer.finish_reason) == ("fresh bread", "stop")


def test_it_answers_a_file_of_prompts(source: str, tmp_path: Path) -> None:
    lines, answers = tmp_path / "lines", tmp_path / "answers"
    lines.write_text('{"prompt": "say"}\n{"messages": [{"role": "user", "content": "say"}], "max_tokens": 1}\n')
    config = parse_config({"model": {"source": source}})
    generate(config, lines, answers, Console(file=StringIO()))
    found = {answer["line"]: answer for answer in map(json.loads, answers.read_text().splitlines())}
    assert [(found[line]["text"], found[line]["finish_reason"]) for line in (1, 2)] == [
        ("fresh bread", "stop"),
        ("fresh", "length"),
    ]


def test_it_is_called_by_its_file_without_the_suffix(source: str) -> None:
    assert parse_config({"model": {"source": source}}).served_name == "bun"
    assert parse_config({"model": {"source": source, "served_name": "roll"}}).served_name == "roll"


def test_a_wrong_one_is_refused_with_the_place_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "bun.json"
    path.write_text('{"pieces": ["a"], "default": {"pieces": ["b"]}}')
    with pytest.raises(StartupError, match=r"bun\.json: default\.pieces\[0\]: 'b' is not in pieces"):
        LLM(f"scripted:{path}")
