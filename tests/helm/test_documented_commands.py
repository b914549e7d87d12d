"""What the pages tell to type is known to the real helm and kubectl."""

import re
import subprocess

import pytest
from charts import Helm
from documents import commands, page

PAGES = ["README.md", "helm/README.md", "docs/runbook.md", "docs/upgrades.md"]
FLAG = re.compile(r"(?:^|[\s,])(--?[a-zA-Z][\w-]*)")
# Those that take a value in the next word, so that what follows is a command's name.
BEFORE_THE_COMMAND = {"-n", "--namespace"}


def _said(helm: Helm, *words: str) -> str:
    done = subprocess.run([str(helm.folder / words[0]), *words[1:]], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


def _parts(program: str, words: list[str]) -> tuple[list[str], set[str]]:
    """The names of command and subcommand, and the flags, without what stands behind `--`."""
    words = words[1 : words.index("--")] if "--" in words else words[1:]
    plain = [
        word
        for before, word in zip([program, *words], words, strict=False)
        if not word.startswith("-") and before not in BEFORE_THE_COMMAND
    ]
    depth = (
        3 if plain[:2] == ["create", "secret"] else 2 if plain[0] in ("repo", "get") and program == "helm" else 1
    )
    return plain[:depth], {word.partition("=")[0] for word in words if FLAG.match(word)}


@pytest.mark.parametrize("program", ["helm", "kubectl"])
def test_every_command_and_option_that_the_pages_name_is_known(helm: Helm, program: str) -> None:
    common = _said(helm, "kubectl", "options") if program == "kubectl" else ""
    found = [words for path in PAGES for words in commands(page(path), program) if len(words) > 1]
    assert len(found) > 5
    for words in found:
        names, flags = _parts(program, words)
        text = _said(helm, program, *names, "--help")
        assert f"{program} {' '.join(names)}" in text, words  # and not the help of something above it
        assert not flags - set(FLAG.findall(text + common)), words
