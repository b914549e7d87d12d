"""`bakehouse chat` in a real pseudo-terminal, with a scripted model in the same process."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

TIMEOUT_S = 200.0
SCRIPT = {
    "pieces": ["</s>", "bread", " and", " salt", " \x1b[2J"],
    "eos": 0,
    "replies": [
        {"when": "user: *go on", "pieces": ["bread"] * 2000},
        {"when": "user: *hello", "pieces": ["bread", " \x1b[2J", " and", " salt"]},
    ],
    "default": {"pieces": ["bread"]},
    "step_ms": 2,
    "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:",
}


class Terminal:
    """A program that believes it talks with a person."""

    def __init__(self, *arguments: str) -> None:
        self._fd, child = pty.openpty()
        command = [sys.executable, "-m", "bakehouse_cluster.cli", *arguments]
        # A session of its own: Ctrl-C reaches it as the terminal's foreground group.
        self.process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, start_new_session=True)
        os.close(child)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, pattern: str) -> str:
        """What came up to the pattern, which is taken."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while (found := re.search(pattern, self.seen)) is None:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"{pattern!r} did not come; seen: {self.seen!r}"
            self.seen += os.read(self._fd, 65536).decode(errors="replace")
        taken, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return taken

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._fd)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    path = tmp_path / "talker.json"
    path.write_text(json.dumps(SCRIPT))
    opened = Terminal("chat", f"scripted:{path}", "--max-model-len", "4096")
    yield opened
    opened.close()


def test_a_conversation_is_streamed_broken_off_and_left(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    terminal.type("hello\r")
    answer = terminal.wait_for(r"bread.*salt\s+> ")
    assert "\x1b[2J" not in answer, "a model must not clear the screen"

    terminal.type("go on\r")
    terminal.wait_for("breadbread")
    os.killpg(terminal.process.pid, signal.SIGINT)
    terminal.wait_for(r"\(broken off\)\s+> ")

    terminal.type("/reset\r")
    terminal.wait_for("> ")
    terminal.type("and now\r")
    terminal.wait_for(r"now\s+bread\s+> ")
    terminal.type("\x04")
    assert terminal.process.wait(TIMEOUT_S) == 0


def test_a_line_that_nobody_answers_is_a_failure_where_nobody_watches() -> None:
    command = [sys.executable, "-m", "bakehouse_cluster.cli", "chat", "--url", "127.0.0.1:9"]
    run = subprocess.run(command, input="hi\n", capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert run.returncode == 1
    assert "no server answers at http://127.0.0.1:9" in run.stderr
