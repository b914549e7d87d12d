"""Tells how far replicas have come in capturing CUDA graphs, which they do at each start on a GPU.

Replicas are processes of their own. While they record, they keep a line of text in a file beside the model's
cached weights (`bakehouse_replica.recording_file`); it is repeated here as it changes.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bakehouse_replica.recording_file import RECORDING_FILE

_POLL_S = 1.0


@contextmanager
def captures_told(note: Callable[[str], None], folder: Path, *, poll_s: float = _POLL_S) -> Iterator[None]:
    """Calls `note` with each new text of the file in `folder` that is written within the block."""
    path, begun_s, has_ended = folder / RECORDING_FILE, time.time(), threading.Event()

    def watch() -> None:
        told = ""
        while not has_ended.wait(poll_s):
            text = _text_since(path, begun_s)
            if text and text != told:
                told = text
                note(f"  {text}")

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        has_ended.set()
        watching.join()


def _text_since(path: Path, begun_s: float) -> str:
    """Empty where there is none, or one that a start has left behind which was killed."""
    try:
        return path.read_text() if path.stat().st_mtime >= begun_s else ""
    except FileNotFoundError:
        return ""
