"""What a page in Markdown says that can be checked: its anchors, its code, the commands in it."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`]+)`", re.DOTALL)
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_SUBSTITUTION = re.compile(r"\$\(((?:[^()']|'[^']*')*)\)")
_SHELL = ("sh", "bash", "console")


def page(path: str) -> str:
    """The text of a file of this repository."""
    return (ROOT / path).read_text()


def anchors(text: str) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = _HEADING.findall(_FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code(text: str) -> list[str]:
    """What stands in backticks, on one line each, and the blocks."""
    return [block for _, _, block in _FENCE.findall(text)] + _spans(text)


def _spans(text: str) -> list[str]:
    return [" ".join(span.split()) for span in _CODE.findall(_FENCE.sub("", text))]


def commands(text: str, program: str) -> list[list[str]]:
    """The words of each call of a program, wherever it lies, in blocks of shell and between backticks."""
    shell = [block for _, language, block in _FENCE.findall(text) if language in _SHELL]
    found = []
    for script in [*shell, *_spans(text)]:
        for words in _simple_commands(script):
            if Path(words[0]).name == program:
                found.append(words)
    return found


def _simple_commands(script: str) -> Iterator[list[str]]:
    """The words of each command of a script, and of its substitutions, which are one word outside."""
    while (inner := _SUBSTITUTION.search(script)) is not None:
        yield from _simple_commands(inner[1])
        script = script[: inner.start()] + "FILLED_IN" + script[inner.end() :]
    for line in re.sub(r"\\?\n +(?=-|\\)|\\\n", " ", script).splitlines():
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=";|&<>")
        lexer.whitespace_split = True
        words: list[str] = []
        try:
            tokens = list(lexer)
        except ValueError:  # no shell: prose, or another language
            continue
        for token in [*tokens, ";"]:
            if re.fullmatch(r"[;|&<>]+", token):
                if words:
                    yield words
                words = []
            elif words or not re.fullmatch(r"\w+=.*", token):
                words.append(token)
