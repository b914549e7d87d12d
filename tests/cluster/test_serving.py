"""What `bakehouse serve` prints to be copied."""

import sys
from pathlib import Path

import pytest
from bakehouse_cluster.serving import shell_name


def test_a_program_is_named_such_that_a_shell_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, other = tmp_path / ".venv" / "bin" / "bakehouse", tmp_path / "bin" / "bakehouse"
    for path in (program, other):
        path.parent.mkdir(parents=True)
        path.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert shell_name(".venv/bin/bakehouse") == str(program)
    monkeypatch.setenv("PATH", str(other.parent))
    assert shell_name(str(program)) == str(program), "another one is not meant"
    monkeypatch.setenv("PATH", str(program.parent))
    assert shell_name(str(program)) == "bakehouse"
    assert shell_name("/x/bakehouse_cluster/cli.py") == f"{sys.executable} -m bakehouse_cluster.cli"
