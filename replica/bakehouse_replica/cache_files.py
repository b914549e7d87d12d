"""Files of the cache folder appear whole or not at all."""

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)


def write_whole(path: Path, write: Callable[[Path], None]) -> bool:
    """Let `write` fill a fresh file beside `path`, then put it in place at once; parent folders are made.

    A crash or a second writer leaves either the old file or a complete new one. Returns whether it worked: a
    cache that cannot be written (read-only home, full disk) costs time at the next start, never the service.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        temporary = Path(name)
        write(temporary)
        temporary.replace(path)
    except OSError as error:
        logger.warning("could not write %s to the cache: %s", path, error)
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        return False
    return True
