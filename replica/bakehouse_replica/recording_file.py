"""Tells other processes of this machine how far a replica has come in recording its decode steps.

A replica starts in a process of its own, and a start that says nothing looks like a hang. So it keeps a line of
text in a file beside the model's cached weights while it records; whoever waits for it may read that there.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

RECORDING_FILE = "recording.txt"  # of replicas that start together, the last one to write


@contextmanager
def recording_told(folder: Path) -> Iterator[Callable[[int, int], None]]:
    """Hands out what to call with how many decode steps are recorded, and of how many; the file goes at the end.

    Where it cannot be written the log says so, and nothing else is different.
    """
    path = folder / RECORDING_FILE

    def tell(n_done: int, n_total: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(f"captured {n_done} of {n_total} CUDA graphs")
        except OSError as error:
            logger.info("%s cannot be written, so nobody is told of graphs: %s", path, error)

    try:
        yield tell
    finally:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.info("%s cannot be removed: %s", path, error)
